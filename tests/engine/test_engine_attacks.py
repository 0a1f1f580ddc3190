"""The engine with hostile mixes: a real tokenizer, drafts of every quality, too few blocks.

A request's result (ids, text, the pieces of that text, finish reason, log-probabilities) is
compared with its result alone, without drafts and with enough blocks.
"""

import random
from collections import abc
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from thread_ranks import run_on_threads
from tiny_folder import write_chat_folder
from tokenizer_data import MISTRAL_V1, SMOLLM2, real_tokenizer

from parallel_llama import LLM
from parallel_llama.checkpoint.checkpoint import random_checkpoint
from parallel_llama.dtypes import Precision
from parallel_llama.engine import engine as engine_module
from parallel_llama.engine import rank_rpc
from parallel_llama.engine.engine import Engine
from parallel_llama.engine.kv_capacity import Capacity
from parallel_llama.engine.messages import size_of
from parallel_llama.engine.model_runner import ModelRunner
from parallel_llama.engine.scheduler import Sequence
from parallel_llama.errors import NumericalError, UsageError
from parallel_llama.families.model_args import ModelArgs
from parallel_llama.parallel.collectives import Communicator, Solo
from parallel_llama.plan import make_plan
from parallel_llama.request import Completion, Grammar, Request, SamplingParams
from parallel_llama.structured.compiler import GrammarCompiler, Matcher, MatchError

ARGS = ModelArgs(
    dim=36,
    n_layers=2,
    n_heads=9,
    n_kv_heads=3,
    head_dim=4,
    ffn_dim=50,
    vocab_size=49152,
    dtype="float64",
)


@cache
def grammars() -> GrammarCompiler:
    tokenizer = real_tokenizer(SMOLLM2)
    return GrammarCompiler(tokenizer, ARGS.vocab_size, tokenizer.eos_ids)


@cache
def biases() -> tuple[tuple[int, float], ...]:
    """Few tokens, so that they repeat; some are parts of a character, one ends the text."""
    tokenizer = real_tokenizer(SMOLLM2)
    ids = set(tokenizer.encode('a b ab abc the\n\n😀é日本 {}":', bos=False)) | tokenizer.eos_ids
    return tuple((token, 60.0) for token in sorted(ids))


def make_runner(comm: Communicator) -> ModelRunner:
    return ModelRunner.load(
        ARGS,
        random_checkpoint(ARGS, seed=1),
        make_plan(ARGS, comm.size),
        comm,
        precision=Precision.plain("float64"),
        device=torch.device("cpu"),
    )


@cache
def solo_runner() -> ModelRunner:
    return make_runner(Solo())


def make_engine(
    runner: ModelRunner, n_blocks: int = 256, block_size: int = 16, step_tokens: int = 512
) -> Engine:
    leads = runner.comm.rank == 0
    return Engine(
        runner,
        Capacity((n_blocks,), block_size, 0),
        real_tokenizer(SMOLLM2) if leads else None,
        grammars() if leads else None,
        step_tokens=step_tokens,
        max_drafts=0,
    )


@dataclass(frozen=True)
class Answer:
    completion: Completion
    pieces: str


def run(engine: Engine, requests: abc.Sequence[Request], comes: abc.Sequence[int] = ()) -> dict:
    """Each sequence's answer; request i is submitted before step `comes[i]`."""
    comes = comes or [0] * len(requests)
    pieces: dict[tuple[int, int], str] = {}
    answers = {}
    step = 0
    while step <= max(comes) or not engine.idle:
        if engine.comm.rank == 0:
            for request, when in zip(requests, comes, strict=True):
                if when == step:
                    engine.submit(request)
        for each in engine.step():
            key = each.index, each.choice
            pieces[key] = pieces.get(key, "") + each.text
            if each.completion is not None:
                answers[key] = Answer(each.completion, pieces[key])
        step += 1
        assert step < 5000, "a request starves"
    assert engine.pools[0].n_used == 0
    assert not (engine._unfinished or engine._states or engine._matchers or engine._deadlines)
    return answers


def alone(request: Request) -> dict:
    return run(make_engine(solo_runner()), [request])


class Guesser:
    """Drafts that are right up to a random token; every rank makes the same drafts."""

    def __init__(self, expected: dict, most: int) -> None:
        self._expected, self._most = expected, most

    def __call__(self, sequence: Sequence, most: int) -> abc.Sequence[int]:
        if sequence.request.params.grammar is not None:
            return ()
        key = sequence.request.index, sequence.number
        right = self._expected[key].completion.tokens[sequence.n_drawn :]
        rng = random.Random(f"{key} {sequence.n_drawn}")
        guesses = list(right[:most]) + [rng.choice(biases())[0] for _ in range(3)]
        if rng.random() < 0.5:
            guesses[rng.randrange(len(guesses))] = rng.choice(biases())[0]
        return guesses[: min(most, rng.randint(0, self._most))]


def random_request(rng: random.Random, index: int) -> Request:
    tokenizer = real_tokenizer(SMOLLM2)
    alphabet = [token for token, _ in biases()]
    prompt = ([7, 8, 9, 10] * 8)[: rng.choice([1, 3, 4, 8, 16, 31, 32])]
    prompt += [rng.choice(alphabet) for _ in range(rng.choice([0, 0, 1, 5]))]
    stop_ids = rng.choice([tokenizer.eos_ids, frozenset[int](), frozenset(alphabet[:3])])
    most = rng.choice([1, 2, 8, 20])
    params = SamplingParams(
        max_tokens=most,
        temperature=rng.choice([0.0, 0.0, 0.7, 1.5]),
        top_k=rng.choice([0, 0, 5]),
        n=rng.choice([1, 1, 1, 3]),
        min_tokens=rng.choice([0, 0, min(4, most)]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.2]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.6]),
        logit_bias=biases(),
        logprobs=rng.choice([None, 0, 2]),
        prompt_logprobs=rng.choice([None, None, None, 1]),
        cache_salt=rng.choice([None, None, "s"]),
    )
    if rng.random() < 0.25:
        grammar = rng.choice(
            [
                Grammar("regex", "[ab ]{3,12}"),
                Grammar("regex", "(a|é|😀|日本)+"),
                Grammar("json_schema", '{"enum": ["a b", "ab", "abc", "the"]}'),
                Grammar("regex", "ab"),
            ]
        )
        params = replace(params, grammar=grammar)
    request = Request(index, tuple(prompt), params, rng.randrange(3), stop_ids)
    if rng.random() < 0.6:  # a stop string of the expected text, across tokens
        text = alone(replace(request, index=0))[0, 0].completion.text
        if text:
            start = rng.randrange(len(text))
            stop = (text[start : start + rng.randint(1, 5)], "ab a", "\n\n\n")
            request = replace(request, params=replace(params, stop=stop))
    return request


def mix_of(seed: int) -> tuple[list[Request], list[int], dict, dict]:
    rng = random.Random(seed)
    requests = [random_request(rng, index) for index in range(rng.randint(1, 5))]
    expected = {}
    for request in requests:
        expected |= alone(request)
    block_size = rng.choice([1, 2, 4, 8, 16])
    largest = max(len(r.prompt) + r.params.max_tokens - 1 for r in requests)
    least = -(-largest // block_size)
    make = {
        "n_blocks": rng.choice([least, least + 1, 2 * least]),
        "block_size": block_size,
        "step_tokens": rng.choice([1, 3, 16, 512]),
    }
    return requests, [rng.choice([0, 0, 1, 5]) for _ in requests], expected, make


def run_guessed(comm: Communicator, mix) -> dict:
    requests, comes, expected, make = mix
    runner = solo_runner() if comm.size == 1 else make_runner(comm)
    engine = make_engine(runner, **make)
    engine.scheduler._draft = Guesser(expected, most=8)
    return run(engine, requests, comes)


def rounded(completion: Completion) -> Completion:
    def near(entries):
        return entries and tuple(
            each
            and replace(each, logprob=round(each.logprob, 7), top=tuple(t for t, _ in each.top))
            for each in entries
        )

    return replace(
        completion,
        logprobs=near(completion.logprobs),
        prompt_logprobs=near(completion.prompt_logprobs),
    )


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [range(18), range(50, 68)])
def test_results_do_not_depend_on_drafts_or_other_requests(seeds):
    for seed in seeds:
        mix = mix_of(seed)
        answers = run_guessed(Solo(), mix)
        assert answers.keys() == mix[2].keys(), f"mix {seed}"
        for key, expected in mix[2].items():
            got = answers[key]
            assert got.pieces == got.completion.text, f"mix {seed}, {key}"
            assert rounded(got.completion) == rounded(expected.completion), f"mix {seed}, {key}"


# Failures.


def plain_request(index: int, **params: object) -> Request:
    return Request(index, (5, 6, 7, 8, 9), SamplingParams(**params), index, frozenset())


def fail_once(monkeypatch: pytest.MonkeyPatch, runner: ModelRunner, error: BaseException) -> None:
    def step(*_: object) -> torch.Tensor:
        monkeypatch.undo()
        raise error

    monkeypatch.setattr(runner, "step", step)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("out of memory")])
def test_engine_runs_next_request_after_an_interrupted_step(monkeypatch, error):
    """Regression: the step's tokens were never committed, and every later step was refused."""
    engine = make_engine(make_runner(Solo()))
    engine.submit(plain_request(0, max_tokens=3))
    fail_once(monkeypatch, engine.runner, error)
    with pytest.raises(type(error)):
        engine.step()
    answers = run(engine, [plain_request(1, max_tokens=3)])
    assert len(answers[1, 0].completion.tokens) == 3


def fail_everywhere(comm: Communicator) -> bool:
    engine = make_engine(make_runner(comm))
    if comm.rank == 0:
        engine.submit(plain_request(0, max_tokens=3))
    with torch.no_grad():
        engine.runner.model.norm.weight.values.fill_(torch.nan)
    with pytest.raises(NumericalError):
        engine.step()
    engine.send_rpc(b"call") if comm.rank == 0 else engine.step()
    return engine.idle and engine.rpc == (b"call" if comm.rank else b"")


def test_all_ranks_accept_an_rpc_after_a_failure_on_all_ranks():
    assert run_on_threads(3, fail_everywhere) == [True] * 3


def test_grammar_with_a_leading_space_allows_no_token_after_bos():
    """After a prompt of only <s>, SentencePiece drops the space that the grammar requires."""
    tokenizer = real_tokenizer(MISTRAL_V1)
    compiler = GrammarCompiler(tokenizer, ARGS.vocab_size, tokenizer.eos_ids)
    engine = Engine(solo_runner(), Capacity((8,), 16, 0), tokenizer, compiler)
    params = SamplingParams(max_tokens=8, grammar=Grammar("regex", " yes"))
    request = Request(0, (tokenizer.bos_id,), params, 0, tokenizer.eos_ids)
    completion = run(engine, [request])[0, 0].completion
    assert (completion.finish_reason, completion.text) == ("no_token", "")


def test_failure_discards_requests_that_were_not_sent_and_their_deadlines(monkeypatch):
    engine = make_engine(make_runner(Solo()))
    monkeypatch.setattr(engine_module, "MAX_SIZE", 1)
    engine.submit(plain_request(0))
    engine.submit(plain_request(1), timeout_s=3600)  # would be sent in the next step
    with torch.no_grad():
        engine.runner.model.norm.weight.values.fill_(torch.nan)
    with pytest.raises(NumericalError):
        engine.step()
    assert engine.idle and not engine._deadlines


@pytest.mark.parametrize(
    "many",
    [
        {"allowed_token_ids": [*range(1000)]},
        {"stop_token_ids": [*range(1000)]},
        {"bad_words": ["x" * 1000]},
    ],
    ids=["allowed", "stop", "bad words"],
)
def test_step_message_counts_every_list_of_a_request(many):
    """Rank 0 divides new requests by size among the messages of several steps."""
    plain, large = (Request(0, (1, 2), SamplingParams(**own), 0, frozenset()) for own in ({}, many))
    assert size_of(large) - size_of(plain) == 1000


@pytest.mark.parametrize("n_prompt", [5, 40])
def test_choices_of_one_token_run_in_at_most_two_steps(n_prompt):
    """Regression: each choice waited for the choice before it, and took a step of its own."""
    engine = make_engine(solo_runner(), n_blocks=200)
    params = SamplingParams(max_tokens=1, n=16, temperature=1.0)
    engine.submit(Request(0, tuple(range(n_prompt)), params, 0, frozenset()))
    n_steps = 0
    while not engine.idle:
        engine.step()
        n_steps += 1
    assert n_steps <= 2


def test_token_that_a_matcher_refuses_ends_only_its_completion(monkeypatch):
    """Regression: rank 0 raised within a step, and the other ranks waited for its token ids."""

    def accept(*_: object) -> None:
        raise MatchError("the parser has too many states")

    monkeypatch.setattr(Matcher, "accept", accept)
    engine = make_engine(solo_runner())
    bound = plain_request(0, max_tokens=3, grammar=Grammar("regex", "[a-z]+"))
    answers = run(engine, [bound, plain_request(1, max_tokens=3)])
    assert answers[0, 0].completion.finish_reason == "no_token"
    assert answers[1, 0].completion.finish_reason == "length"


def test_messages_are_bounded_in_bytes():
    """20,000 requests with 4,096 biases each would be a message beyond what ranks accept."""
    engine = make_engine(solo_runner())
    biases = dict.fromkeys(range(20000, 24096), 1.5)
    request = plain_request(0, logit_bias=biases)
    for _ in range(600):
        engine.submit(request)
    assert len(engine._new_message().encode()) <= 16 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_chat_folder(tmp_path_factory.mktemp("models") / "chat"))


LONG = SamplingParams(max_tokens=20, ignore_eos=True)


def test_failed_score_frees_its_blocks(folder, monkeypatch):
    """Regression: a later request with too few blocks was never admitted, and never ended."""

    def score(*_: object) -> torch.Tensor:
        raise NumericalError("the logits are nan")

    llm = LLM(folder, dtype="float64")
    monkeypatch.setattr(rank_rpc, "score", score)
    with pytest.raises(NumericalError):
        llm.score([[5] * 60])
    assert llm.engine.pools[0].n_used == 0


def test_run_can_be_closed_after_another_run_failed(folder, monkeypatch):
    """Regression: close() waited for the end of requests that no longer existed."""
    llm = LLM(folder, dtype="float64")
    one, other = (
        llm.run(llm.input_processor.requests([text], LONG)) for text in ("Hello", "World")
    )
    next(one), next(other)
    fail_once(monkeypatch, llm.engine.runner, NumericalError("the logits are nan"))
    with pytest.raises(NumericalError):
        list(one)
    step, n_steps = llm.ranks.step, iter(range(50))

    def bounded_step() -> list:
        assert next(n_steps, None) is not None, "steps for nobody"
        return step()

    monkeypatch.setattr(llm.ranks, "step", bounded_step)
    other.close()
    assert not len(llm._loop)


def test_interrupted_run_leaves_no_requests_behind(folder):
    llm = LLM(folder, dtype="float64")
    run = llm.run(llm.input_processor.requests(["Hello"], LONG))
    next(run)
    with pytest.raises(KeyboardInterrupt):
        run.throw(KeyboardInterrupt())
    assert llm.engine.idle and not len(llm._loop)


def test_run_with_an_invalid_grammar_leaves_no_requests_behind(folder):
    llm = LLM(folder, dtype="float64")
    first, second = llm.input_processor.requests(["Hello", "World"], LONG)
    broken = replace(second, params=replace(LONG, grammar=Grammar("regex", "(((")))
    with pytest.raises(UsageError):
        list(llm.run([first, broken]))
    assert llm.engine.idle and not len(llm._loop)
