"""Measures the cost of HTTP: streams of `parallel-llama serve` and the same requests without it.

    python -m launch.bench.http [--nproc 2] [--streams 16] [--tokens 128]

Loads a server, and an engine in this process, and measures them alternately. Prints the tokens/s of
each round and the median ratio. The client only looks for the end of each stream, but it shares
the machine with the server.
"""

import argparse
import json
import random
import re
import selectors
import socket
import statistics
import subprocess
import sys
import time

from parallel_llama import LLM
from parallel_llama.request import SamplingParams

PROMPT_TOKENS = 64


def main() -> None:
    """Measures, and prints a line for each round and one with the median ratio."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=5)
    given = parser.parse_args()
    command = [
        sys.executable, "-m", "parallel_llama", "serve", "--port=0", f"--model={given.model}",
        f"--nproc={given.nproc}", f"--dtype={given.dtype}",
    ]  # fmt: skip
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        try:
            address = _address(server)
            with LLM(given.model, tp_size=given.nproc, dtype=given.dtype) as llm:
                _compare(llm, address, given.streams, given.tokens, given.repeat)
        finally:
            server.terminate()


def _compare(
    llm: LLM, address: tuple[str, int], n_streams: int, n_tokens: int, repeat: int
) -> None:
    draw = random.Random(0)
    ratios = []
    for number in range(repeat + 1):  # the first is a warm-up
        prompts = [
            [draw.randrange(llm.args.vocab_size) for _ in range(PROMPT_TOKENS)]
            for _ in range(n_streams)
        ]
        without_s = _without(llm, prompts, n_tokens)
        with_s = _streamed(address, prompts, n_tokens)
        if number:
            n = n_streams * n_tokens
            ratios.append(without_s / with_s)
            print(
                f"without HTTP {n / without_s:7.1f} tokens/s, with HTTP {n / with_s:7.1f}, "
                f"ratio {ratios[-1]:.3f}",
                flush=True,
            )
    print(
        f"{n_streams} streams of {n_tokens} tokens: with HTTP {statistics.median(ratios):.3f} of "
        f"the speed without ({min(ratios):.3f} to {max(ratios):.3f})"
    )


def _without(llm: LLM, prompts: list[list[int]], n_tokens: int) -> float:
    """Seconds for the batch in the engine of this process."""
    params = SamplingParams(max_tokens=n_tokens, ignore_eos=True)
    requests = llm.input_processor.requests(prompts, params)
    started = time.perf_counter()
    for _ in llm.run(requests):
        pass
    return time.perf_counter() - started


def _streamed(address: tuple[str, int], prompts: list[list[int]], n_tokens: int) -> float:
    """Seconds until every stream of the batch has ended."""
    started = time.perf_counter()
    with selectors.DefaultSelector() as selector:
        tails: dict[socket.socket, bytes] = {}
        for prompt in prompts:
            stream = socket.create_connection(address)
            stream.sendall(_request(prompt, n_tokens))
            tails[stream] = b""
            selector.register(stream, selectors.EVENT_READ)
        while tails:
            for key, _ in selector.select():
                stream = key.fileobj
                assert isinstance(stream, socket.socket)
                data = stream.recv(1 << 16)
                tails[stream] = (tails[stream] + data)[-64:]
                if b"[DONE]" in tails[stream]:
                    selector.unregister(stream)
                    stream.close()
                    del tails[stream]
                elif not data:
                    raise RuntimeError(f"a stream ended early: {tails[stream]!r}")
    return time.perf_counter() - started


def _request(prompt: list[int], n_tokens: int) -> bytes:
    fields = {"prompt": prompt, "max_tokens": n_tokens, "ignore_eos": True, "stream": True}
    body = json.dumps({**fields, "temperature": 0}).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _address(server: "subprocess.Popen[str]") -> tuple[str, int]:
    assert server.stderr is not None
    printed = ""
    for line in server.stderr:
        if found := re.search(r"at http://([\d.]+):(\d+)", line):
            return found[1], int(found[2])
        printed += line
    raise RuntimeError(f"the server did not start; it printed:\n{printed}")


if __name__ == "__main__":
    main()
