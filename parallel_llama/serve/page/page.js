// The chat page: what its buttons and keys do.

import { Conversation } from "./conversation.js";
import { streamCompletion, Trouble } from "./completion.js";
import { copy } from "./markdown.js";
import { Settings } from "./settings.js";
import { count, isWell, shapeWords, stateWords, StatusPanel, watchStatus } from "./status.js";
import { forgetAll, load, save } from "./stored.js";
import { answerElement, editElement, growWithText, questionElement, showAnswer } from "./turns.js";

const BARS = 8; // of the mark: one for each rank, up to these

const byId = (id) => document.getElementById(id);
const scroller = byId("conversation");
const messages = byId("messages");
const question = byId("question");
const panel = byId("panel");
const drawer = matchMedia("(max-width: 70rem)"); // as in page.css

const conversation = new Conversation();
const settings = new Settings(byId("settings"));
const statusPanel = new StatusPanel(panel);

let model = ""; // its id, once the server has said it
let status = null;
let hasStatus = true;
let answering = null; // the AbortController of the answer that is being written
let following = true; // the end of the conversation stays in view

// ---- the conversation ----

function showMessages(from = 0) {
  while (messages.children.length > from) messages.lastElementChild.remove();
  for (const message of conversation.messages.slice(from)) {
    messages.append(message.role === "user" ? questionElement(message) : answerElement(message));
  }
  byId("welcome").hidden = conversation.messages.length > 0;
  showContext();
}

function ask(text, at = conversation.messages.length) {
  if (!text.trim()) return;
  answering?.abort();
  conversation.cut(at);
  const message = conversation.ask(text.trim());
  showMessages(at);
  answer(message);
}

function regenerate(at) {
  answering?.abort();
  conversation.cut(at);
  const message = conversation.beginAnswer();
  showMessages(at);
  answer(message);
}

async function answer(message) {
  const element = messages.lastElementChild;
  const stop = new AbortController();
  setAnswering(stop);
  following = true;
  const draw = oncePerFrame(() => showAnswer(element, message));
  try {
    await receive(message, stop.signal, draw);
  } catch (error) {
    fail(message, error, stop.signal);
  }
  showAnswer(element, message);
  conversation.save();
  if (answering === stop) setAnswering(null);
  showContext();
  followEnd();
}

async function receive(message, signal, draw) {
  const started = performance.now();
  const seen = { n: 0, first: 0, last: 0 };
  const body = {
    model: await modelId(),
    messages: conversation.request(settings.system),
    ...settings.sampling,
  };
  for await (const event of streamCompletion(body, signal)) {
    if (event.content) {
      message.content += event.content;
      seen.last = performance.now();
      seen.first ||= seen.last;
      seen.n += 1;
      draw();
    }
    if (event.finish_reason) message.ended = event.finish_reason;
    message.measures = measures(started, seen, event.usage);
  }
  message.ended ??= "stop";
}

// Until the server has counted tokens, its chunks stand for them.
function measures(started, { n, first, last }, usage) {
  const n_tokens = usage?.completion_tokens ?? n;
  return {
    n_tokens,
    first_token_s: first && (first - started) / 1000,
    tokens_per_s: n_tokens > 1 && last > first ? (1000 * (n_tokens - 1)) / (last - first) : 0,
    n_context: usage?.total_tokens,
  };
}

function fail(message, error, signal) {
  if (signal.aborted) {
    message.ended = "stopped";
    return;
  }
  model = ""; // another server may answer next time
  const known = error instanceof Trouble;
  message.ended = "failed";
  message.trouble = {
    what: known ? error.what : "The page could not show the answer.",
    why: known ? error.why : String(error),
  };
}

async function modelId() {
  if (!model) {
    try {
      const response = await fetch("v1/models");
      model = (await response.json()).data[0].id;
    } catch {
      return undefined; // the answer's own request says what is wrong
    }
    showModel();
  }
  return model;
}

function setAnswering(stop) {
  answering = stop;
  byId("send").hidden = Boolean(stop);
  byId("stop").hidden = !stop;
  byId("mark").classList.toggle("busy", Boolean(stop));
}

function oncePerFrame(draw) {
  let asked = false;
  return () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      draw();
      followEnd();
    });
  };
}

function followEnd() {
  if (following) scroller.scrollTop = scroller.scrollHeight;
  showToEnd();
}

function showToEnd() {
  byId("to-end").hidden = following || scroller.scrollHeight <= scroller.clientHeight;
}

function showContext() {
  const n = conversation.messages.at(-1)?.measures?.n_context;
  const most = status?.max_model_len;
  byId("context").textContent = n ? `${count(n)}${most ? ` of ${count(most)}` : ""} tokens` : "";
}

// ---- what a message's buttons do ----

const DEEDS = {
  edit: (at) => edit(at),
  regenerate: (at) => regenerate(at),
  copy: (at, button) => {
    const body = messages.children[at].querySelector(".body");
    copy(conversation.messages[at].content, button, body);
  },
};

messages.addEventListener("click", ({ target }) => {
  const button = target.closest("[data-do]");
  const at = [...messages.children].findIndex((element) => element.contains(button));
  if (button && at >= 0) DEEDS[button.dataset.do]?.(at, button);
});

function edit(at) {
  const element = messages.children[at];
  const { content } = conversation.messages[at];
  const form = editElement(content, conversation.messages.length - at - 1);
  const field = form.querySelector("textarea");
  const close = () => {
    form.replaceWith(...kept);
    element.querySelector("[data-do=edit]").focus();
  };
  const kept = [...element.querySelectorAll(".words, .tools")];
  kept[0].replaceWith(form);
  kept[1].remove();
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    if (field.value.trim()) {
      ask(field.value, at);
      question.focus();
    }
  });
  form.querySelector("[data-do=cancel]").addEventListener("click", close);
  sendOnEnter(field, form);
  field.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    event.stopPropagation();
    close();
  });
  field.focus();
  field.setSelectionRange(field.value.length, field.value.length);
}

// ---- the question ----

function sendOnEnter(field, form) {
  field.addEventListener("keydown", (event) => {
    // An input method's Enter takes its proposal.
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    form.requestSubmit();
  });
}

growWithText(question);
sendOnEnter(question, byId("composer"));

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (answering) return;
  ask(question.value);
  question.value = "";
  question.dispatchEvent(new Event("input"));
});

byId("stop").addEventListener("click", () => {
  answering?.abort();
  question.focus();
});

byId("new-chat").addEventListener("click", () => {
  answering?.abort();
  conversation.cut(0);
  showMessages();
  showToEnd();
  question.focus();
});

byId("welcome").addEventListener("click", ({ target }) => {
  if (target.matches("button")) ask(target.textContent);
});

byId("to-end").addEventListener("click", () => {
  following = true;
  followEnd();
});

scroller.addEventListener("scroll", () => {
  following = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 48;
  showToEnd();
});

document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || byId("settings").open) return;
  if (drawer.matches && !panel.hidden) togglePanel();
  else answering?.abort();
});

// ---- settings ----

byId("open-settings").addEventListener("click", () => byId("settings").showModal());
byId("reset-settings").addEventListener("click", () => settings.reset());
byId("forget").addEventListener("click", () => {
  if (!confirm("Forget this conversation and the settings?")) return;
  answering?.abort();
  conversation.messages = [];
  forgetAll();
  location.reload();
});
// The answer so far, where the page goes away in the middle of it.
addEventListener("pagehide", () => answering && conversation.save());

// ---- ranks ----

function openPanel(open) {
  panel.hidden = !open;
  const covers = open && drawer.matches;
  byId("backdrop").hidden = !covers;
  for (const part of [document.querySelector(".bar"), scroller, byId("composer")]) part.inert = covers;
  byId("toggle-panel").ariaExpanded = String(open);
  document.body.classList.toggle("with-panel", open && !drawer.matches);
}

function placePanel() {
  openPanel(hasStatus && !drawer.matches && load("panel", true));
}

function togglePanel() {
  const open = panel.hidden;
  if (!drawer.matches) save("panel", open);
  openPanel(open);
  byId(open ? "close-panel" : "toggle-panel").focus();
}

byId("toggle-panel").addEventListener("click", togglePanel);
byId("close-panel").addEventListener("click", togglePanel);
byId("backdrop").addEventListener("click", togglePanel);
drawer.addEventListener("change", placePanel);

function showStatus(now) {
  status = now;
  byId("toggle-panel").hidden = false;
  statusPanel.show(now);
  settings.showDefaults(now?.defaults ?? {});
  byId("notice").hidden = isWell(now);
  const words = `${stateWords(now)}.`;
  byId("notice").textContent = isWell(now) ? "" : words[0].toUpperCase() + words.slice(1);
  showModel();
  showMark(now?.ranks ?? []);
  showContext();
}

function showMark(ranks) {
  const mark = byId("mark");
  const bars = ranks.length ? ranks.slice(0, BARS) : [{ up: true }, { up: true }];
  while (mark.children.length > bars.length) mark.lastElementChild.remove();
  while (mark.children.length < bars.length) mark.append(document.createElement("i"));
  bars.forEach((rank, index) => mark.children[index].classList.toggle("lost", !rank.up));
}

function showModel() {
  const name = model || status?.model || "";
  byId("model").textContent = name;
  byId("welcome-model").textContent = [name, shapeWords(status)].filter(Boolean).join(" · ");
  document.title = name ? `${name} · parallel_llama` : "parallel_llama";
}

async function start() {
  showMessages();
  followEnd();
  placePanel();
  modelId();
  const wanted = () => !panel.hidden || !isWell(status);
  await watchStatus(wanted, showStatus);
  hasStatus = false;
  status = null;
  byId("toggle-panel").hidden = true;
  byId("notice").hidden = true;
  openPanel(false);
}

start();
