"""lm-evaluation-harness, unmodified, over HTTP and in one process, on this project's own prose."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from served import Served
from smollm2 import parallel_llama
from tiny_folder import TEMPLATE

from parallel_llama.errors import UsageError
from parallel_llama.files.model_files import find_model
from parallel_llama.request import SamplingParams
from parallel_llama.tokenizer import Chat, load_tokenizer

pytest.importorskip("lm_eval")

ROOT = Path(__file__).parents[1]
MODEL = {"model": "smollm2", "tp_size": 2, "dtype": "float32"}
QUESTIONS = [
    {"question": "The capital of France is", "choices": ["Oslo", "Paris", "Rome"], "answer": 1},
    {"question": "Two and two make", "choices": ["four", "seven", "a hat"], "answer": 0},
]
TASKS = {
    "own_prose": """
task: own_prose
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/prose.jsonl}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: word_perplexity}}, {{metric: byte_perplexity}}]
""",
    "own_questions": """
task: own_questions
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/questions.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list: [{{metric: acc}}]
""",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The task files and their data."""
    folder = tmp_path_factory.mktemp("tasks")
    prose = (ROOT / "CONTRIBUTING.md").read_text().split("\n## ")
    write_lines(folder / "prose.jsonl", [{"text": text} for text in prose])
    write_lines(folder / "questions.jsonl", QUESTIONS)
    for name, text in TASKS.items():
        (folder / f"{name}.yaml").write_text(text.format(folder=folder))
    return folder


def write_lines(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def evaluate(folder, model, arguments, monkeypatch, tmp_path, **settings):
    """The results of both tasks, and all log-likelihoods of each task in order."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    import lm_eval
    from lm_eval.tasks import TaskManager

    import parallel_llama.lm_eval  # noqa: F401, which registers it

    found = lm_eval.simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=list(TASKS),
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        bootstrap_iters=0,
        **settings,
    )
    likelihoods = {
        task: [one for sample in samples for one in sample["filtered_resps"]]
        for task, samples in found["samples"].items()
    }
    return found["results"], likelihoods


def test_harness_in_process_and_over_http_matches_score(folder, monkeypatch, tmp_path):
    """Bit-identical, in float32 on two ranks."""
    direct, likelihoods = evaluate(folder, "parallel_llama", MODEL, monkeypatch, tmp_path)
    with Served("--nproc=2", "--dtype=float32") as served:
        arguments = {
            "model": "smollm2",
            "base_url": f"{served.url}/v1/completions",
            "tokenized_requests": True,
            "max_length": 8192,
        }
        over_http = evaluate(folder, "local-completions", arguments, monkeypatch, tmp_path)
    assert over_http == (direct, likelihoods)
    assert direct["own_questions"]["acc,none"] == 1.0
    assert 1.5 < direct["own_prose"]["byte_perplexity,none"] < 4

    tokenizer = load_tokenizer(find_model("smollm2").path)
    texts = [json.loads(line)["text"] for line in (folder / "prose.jsonl").open()]
    sequences = [[tokenizer.bos_id, *tokenizer.encode(text, bos=False)] for text in texts]
    file = tmp_path / "tokens.json"
    file.write_text(json.dumps(sequences))
    lines = parallel_llama("score", f"--tokens-file={file}", "--nproc=2", "--dtype=float32")
    assert likelihoods["own_prose"] == [sum(line["logprobs"][1:]) for line in lines]


def test_texts_start_with_bos_if_the_tokenizer_adds_it(model):
    """Regression: no text had bos, so results differed from those of the harness's `hf`."""
    from parallel_llama.lm_eval import ParallelLlama

    lm = ParallelLlama(str(model), dtype="float32")
    bos, hello, there = (lm.tok_encode(text, False) for text in ("<|begin|>", "Hello", " there"))
    assert lm.tok_encode("Hello") == lm.tok_encode("<|begin|>Hello") == bos + hello
    scored = lm.llm.score([bos + hello + there])[0]
    ((likelihood, _),) = lm.loglikelihood([SimpleNamespace(args=("Hello", " there"))])
    assert likelihood == sum(scored[len(hello) :])
    # A whole text has a single bos, which is not scored.
    (whole,) = lm.loglikelihood_rolling([SimpleNamespace(args=("Hello there",))])
    assert whole == sum(scored)
    settings = {"max_gen_toks": 4}
    (text,) = lm.generate_until([SimpleNamespace(args=("Hello", settings))])
    greedy = SamplingParams(temperature=0.0, max_tokens=4)
    assert text == lm.llm.generate("Hello", greedy)[0].text
    lm.llm.close()


def test_chat_template_of_the_model_is_applied(folder, model, monkeypatch, tmp_path):
    """Regression: --apply_chat_template ended in a NotImplementedError of the harness."""
    from parallel_llama.lm_eval import ParallelLlama

    arguments = {"model": str(model), "dtype": "float32"}
    settings = {"apply_chat_template": True, "system_instruction": "Be brief."}
    _, likelihoods = evaluate(
        folder, "parallel_llama", arguments, monkeypatch, tmp_path, **settings
    )
    lm = ParallelLlama(**arguments)
    messages = [{"role": "system", "content": "Be brief."}]
    messages += [{"role": "user", "content": QUESTIONS[0]["question"]}]
    context = list(lm.llm.input_processor.encode(Chat(messages)))
    text = lm.apply_chat_template(messages)
    assert lm.tok_encode(text) == context
    (scored,) = lm.llm.score([context + lm.tok_encode("Oslo", add_special_tokens=False)])
    # The harness also scores the space at the end of the template's text.
    assert likelihoods["own_questions"][0][0] == sum(scored[-len(" Oslo") :])

    begun = [*messages, {"role": "assistant", "content": "It is"}]
    assert lm.apply_chat_template(begun, add_generation_prompt=False) == f"{text}It is"
    assert lm.chat_template(True) == TEMPLATE
    assert "/" not in lm.tokenizer_name
    with pytest.raises(UsageError, match="'tool_use': only the model's default chat template"):
        lm.chat_template("tool_use")
    lm.llm.input_processor.chat_template = None
    with pytest.raises(UsageError, match=r"no chat template.* run without --apply_chat"):
        lm.chat_template(True)
    lm.llm.close()


def test_generate_until_applies_stop_strings_and_max_tokens():
    from parallel_llama.lm_eval import ParallelLlama

    model = ParallelLlama("smollm2", dtype="float32", batch_size="auto", device="cuda:0")
    asked = [
        ("One, two, three,", {"until": [" five"], "max_gen_toks": 12, "do_sample": False}),
        ("One, two, three,", {"until": [], "max_gen_toks": 2}),
    ]
    requests = [SimpleNamespace(args=each) for each in asked]
    assert model.generate_until(requests) == [" four,", " four,"]
    for name in ("max_new_tokens", "max_completion_tokens"):
        (text,) = model.generate_until([SimpleNamespace(args=("One, two, three,", {name: 2}))])
        assert text == " four,"
    too_long = SimpleNamespace(args=("One", {"max_gen_toks": model.max_length}))
    with pytest.raises(UsageError, match=f"max_gen_toks={model.max_length}: the context has"):
        model.generate_until([too_long])
    unknown = SimpleNamespace(args=("One", {"tempreture": 1}))
    with pytest.raises(UsageError, match="tempreture"):
        model.generate_until([unknown])
    model.llm.close()


def test_continuation_without_tokens_is_refused():
    """Regression: its result was the log-likelihood of the context."""
    from parallel_llama.lm_eval import ParallelLlama

    model = ParallelLlama("smollm2", dtype="float32")
    context = model.tok_encode("One, two")
    scored = [(("One, two", ", three"), context, model.tok_encode(", three"))]
    merged = [(("One, two", "o"), context, [])]
    assert len(model._loglikelihood_tokens(scored)) == 1
    with pytest.raises(UsageError, match="continuation 'o' adds no token to its context"):
        model._loglikelihood_tokens(scored + merged)
    model.llm.close()


def test_every_token_of_a_text_longer_than_the_context_is_scored():
    """Each window has one token of context, and room for one token that is drawn."""
    from parallel_llama.lm_eval import ParallelLlama

    model = ParallelLlama("smollm2", dtype="float32", max_seq_len=16, batch_size="auto:4")
    text = "The quick brown fox jumps over the lazy dog, and then it runs home again and sleeps."
    tokens = model.tok_encode(text)
    assert len(tokens) > 16
    windows: list[int] = []
    scored = model._loglikelihood_tokens

    def counted(requests):
        windows.extend(len(continuation) for _, _, continuation in requests)
        return scored(requests)

    model._loglikelihood_tokens = counted
    total = model._rolling(text)
    assert sum(windows) == len(tokens)
    alone = [
        sum(model.llm.score([[model.prefix_token_id, *tokens[:14]]])[0]),
        sum(model.llm.score([tokens[-15:]])[0][-(len(tokens) - 14) :]),
    ]
    assert total == pytest.approx(sum(alone), abs=1e-4)
    model.llm.close()


def test_temperature_alone_samples():
    from parallel_llama.lm_eval import _sampling

    assert _sampling({"temperature": 0.7}).temperature == 0.7
    assert _sampling({"temperature": 0.7, "do_sample": False}).temperature == 0
    assert _sampling({}).temperature == 0
    assert _sampling({"do_sample": True}).temperature == 1
