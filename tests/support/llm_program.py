"""Users' scripts, which tests run under torchrun: `python llm_program.py NAME MODEL`."""

import asyncio
import random
import sys
import time

import msgspec
import torch

from parallel_llama import LLM, AsyncLLM, Completion, SamplingParams
from parallel_llama.errors import NumericalError, UsageError

PARAMS = SamplingParams(max_tokens=12, temperature=0.8, seed=3, logprobs=2)
N_CONCURRENT = 64


def script(folder: str) -> None:
    """A program without code for ranks; only rank 0 continues after the first line."""
    settings = {"dtype": "float64", "timeout_s": 4, "start_timeout_s": 200}
    with LLM(folder, **settings, integrity_check=False) as llm:  # fail_once changes weights
        first = llm.generate(["Hello", [5, 6, 7]], PARAMS)
        say(llm, msgspec.json.encode(first).decode())
        assert llm.generate(["Hello", [5, 6, 7]], PARAMS) == first
        for wrong in ([""], ["x" * 600], [[5, 999]]):
            try:
                llm.generate(wrong, PARAMS)
            except UsageError:
                continue
            raise AssertionError(f"{wrong} was accepted")
        pieces = llm.stream("Hello", PARAMS)
        next(pieces)
        pieces.close()
        suspended = llm.stream("Hello", PARAMS)
        begun = next(suspended)
        assert llm.generate(["Hello", [5, 6, 7]], PARAMS) == first
        time.sleep(5)  # longer than the limit of a collective, which does not apply to the program
        assert len(llm.score([[5, 6, 7]])[0]) == 2
        assert begun + "".join(suspended) == first[0].text
        fail_once(llm)
        assert llm.generate(["Hello", [5, 6, 7]], PARAMS) == first


def fail_once(llm: LLM) -> None:
    """Sends a request while rank 0 produces NaN, which affects every rank."""
    weight = llm.engine.runner.model.norm.weight.values
    kept = weight.clone()
    calls = (lambda: llm.generate(["Hello"], PARAMS), lambda: llm.score([[5, 6, 7]]))
    with torch.no_grad():
        weight.fill_(torch.nan)
        for call in calls:
            try:
                call()
            except NumericalError:
                continue
            raise AssertionError("there was an answer without numbers")
        weight.copy_(kept)
    assert llm.engine.pools[0].n_used == 0


def soak(folder: str, n_requests: str, kv_cache_bytes: str) -> None:
    """Many coroutines on rank 0."""
    llm = LLM(folder, dtype="float64", kv_cache_bytes=int(kv_cache_bytes), block_size=4)
    say(llm, msgspec.json.encode(soaked(llm, int(n_requests))).decode())
    llm.close()


class Counts(msgspec.Struct):
    """The outcomes of many requests."""

    wrong: int = 0
    finished: int = 0
    cancelled: int = 0
    preempted: int = 0


def soaked(llm: LLM, n_requests: int) -> Counts:
    """Runs requests concurrently, cancels a fifth, and compares the others with single runs.

    Raises: AssertionError if the engine holds anything at the end, TimeoutError if a request hangs.
    """
    rng = random.Random(1)
    prompts = [[rng.randrange(211) for _ in range(rng.randint(1, 50))] for _ in range(12)]
    prompts += [[*prompt[:20], 7] for prompt in prompts[:4]]
    params = [
        SamplingParams(max_tokens=most, temperature=temperature, seed=most, ignore_eos=True)
        for most, temperature in ((1, 0.0), (16, 0.0), (8, 1.0), (24, 1.5))
    ]
    asked = {(p, q): (prompts[p], params[q]) for p in range(len(prompts)) for q in range(4)}
    alone = {key: llm.generate([prompt], own)[0] for key, (prompt, own) in asked.items()}
    counts = Counts()

    async def ask(engine: AsyncLLM, number: int, gate: asyncio.Semaphore) -> None:
        own = random.Random(number)
        key = own.choice(list(asked))
        way, when = own.choice(["stay"] * 12 + ["cancel", "leave", "kill"]), own.randrange(6)
        async with gate:
            answer = await engine.submit(*asked[key])
            reading = asyncio.create_task(read(answer, way, when))
            if way == "kill":  # the reader's task is cancelled wherever it is
                await asyncio.sleep(own.random() / 50)
                reading.cancel()
            try:
                end = await reading
            except asyncio.CancelledError:
                end = None
        if end is None or end.finish_reason == "cancelled":
            counts.cancelled += 1
            n_got = 0 if end is None else len(end.tokens)
            counts.wrong += way == "stay"
            counts.wrong += end is not None and end.tokens != alone[key].tokens[:n_got]
        else:
            counts.finished += 1
            counts.wrong += (end.tokens, end.text) != (alone[key].tokens, alone[key].text)

    async def serve() -> None:
        engine = AsyncLLM(llm)
        gate = asyncio.Semaphore(N_CONCURRENT)
        await asyncio.wait_for(
            asyncio.gather(*(ask(engine, number, gate) for number in range(n_requests))), 200
        )
        await asyncio.wait_for(until_idle(engine), 100)
        counts.preempted = engine.statistics().n_preempted
        await engine.close()

    asyncio.run(serve())
    pool = llm.engine.pools[0]
    assert llm.engine.idle and pool.n_used == 0
    assert pool.n_cached + pool.n_free == llm.engine.capacity.n_blocks[0]
    return counts


async def read(answer: object, way: str, when: int) -> Completion | None:
    """The end of an answer; None for a reader that leaves without closing."""
    tokens: tuple[int, ...] = ()
    if way == "cancel" and not when:
        answer.cancel()
    async for progress in answer:
        tokens += progress.tokens
        if progress.completion is not None:
            assert progress.completion.tokens == tokens
            return progress.completion
        if len(tokens) >= when and way == "cancel":
            answer.cancel()
        if len(tokens) >= when and way == "leave":
            return None
    raise AssertionError("the answer has no end")


async def until_idle(engine: AsyncLLM) -> None:
    """Waits until requests of readers that left have been removed."""
    while True:
        now = engine.statistics()
        if not now.n_running + now.n_waiting + now.n_blocks_used:
            return
        await asyncio.sleep(0.005)


def say(llm: LLM, text: str) -> None:
    """Prints a line in one write, so that lines of ranks do not mix."""
    sys.stdout.write(f"{llm.rank} {text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    {"script": script, "soak": soak}[sys.argv[1]](*sys.argv[2:])
