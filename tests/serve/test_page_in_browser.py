"""The page in a real browser, with a server of fixed answers."""

import copy
import os
import re
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright import sync_api
from playwright.sync_api import Page, expect
from stand_in_server import MODEL, StandIn, stand_in_server

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
if CHROMIUM is None and "CI" not in os.environ:
    pytest.skip("needs Chromium: apt install chromium", allow_module_level=True)

expect.set_options(timeout=30_000)
DESKTOP, PHONE = (1280, 800), (360, 740)

# The contrast of every visible text, with the text.
# Source: the relative luminance and contrast ratio of WCAG 2.2.
CONTRASTS = """
() => {
  const channels = (color) => color.match(/[\\d.]+/g).map(Number);
  const linear = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  const luminance = (rgb) => {
    const [r, g, b] = rgb.map((c) => linear(c / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    for (; element; element = element.parentElement) {
      const [r, g, b, alpha = 1] = channels(getComputedStyle(element).backgroundColor);
      if (alpha === 1) return [r, g, b];
    }
    return [255, 255, 255];
  };
  const hasText = (e) => [...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim());
  const seen = [...document.querySelectorAll("body *")].filter((e) => e.checkVisibility());
  return seen.filter(hasText).map((e) => {
    const text = luminance(channels(getComputedStyle(e).color).slice(0, 3));
    const back = luminance(behind(e));
    return [(Math.max(text, back) + 0.05) / (Math.min(text, back) + 0.05), e.textContent.trim()];
  });
}
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    assert CHROMIUM, "CI is set, so these tests must run: apt install chromium"
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM)
        yield running
        running.close()


@pytest.fixture
def server() -> Iterator[StandIn]:
    with stand_in_server() as running:
        running.status = copy.deepcopy(running.status)
        yield running


@pytest.fixture
def opened(browser: Any, server: StandIn) -> Iterator[Callable[..., Page]]:
    """`opened(size)` opens the page in a new window, and fails if its scripts fail."""
    faults: list[str] = []
    contexts = []

    def hear(message: Any) -> None:
        if message.type == "error" and "Failed to load resource" not in message.text:
            faults.append(message.text)

    def open_page(size: tuple[int, int] = DESKTOP, **settings: Any) -> Page:
        viewport = {"width": size[0], "height": size[1]}
        context = browser.new_context(viewport=viewport, **settings)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(30_000)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", hear)
        page.goto(server.url)
        expect(page.locator("#model")).to_have_text(MODEL)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not faults


@pytest.fixture
def page(opened: Callable[..., Page]) -> Page:
    return opened()


def ask(page: Page, text: str) -> None:
    page.locator("#question").fill(text)
    page.keyboard.press("Enter")


def ask_and_wait(page: Page, text: str) -> None:
    ask(page, text)
    expect(page.locator("#send")).to_be_visible()
    expect(page.locator("#stop")).to_be_hidden()


def asked(server: StandIn) -> list[str]:
    return [message["content"] for message in server.requests[-1]["messages"]]


def test_an_answer_streams_and_ends_with_its_speed(page, server):
    ask_and_wait(page, "hello")
    answer = page.locator(".answer")
    expect(answer.locator(".body")).to_have_text("Hello! What would you like to know?")
    measures = answer.locator(".measures").inner_text()
    assert re.fullmatch(r"5 tokens · [\d.,]+ tokens/s · first token after \d\.\d\d s", measures)
    expect(answer).to_have_attribute("aria-busy", "false")
    expect(page.locator("#context")).to_have_text("25 of 8,192 tokens")
    request = server.requests[0]
    assert request["model"] == MODEL and request["stream_options"] == {"include_usage": True}


def test_partial_answer_is_shown_and_kept_when_stopped(page):
    ask(page, "count")
    answer = page.locator(".answer")
    expect(answer.locator(".body")).to_contain_text("0 1 2")
    expect(answer).to_have_attribute("aria-busy", "true")
    page.keyboard.press("Escape")
    expect(answer.locator(".measures")).to_contain_text("stopped")
    expect(answer.locator(".body")).to_contain_text("0 1 2")
    ask(page, "count")
    page.locator("#stop").click()
    expect(answer.last.locator(".measures")).to_contain_text("stopped")
    expect(page.locator("#question")).to_be_focused()


def test_finished_paragraph_is_not_rerendered_while_streaming(page):
    """Otherwise every token would clear the reader's selection."""
    ask(page, "count")
    first = page.locator(".answer .body em")
    first.evaluate("element => (element.seen = true)")
    expect(page.locator(".answer .body")).to_contain_text("19 20 21")
    assert first.evaluate("element => element.seen")


def test_markdown_becomes_elements_and_code_can_be_copied(opened):
    page = opened(permissions=["clipboard-read", "clipboard-write"])
    ask_and_wait(page, "markdown")
    body = page.locator(".answer .body")
    for selector in ("h1", "strong", "pre code", "ul li", "table td"):
        expect(body.locator(selector).first).to_be_visible()
    body.get_by_role("button", name="Copy").click()
    expect(body.get_by_role("button", name="Copied")).to_be_visible()
    copied = page.evaluate("navigator.clipboard.readText()")
    assert (
        copied.strip()
        == "def leap(year):\n    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)"
    )


def test_a_hostile_answer_runs_and_loads_nothing(page, server):
    elsewhere: list[str] = []
    page.on("request", lambda request: elsewhere.append(request.url))
    ask_and_wait(page, "hostile")
    body = page.locator(".answer .body")
    expect(body).to_contain_text("<script>")
    for link in body.locator("a").all():
        link.hover()
    assert [link.get_attribute("href") for link in body.locator("a").all()] == [
        None, None, None, "http://elsewhere.invalid/p.png", "https://example.org/",
    ]  # fmt: skip
    assert body.locator("img, script, svg, iframe, style, [onerror], [onmouseover]").count() == 0
    assert page.evaluate("window.ran") is None
    assert all(url.startswith(server.url) for url in elsewhere)


def test_formulas_are_rendered_but_amounts_of_money_are_not(page):
    ask_and_wait(page, "formulas")
    body = page.locator(".answer .body")
    expect(body.locator("math")).to_have_count(4)
    expect(body.locator("code.formula")).to_have_count(0)
    expect(body).to_contain_text("for $5 and $10, or $3.")
    expect(body.locator("code")).to_have_text("$code$")
    expect(body.locator("mfrac")).to_have_count(2)
    expect(body.locator('math[display="block"]')).to_have_count(2)
    assert body.locator(".boxed").evaluate("e => getComputedStyle(e).borderTopStyle") == "solid"
    cells = body.locator("mtd:not(:empty)")
    alignments = cells.evaluate_all("all => all.map((cell) => getComputedStyle(cell).textAlign)")
    assert alignments == ["right", "left"] * 2


def test_code_is_coloured_by_its_language(page):
    ask_and_wait(page, "markdown")
    code = page.locator(".answer pre code")
    expect(code.locator(".hljs-keyword").first).to_have_text("def")
    colors = {
        code.locator(name).first.evaluate("e => getComputedStyle(e).color")
        for name in (".hljs-keyword", ".hljs-title", ".hljs-number")
    }
    assert len(colors) == 3


def test_katex_and_highlight_are_loaded_only_when_they_are_wanted(page):
    loaded: list[str] = []
    page.on("request", lambda request: loaded.append(request.url.rpartition("/")[2]))
    ask_and_wait(page, "hello")
    assert not {"katex.min.js", "highlight.min.js"} & set(loaded)
    for text in ("markdown", "formulas"):
        ask_and_wait(page, text)
    expect(page.locator("math").first).to_be_visible()
    expect(page.locator(".hljs-keyword").first).to_be_visible()
    assert loaded.count("katex.min.js") == loaded.count("highlight.min.js") == 1


def test_hostile_formulas_and_code_run_load_and_style_nothing(page, server):
    elsewhere: list[str] = []
    page.on("request", lambda request: elsewhere.append(request.url))
    ask_and_wait(page, "hostile formulas")
    body = page.locator(".answer .body")
    expect(body.locator("math")).not_to_have_count(0)
    expect(body.locator(".hljs-string")).to_contain_text("<img src=x")
    expect(body.locator("code.formula").first).to_contain_text("def")  # KaTeX refuses it
    assert body.locator("img, script, math a, [href], [style], annotation").count() == 0
    assert page.evaluate("window.ran") is None
    assert all(url.startswith(server.url) for url in elsewhere)
    assert body.bounding_box()["height"] < 5000


@pytest.mark.parametrize(
    ("script", "directive"),
    [
        (
            "document.body.innerHTML = '<img src=x onerror=window.ran=1>'",
            "require-trusted-types-for",
        ),
        ("link.setAttribute('onclick', 'window.ran = 1')", "require-trusted-types-for"),
        ("link.href = 'javascript:window.ran = 1'; link.click()", "script-src-elem"),
        ("new Image().src = 'http://elsewhere.invalid/'", "img-src"),
        ("fetch('http://elsewhere.invalid/').catch(() => {})", "connect-src"),
    ],
)
def test_content_security_policy_blocks_script_and_requests(browser, server, script, directive):
    page = browser.new_page()
    page.goto(server.url)
    refused = page.evaluate(
        f"""() => new Promise((resolve) => {{
            const heard = (event) => resolve(event.effectiveDirective);
            document.addEventListener("securitypolicyviolation", heard);
            const link = document.body.appendChild(document.createElement("a"));
            try {{ {script} }} catch {{}}
            setTimeout(() => resolve("nothing was refused"), 2000);
        }})"""
    )
    assert refused == directive
    assert page.evaluate("window.ran") is None
    page.close()


@pytest.mark.parametrize(("question", "text"), [("deep", ">" * 24_000), ("slow", "*a_" * 8_000)])
def test_answer_that_marked_cannot_parse_is_shown_as_plain_text(page, question, text):
    """Regression: the first text overflowed marked's stack, and the second took 33 s."""
    ask_and_wait(page, question)
    assert page.locator(".answer .body .plain").text_content() == text
    page.reload()
    ask_and_wait(page, "hello")
    expect(page.locator(".answer .body").last).to_contain_text("Hello!")


def test_reasoning_is_folded_until_it_is_opened(page):
    ask_and_wait(page, "think")
    expect(page.locator(".answer .body")).to_have_text("Then that.")
    expect(page.locator(".thinking .prose")).to_be_hidden()
    page.locator(".thinking summary").click()
    expect(page.locator(".thinking .prose")).to_have_text("First this.")


def test_an_edited_question_drops_what_follows(page, server):
    for text in ("one", "two", "three"):
        ask_and_wait(page, text)
    assert asked(server) == ["one", "Answer 1.", "two", "Answer 2.", "three"]
    page.locator(".question").nth(1).get_by_role("button", name="Edit").click()
    field = page.get_by_label("Edit your question")
    expect(field).to_be_focused()
    expect(page.locator(".dropped")).to_have_text("Sending deletes the 3 messages below")
    page.keyboard.press("Escape")
    expect(page.locator(".answer")).to_have_count(3)
    page.locator(".question").nth(1).get_by_role("button", name="Edit").click()
    field.fill("zwei")
    page.keyboard.press("Enter")
    expect(page.locator(".answer .body").nth(1)).to_have_text("Answer 4.")
    assert asked(server) == ["one", "Answer 1.", "zwei"]
    expect(page.locator(".words")).to_have_text(["one", "zwei"])


def test_regenerate_asks_the_last_question_again(page, server):
    for text in ("one", "two"):
        ask_and_wait(page, text)
    page.get_by_role("button", name="Regenerate").click()
    expect(page.locator(".answer .body")).to_have_text(["Answer 1.", "Answer 3."])
    assert asked(server) == ["one", "Answer 1.", "two"]


@pytest.mark.parametrize(
    ("question", "what", "why"),
    [
        ("refuse 400", "refused the request", "the server said 400."),
        ("refuse 401", "requires an API key", "the server said 401."),
        ("refuse 429", "The server is busy", "the server said 429. Try again in 7 seconds."),
        ("refuse 503", "The model is not ready", "the server said 503. Try again in 7 seconds."),
        ("refuse 500", "could not answer", "the server said 500."),
        ("fail", "stopped with an error", "rank 1 is lost"),
        ("break", "closed before the answer was complete", ""),
    ],
)
def test_an_error_shows_in_place_with_a_retry(page, server, question, what, why):
    ask_and_wait(page, question)
    trouble = page.get_by_role("alert")
    expect(trouble.locator(".what")).to_contain_text(what)
    expect(trouble.locator(".why")).to_contain_text(why)
    trouble.get_by_role("button", name="Try again").click()
    expect(page.locator("#send")).to_be_visible()
    assert [request["messages"] for request in server.requests] == [
        [{"role": "user", "content": question}]
    ] * 2


@pytest.mark.parametrize("panel", ["open", "closed"])
def test_unreachable_server_is_reported_and_can_be_retried(page, panel):
    """While the panel is closed, the page does not poll a healthy server."""
    if panel == "closed":
        page.get_by_role("button", name="Ranks").click()
    page.context.set_offline(True)
    ask_and_wait(page, "hello")
    expect(page.get_by_role("alert")).to_contain_text("The server is not reachable.")
    expect(page.locator("#notice")).to_contain_text("The server does not answer.")
    page.context.set_offline(False)
    expect(page.locator("#notice")).to_be_hidden()
    page.get_by_role("button", name="Try again").click()
    expect(page.locator(".answer .body")).to_have_text("Hello! What would you like to know?")


def test_a_question_without_an_answer_is_left_out_of_the_next_request(page, server):
    """Many chat templates refuse two questions in a row."""
    for text in ("one", "refuse 503", "two"):
        ask_and_wait(page, text)
    assert asked(server) == ["one", "Answer 1.", "two"]


def test_a_conversation_outlasts_a_reload_until_a_new_one_begins(page):
    ask_and_wait(page, "hello")
    page.reload()
    expect(page.locator(".answer .body")).to_have_text("Hello! What would you like to know?")
    page.get_by_role("button", name="New chat").click()
    expect(page.locator(".answer")).to_have_count(0)
    page.reload()
    expect(page.get_by_role("heading", name="What would you like to know?")).to_be_visible()


def test_all_stored_data_can_be_deleted_while_an_answer_streams(page):
    ask(page, "count")
    expect(page.locator(".answer .body")).to_contain_text("0 1 2")
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Seed").fill("7")
    page.on("dialog", lambda dialog: dialog.accept())
    with page.expect_navigation():
        page.get_by_role("button", name="Delete all chats and settings").click()
    expect(page.locator("#welcome")).to_be_visible()
    kept = page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}])")
    assert "count" not in kept and "seed" not in kept


def test_changed_settings_are_sent_and_unset_ones_are_not(page, server):
    page.get_by_role("button", name="Settings").click()
    assert page.get_by_label("Temperature").get_attribute("placeholder") == "0.2"
    page.get_by_label("System prompt").fill("Be brief.")
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Min p").fill("0.05")
    page.get_by_label("Max tokens").fill("64")
    page.keyboard.press("Escape")
    page.reload()
    ask_and_wait(page, "hello")
    request = server.requests[-1]
    assert request["messages"][0] == {"role": "system", "content": "Be brief."}
    assert (request["temperature"], request["min_p"], request["max_tokens"]) == (0, 0.05, 64)
    assert not {"top_p", "top_k", "seed"} & request.keys()


def test_invalid_setting_is_not_sent_and_keeps_the_dialog_open(page, server):
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Top p").fill("3")
    page.get_by_role("button", name="Done").click()
    expect(page.locator("#settings")).to_be_visible()
    page.reload()
    ask_and_wait(page, "hello")
    assert "top_p" not in server.requests[-1]
    page.get_by_role("button", name="Settings").click()
    page.get_by_role("button", name="Reset").click()
    page.get_by_role("button", name="Done").click()
    expect(page.locator("#settings")).to_be_hidden()


@pytest.mark.parametrize(
    ("label", "value", "words"),
    [
        ("Top p", "3", "Must be a number from 0 to 1."),
        ("Top k", "1.5", "Must be a whole number of at least 0."),
        ("Max tokens", "0", "Must be a whole number of at least 1."),
        ("Seed", "-1", "Must be a whole number from 0 to 9,007,199,254,740,991."),
    ],
)
def test_invalid_setting_shows_which_values_are_valid(page, label, value, words):
    page.get_by_role("button", name="Settings").click()
    field = page.get_by_label(label)
    expect(field).to_have_accessible_description("")
    field.fill(value)
    expect(page.get_by_text(words)).to_be_visible()
    expect(field).to_have_accessible_description(words)
    expect(field).to_have_attribute("aria-invalid", "true")
    field.fill("1")
    expect(page.locator(".fault:visible")).to_have_count(0)
    expect(field).not_to_have_attribute("aria-invalid", "true")


def test_invalid_setting_is_discarded_when_the_dialog_is_closed(page):
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Top p").fill("0.5")
    page.get_by_label("Top p").fill("7")
    page.keyboard.press("Escape")
    page.keyboard.press("Escape")
    expect(page.locator("#settings")).to_be_hidden()
    page.get_by_role("button", name="Settings").click()
    expect(page.get_by_label("Top p")).to_have_value("")
    expect(page.locator(".fault:visible")).to_have_count(0)


def test_max_tokens_defaults_to_1024(page, server):
    ask_and_wait(page, "hello")
    assert server.requests[-1]["max_tokens"] == 1024
    page.get_by_role("button", name="Settings").click()
    assert page.get_by_label("Max tokens").get_attribute("placeholder") == "1024"


def test_shift_enter_starts_a_new_line(page, server):
    page.keyboard.type("first")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("second")
    page.keyboard.press("Enter")
    expect(page.locator(".answer .body")).to_have_text("Answer 1.")
    assert asked(server) == ["first\nsecond"]


def test_panel_shows_lost_ranks_and_stalled_steps(page, server):
    panel = page.get_by_role("complementary", name="Ranks")
    expect(panel.locator("#state")).to_have_text("ready")
    expect(panel.locator("#speed")).to_have_text("120.1")
    expect(panel.locator("#rank-list .rank")).to_have_text(["Rank 0", "Rank 1"])
    expect(page.locator("#mark i")).to_have_count(2)
    server.status["ranks"][1]["up"] = False
    server.status["n_running"], server.status["step_age_s"] = 2, 12.0
    expect(panel.locator("#state")).to_have_text("1 of 2 ranks lost")
    expect(panel.locator("#rank-list .rank").nth(1)).to_have_text("Rank 1 is lost")
    expect(panel.locator("#stalled")).to_have_text("No step for 12 seconds.")


def test_panel_shows_current_and_last_minute_speed(page):
    speeds = page.locator("#panel .speeds > div")
    expect(speeds).to_have_text([re.compile(r"Now\s*120\.1"), re.compile(r"Last minute\s*34\.5")])


def test_panel_shows_resident_reserved_and_gpu_memory(page, server):
    row = page.locator("#rank-list li").first
    expect(row.locator(".resident")).to_have_text("505 MiB")
    expect(row.locator(".reserved")).to_have_text("385 MiB")  # 265 of weights, 120 of KV cache
    widths = [
        row.locator(f".{name} i").evaluate_all("all => all.map((bar) => bar.style.width)")
        for name in ("resident-bar", "reserved-bar")
    ]
    assert [[round(float(width[:-1])) for width in bar] for bar in widths] == [[100], [52, 24]]
    expect(row.locator(".on-gpu")).to_be_hidden()
    server.status["ranks"][0]["cuda_bytes"] = 20 << 30
    expect(row.locator(".on-gpu")).to_have_text(re.compile(r"On the GPU\s*20\.0 GiB"))


def test_page_reports_that_the_model_is_loading(page, server):
    server.status = {
        "state": "loading",
        "model": MODEL,
        "kv": None,
        "ranks": None,
        "defaults": None,
    }
    expect(page.locator("#notice")).to_have_text("Loading the model.")
    expect(page.locator("#speed")).to_have_text("–")


def test_the_page_works_without_status(server, opened):
    server.status = None
    page = opened()
    ask_and_wait(page, "hello")
    expect(page.locator(".answer .body")).to_have_text("Hello! What would you like to know?")
    expect(page.locator("#panel")).to_be_hidden()
    expect(page.locator("#toggle-panel")).to_be_hidden()
    expect(page.locator("#notice")).to_be_hidden()


def test_a_phone_shows_the_panel_as_a_drawer_and_never_scrolls_sideways(opened):
    page = opened(PHONE, has_touch=True, is_mobile=True)
    ask_and_wait(page, "markdown")
    ask_and_wait(page, "word" * 100)
    for element in ("document.documentElement", "document.querySelector('main')"):
        assert page.evaluate(f"{element}.scrollWidth") == PHONE[0]
    expect(page.locator("#panel")).to_be_hidden()
    page.get_by_role("button", name="Ranks").click()
    expect(page.locator("#panel")).to_be_visible()
    expect(page.get_by_role("button", name="Close")).to_be_focused()
    assert page.locator("#panel").bounding_box()["width"] < PHONE[0]
    page.keyboard.press("Escape")
    expect(page.locator("#panel")).to_be_hidden()
    expect(page.get_by_role("button", name="Ranks")).to_be_focused()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_text_has_a_contrast_of_at_least_4_5(opened, scheme):
    page = opened(color_scheme=scheme)
    for text in ("markdown", "refuse 503"):
        ask_and_wait(page, text)
    contrasts = page.evaluate(CONTRASTS)
    page.get_by_role("button", name="Settings").click()
    contrasts += page.evaluate(CONTRASTS)
    assert len(contrasts) > 40
    assert not [(ratio, text) for ratio, text in contrasts if ratio < 4.5]
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(20, 24, 26)"
    assert dark == (scheme == "dark")


@pytest.mark.parametrize("motion", ["reduce", "no-preference"])
def test_reduced_motion_disables_all_animations(opened, motion):
    page = opened(reduced_motion=motion)
    ask(page, "count")
    expect(page.locator(".answer .body")).to_contain_text("0 1 2")
    moving = page.evaluate("document.getAnimations().length")
    assert (moving == 0) == (motion == "reduce")


def titles(page: Page) -> sync_api.Locator:
    return page.locator("#chat-list .title")


def menu(page: Page, title: str, choice: str) -> None:
    page.get_by_role("button", name=f"More for “{title}”").click()
    page.locator("#chat-menu").get_by_role("button", name=choice, exact=True).click()


def other_tab(page: Page, url: str) -> Page:
    tab = page.context.new_page()
    tab.set_default_timeout(30_000)
    tab.goto(url)
    expect(tab.locator("#model")).to_have_text(MODEL)
    return tab


def kept(page: Page) -> str:
    text: str = page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}])")
    return text


def test_chats_are_kept_in_a_list_sorted_by_last_use(page, server):
    for text in ("hello", "one", "two"):
        page.get_by_role("button", name="New chat").click()
        ask_and_wait(page, text)
    expect(titles(page)).to_have_text(["two", "one", "hello"])
    titles(page).nth(2).click()
    expect(page.locator(".answer .body")).to_have_text("Hello! What would you like to know?")
    expect(page.get_by_role("button", name="hello", exact=True)).to_have_attribute(
        "aria-current", "true"
    )
    expect(page.locator("#question")).to_be_focused()
    expect(page).to_have_title(f"hello · {MODEL} · parallel_llama")
    ask_and_wait(page, "three")
    assert asked(server)[0] == "hello"
    expect(titles(page)).to_have_text(["hello", "two", "one"])
    page.reload()
    expect(page.locator(".words")).to_have_text(["hello", "three"])


def test_an_empty_chat_is_not_kept(page):
    page.get_by_role("button", name="New chat").click()
    page.get_by_role("button", name="New chat").click()
    page.reload()
    expect(page.locator("#no-chats")).to_have_text("No chats yet.")
    assert "parallel_llama.chat." not in kept(page)


def test_conversation_stored_by_older_pages_becomes_a_chat(page):
    page.evaluate(
        """() => localStorage.setItem("parallel_llama.conversation", JSON.stringify([
            {role: "user", content: "old question"},
            {role: "assistant", content: "old *answer*", ended: "stop", measures: {n_tokens: 3}},
            {role: "user", content: "without an answer"},
            {role: "assistant", content: "", ended: "failed", trouble: {what: "Oh", why: "no"}},
        ]))"""
    )
    page.evaluate("sessionStorage.clear()")
    page.reload()
    expect(titles(page)).to_have_text("old question")
    expect(page.locator(".words")).to_have_text(["old question", "without an answer"])
    expect(page.locator(".answer .body em")).to_have_text("answer")
    expect(page.get_by_role("alert")).to_contain_text("Oh")
    page.reload()
    expect(titles(page)).to_have_text("old question")
    assert "parallel_llama.conversation" not in kept(page)


def test_tabs_with_two_chats_do_not_overwrite_each_other(page, server):
    ask_and_wait(page, "one")
    tab = other_tab(page, server.url)
    tab.get_by_role("button", name="New chat").click()
    ask_and_wait(tab, "two")
    ask_and_wait(page, "more of one")
    ask_and_wait(tab, "more of two")
    for each, words in ((page, "one"), (tab, "two")):
        expect(titles(each)).to_have_text(["two", "one"])
        each.reload()
        expect(each.locator(".words")).to_have_text([words, f"more of {words}"])


def test_tabs_with_the_same_chat_keep_the_turns_of_both(page, server):
    ask_and_wait(page, "hello")
    tab = other_tab(page, server.url)
    expect(tab.locator(".words")).to_have_text("hello")
    ask(page, "count")
    expect(tab.locator(".words")).to_have_text(["hello", "count"])
    expect(tab.locator(".answer").nth(1)).to_contain_text("0 1 2")  # streamed by the first tab
    ask_and_wait(tab, "think")
    page.keyboard.press("Escape")
    for each in (page, tab):
        expect(each.locator(".words")).to_have_text(["hello", "count", "think"])
        expect(each.locator(".answer").nth(1)).to_contain_text("stopped")
        expect(each.locator(".answer").nth(2)).to_contain_text("Then that.")
    page.reload()
    expect(page.locator(".words")).to_have_text(["hello", "count", "think"])


def test_turn_stored_by_another_tab_without_an_event_is_kept(page):
    """Another tab may close right after its change, and a tab gets no event for its own changes."""
    ask_and_wait(page, "hello")
    page.evaluate(
        """() => {
          const key = Object.keys(localStorage).find((key) => key.includes(".chat."));
          const record = JSON.parse(localStorage.getItem(key));
          const answer = { content: "of it", ended: "stop" };
          record.turns.push({ ...record.turns[0], id: "other", question: "other tab", answer });
          localStorage.setItem(key, JSON.stringify(record));
        }"""
    )
    ask_and_wait(page, "one")
    page.reload()
    expect(page.locator(".words")).to_have_text([re.compile("hello|other tab")] * 2 + ["one"])
    expect(page.locator(".words", has_text="other tab")).to_have_count(1)


def test_an_edit_in_one_tab_drops_the_turns_in_the_other(page, server):
    for text in ("one", "two"):
        ask_and_wait(page, text)
    tab = other_tab(page, server.url)
    tab.get_by_role("button", name="Edit").first.click()
    tab.get_by_label("Edit your question").fill("eins")
    tab.keyboard.press("Enter")
    for each in (page, tab):
        expect(each.locator(".words")).to_have_text("eins")
        expect(each.locator(".answer .body")).to_have_text("Answer 3.")


def test_chat_states_merge_to_the_same_result_in_any_order(page):
    """Three tabs ask, answer and edit; any order of merges, with repeats, gives one state."""
    states = page.evaluate(
        """async () => {
          const { Conversation, conversationOf } = await import("./page/conversation.js");
          const copy = (each) => conversationOf(JSON.parse(JSON.stringify(each)));
          const tabs = [new Conversation({ id: "c" })];
          tabs[0].ask("first");
          tabs[0].ask("second");
          tabs.push(copy(tabs[0]), copy(tabs[0]));
          for (const [index, tab] of tabs.entries()) {
            tab.ask(`of ${index}`);
            tab.turns[0].answer = { content: "x".repeat(index + 1) };
            tab.touch(tab.turns[0]);
          }
          tabs[1].ask("an edit", 1);
          const orders = [[0, 1, 2], [2, 1, 0], [1, 0, 2, 0, 1], [2, 0, 1, 1], [0, 2, 1, 2]];
          return orders.map((order) => {
            const [first, ...rest] = order.map((index) => copy(tabs[index]));
            for (const each of rest) first.merge(each);
            first.removed.sort();
            first.used = 0;
            return JSON.stringify(first);
          });
        }"""
    )
    assert len(set(states)) == 1
    questions = re.findall(r'"question":"([^"]*)"', states[0])
    assert questions[0] == "first" and sorted(questions[1:]) == ["an edit", "of 0", "of 2"]


def test_an_answer_goes_on_while_another_chat_is_open(page):
    ask(page, "count")
    expect(page.locator(".answer .body")).to_contain_text("0 1 2")
    page.get_by_role("button", name="New chat").click()
    expect(page.locator("#send")).to_be_visible()
    expect(page.locator("#chat-list .writing")).to_be_visible()
    ask_and_wait(page, "hello")
    expect(page.locator(".answer .body")).to_have_text("Hello! What would you like to know?")
    titles(page).nth(1).click()
    expect(page.locator("#stop")).to_be_visible()
    expect(page.locator(".answer .body")).to_contain_text("39 40 41")
    page.keyboard.press("Escape")
    expect(page.locator(".answer")).to_contain_text("stopped")
    expect(page.locator("#chat-list .writing:visible")).to_have_count(0)


def test_undo_restores_a_deleted_chat(page):
    ask_and_wait(page, "hello")
    menu(page, "hello", "Delete")
    expect(page.locator("#welcome")).to_be_visible()
    expect(titles(page)).to_have_count(0)
    assert "hello" not in kept(page)
    expect(page.locator("#toast")).to_contain_text("Deleted “hello”.")
    page.get_by_role("button", name="Undo").click()
    expect(page.locator("#toast")).to_be_hidden()
    expect(page.locator(".words")).to_have_text("hello")
    page.reload()
    expect(page.locator(".words")).to_have_text("hello")


def test_undo_button_disappears_after_ten_seconds(page):
    page.clock.install()
    ask(page, "hello")
    page.clock.run_for(1000)
    expect(page.locator("#send")).to_be_visible()
    menu(page, "hello", "Delete")
    page.mouse.move(1, 1)
    page.clock.run_for(9_000)
    expect(page.get_by_role("button", name="Undo")).to_be_visible()
    page.clock.run_for(2_000)
    expect(page.get_by_role("button", name="Undo")).to_be_hidden()


def test_undo_restores_all_deleted_chats(page):
    for text in ("one", "two"):
        page.get_by_role("button", name="New chat").click()
        ask_and_wait(page, text)
    page.get_by_role("button", name="Delete all").click()
    expect(page.locator("#no-chats")).to_have_text("No chats yet.")
    expect(page.locator("#toast")).to_contain_text("Deleted 2 chats.")
    assert "parallel_llama.chat." not in kept(page)
    page.get_by_role("button", name="Undo").click()
    expect(titles(page)).to_have_text(["two", "one"])
    assert kept(page).count("parallel_llama.chat.") == 2


def test_a_chat_that_another_tab_deletes_stays_deleted(page, server):
    ask(page, "count")
    expect(page.locator(".answer .body")).to_contain_text("0 1 2")
    tab = other_tab(page, server.url)
    menu(tab, "count", "Delete")
    expect(page.locator("#toast")).to_contain_text("deleted in another tab")
    expect(page.locator("#welcome")).to_be_visible()
    ask_and_wait(page, "hello")
    for each in (page, tab):
        expect(titles(each)).to_have_text("hello")


def test_a_chat_is_renamed_with_the_keyboard(page, server):
    ask_and_wait(page, "hello")
    tab = other_tab(page, server.url)
    more = page.get_by_role("button", name="More for")
    more.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Rename")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.locator("#chat-menu")).to_be_hidden()
    expect(more).to_be_focused()
    for key, title in (("Escape", "hello"), ("Enter", "<b>A name")):
        page.keyboard.press("Enter")
        page.keyboard.press("Enter")
        expect(page.get_by_label("Title of the chat")).to_be_focused()
        page.keyboard.type("<b>A name")
        page.keyboard.press(key)
        expect(titles(page)).to_have_text(title)
        expect(page.get_by_role("button", name=f"More for “{title}”")).to_be_focused()
    expect(titles(tab)).to_have_text("<b>A name")
    page.reload()
    expect(titles(page)).to_have_text("<b>A name")


def test_search_finds_titles_and_texts(page):
    for text in ("hello", "one"):
        page.get_by_role("button", name="New chat").click()
        ask_and_wait(page, text)
    search = page.get_by_label("Search chats")
    search.fill("ONE")
    expect(titles(page)).to_have_text("one")
    expect(page.locator(".found:visible")).to_have_count(0)
    search.fill("you like")
    expect(titles(page)).to_have_text("hello")
    expect(page.locator(".found")).to_have_text("…What would you like to know?")
    search.fill("none of them")
    expect(titles(page)).to_have_count(0)
    expect(page.locator("#no-chats")).to_have_text("Nothing found.")
    search.fill("")
    expect(titles(page)).to_have_text(["one", "hello"])


def test_chats_are_exported_and_imported(page, opened):
    for text in ("hello", "one"):
        page.get_by_role("button", name="New chat").click()
        ask_and_wait(page, text)
    with page.expect_download() as markdown:
        menu(page, "hello", "Export as Markdown")
    assert markdown.value.suggested_filename == "hello.md"
    assert markdown.value.path().read_text() == (
        "# hello\n\n## Question\n\nhello\n\n## Answer\n\nHello! What would you like to know?\n"
    )
    with page.expect_download() as one:
        menu(page, "hello", "Export as JSON")
    with page.expect_download() as every:
        page.get_by_role("button", name="Export all").click()
    elsewhere = opened()
    expect(elsewhere.get_by_role("button", name="Export all")).to_be_hidden()
    for download, expected in (
        (one, ["hello"]),
        (every, ["one", "hello"]),
        (one, ["one", "hello"]),
    ):
        elsewhere.locator("#import-file").set_input_files(download.value.path())
        expect(titles(elsewhere)).to_have_text(expected)
    expect(elsewhere.locator("#toast")).to_contain_text("Imported one chat.")
    elsewhere.reload()
    titles(elsewhere).nth(1).click()
    expect(elsewhere.locator(".answer .body")).to_have_text("Hello! What would you like to know?")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not valid JSON"),
        ('{"conversations": []}', "not exported by this page"),
        (
            '{"format": "parallel_llama.conversations", "conversations": [{"id": "a", "used": 1,'
            ' "turns": [{"id": "b", "at": 1, "version": 1, "question": 7}]}]}',
            "damaged",
        ),
    ],
)
def test_importing_an_invalid_file_is_refused(page, text, words):
    file = {"name": "a.json", "mimeType": "application/json", "buffer": text.encode()}
    page.locator("#import-file").set_input_files(file)
    expect(page.locator("#toast")).to_contain_text(words)
    expect(page.get_by_role("button", name="Undo")).to_be_hidden()
    expect(titles(page)).to_have_count(0)


def test_full_storage_is_reported_and_unsaved_turns_are_kept(page):
    ask_and_wait(page, "one")
    page.evaluate(
        """() => {
          for (let size = 1 << 22; size >= 1; size >>= 1) {
            try {
              for (let n = 0; ; n++) localStorage.setItem(`filler-${size}-${n}`, "x".repeat(size));
            } catch {}
          }
        }"""
    )
    words = page.get_by_text("This browser did not save the last change")
    expect(words).to_be_hidden()
    ask_and_wait(page, "hello")
    expect(words).to_be_visible()
    page.get_by_role("button", name="New chat").click()
    titles(page).first.click()
    expect(page.locator(".words")).to_have_text(["one", "hello"])
    page.evaluate(
        """() => Object.keys(localStorage).filter((key) => key.startsWith("filler"))
            .forEach((key) => localStorage.removeItem(key))"""
    )
    ask_and_wait(page, "two")
    expect(words).to_be_hidden()
    page.reload()
    expect(page.locator(".words")).to_have_text(["one", "hello", "two"])


def test_the_page_works_without_storage(page):
    page.add_init_script(
        """for (const name of ["localStorage", "sessionStorage"]) {
          Object.defineProperty(window, name, { get() { throw new Error("switched off"); } });
        }"""
    )
    page.reload()
    ask_and_wait(page, "hello")
    expect(page.get_by_text("This browser did not save the last change")).to_be_visible()
    page.get_by_role("button", name="New chat").click()
    ask_and_wait(page, "one")
    expect(titles(page)).to_have_text(["one", "hello"])


def test_a_phone_shows_the_chats_as_a_drawer(opened):
    page = opened((390, 844), has_touch=True, is_mobile=True)
    ask_and_wait(page, "hello " * 30)
    page.get_by_role("button", name="New").click()
    ask_and_wait(page, "one")
    expect(page.locator("#chats")).to_be_hidden()
    page.get_by_role("button", name="Chats").click()
    expect(page.get_by_role("button", name="Close")).to_be_focused()
    assert page.locator("#chats").bounding_box()["width"] < 390
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    page.get_by_role("button", name="More for “one”").click()
    page.keyboard.press("Escape")
    expect(page.locator("#chat-menu")).to_be_hidden()
    expect(page.locator("#chats")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#chats")).to_be_hidden()
    expect(page.get_by_role("button", name="Chats")).to_be_focused()
    page.get_by_role("button", name="Chats").click()
    titles(page).nth(1).click()
    expect(page.locator("#chats")).to_be_hidden()
    expect(page.locator(".words")).to_contain_text("hello")
    page.get_by_role("button", name="Ranks").click()
    expect(page.locator("#panel")).to_be_visible()
    page.get_by_role("button", name="Close").click()


def test_the_list_of_chats_can_be_hidden(page):
    page.get_by_role("button", name="Chats").click()
    expect(page.locator("#chats")).to_be_hidden()
    page.reload()
    expect(page.locator("#panel")).to_be_visible()
    expect(page.locator("#chats")).to_be_hidden()
    page.get_by_role("button", name="Chats").click()
    expect(page.locator("#chats")).to_be_visible()


def test_continue_extends_a_truncated_answer_in_place(page, server):
    ask_and_wait(page, "cut")
    answer = page.locator(".answer")
    expect(answer.locator(".measures")).to_contain_text("cut off at the token limit")
    page.get_by_role("button", name="Continue").click()
    expect(answer.locator("pre code")).to_have_text("def f():\n    return 7\n")
    expect(answer.locator(".measures")).to_have_text(re.compile(r"^6 tokens .* s$"))
    expect(page.get_by_role("button", name="Continue")).to_be_hidden()
    request = server.requests[-1]
    assert request["continue_final_message"] and request["add_generation_prompt"] is False
    assert request["messages"] == [
        {"role": "user", "content": "cut"},
        {"role": "assistant", "content": "```python\ndef f():"},  # as the server trims it
    ]
    page.reload()
    expect(answer.locator("pre code")).to_have_text("def f():\n    return 7\n")


def test_continue_is_hidden_when_the_context_is_full(page):
    ask_and_wait(page, "full")
    expect(page.locator(".measures")).to_contain_text("cut off: the maximum length is reached")
    expect(page.get_by_role("button", name="Continue")).to_be_hidden()


def test_a_continuation_that_fails_keeps_the_answer(page, server):
    ask_and_wait(page, "cut and fail")
    page.get_by_role("button", name="Continue").click()
    trouble = page.get_by_role("alert")
    expect(trouble).to_contain_text("stopped with an error")
    expect(page.locator(".answer .body")).to_have_text("Half an")
    trouble.get_by_role("button", name="Try again").click()
    expect(page.locator("#send")).to_be_visible()
    assert [request.get("continue_final_message") for request in server.requests] == [
        None,
        True,
        True,
    ]
    assert asked(server) == ["cut and fail", "Half an"]


@pytest.mark.parametrize("text", ["line\n" * 100, "words " * 500])
def test_a_long_question_is_folded(page, server, text):
    ask_and_wait(page, text)
    words = page.locator(".words")
    more = page.get_by_role("button", name="Show more")
    expect(more).to_have_attribute("aria-expanded", "false")
    low = words.bounding_box()["height"]
    assert low < 250
    more.click()
    assert words.bounding_box()["height"] > 1.3 * low
    page.get_by_role("button", name="Show less").click()
    assert words.bounding_box()["height"] == low
    assert asked(server) == [text.strip()]
    page.get_by_role("button", name="Edit").click()
    expect(page.get_by_label("Edit your question")).to_have_value(text.strip())
    page.keyboard.press("Escape")
    expect(page.get_by_role("button", name="Show more")).to_be_visible()


def test_too_long_question_is_reported_and_not_sent(page, server):
    page.locator("#question").fill("word " * 9000)
    warning = page.locator("#room")
    words = "Your question has 9,000 tokens. The server accepts at most 8,191. Shorten it."
    expect(warning).to_have_text(words)
    page.keyboard.press("Enter")
    expect(page.locator("#question")).not_to_have_value("")
    assert not server.requests
    page.locator("#question").fill("hello")
    expect(warning).to_be_hidden()
    ask_and_wait(page, "hello")
    page.locator("#question").fill("word " * 9000)
    expect(warning).to_contain_text("This chat, with your question, has 9,008 tokens.")
    page.get_by_role("button", name="New chat").click()
    expect(warning).to_have_text(words)
    assert len(server.requests) == 1


def test_too_long_pasted_question_is_not_sent_on_enter(page, server):
    """Enter is pressed before the page has counted the tokens."""
    ask(page, "word " * 9000)
    expect(page.locator("#room")).to_contain_text("has 9,000 tokens")
    expect(page.locator("#question")).not_to_have_value("")
    assert not server.requests


def test_too_long_edit_is_reported_and_not_sent(page, server):
    ask_and_wait(page, "hello")
    page.get_by_role("button", name="Edit").click()
    page.get_by_label("Edit your question").fill("word " * 9000)
    page.keyboard.press("Enter")
    expect(page.locator(".edit .notice")).to_contain_text("has 9,000 tokens")
    assert len(server.requests) == 1


def test_max_tokens_is_limited_to_the_remaining_context(page, server):
    """Regression: a question was refused if the default limit of new tokens did not fit too."""
    page.locator("#question").fill("word " * 8092)
    expect(page.locator("#room")).to_have_text("Only 100 tokens are left for the answer.")
    page.keyboard.press("Enter")
    expect(page.locator(".answer .body")).to_have_text("Answer 1.")
    assert server.requests[0]["max_tokens"] == 100
    page.get_by_role("button", name="New chat").click()
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Max tokens").fill("6000")
    page.keyboard.press("Escape")
    ask_and_wait(page, "w " * 3000)
    assert server.requests[1]["max_tokens"] == 8192 - 3000


def test_a_short_question_is_not_counted_by_the_server(page, server):
    page.locator("#question").fill("word " * 500)
    page.wait_for_timeout(600)
    page.keyboard.press("Enter")
    expect(page.locator(".answer .body")).to_have_text("Answer 1.")
    assert server.n_tokenized == 0
