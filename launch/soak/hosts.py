"""Runs models on network namespaces as hosts: compares answers, and the speed that plan predicts.

    python -m launch.soak.hosts answers --hosts 1+1,2+1,2+2,1+1+1+1+1 [--requests 1000] [--pp 2]
    python -m launch.soak.hosts commands --hosts 1+1,2+1,2+2,1+1+1+1+1 [--requests 100] [--seed 1]
    python -m launch.soak.hosts faults --hosts 1+1,2+1,1+1+1 [--runs 40] [--seed 1]
    python -m launch.soak.hosts speed --hosts 1+1 [--quant int8] [--delay-us 300] [--pp 2]

2+1 means two ranks on the first host and one on the second. `answers` compares what a server with
exact sums answers to random requests with the answers of one rank, and `commands` does so with what
`generate --prompts` and `score` print. `faults` breaks the network and the hosts of a run, and
checks how the run ends. `speed` measures the rates of this machine, prints the speed
that `plan --hosts` predicts from them and the measured speed; it needs an idle machine. All need
root, and the packages iproute2, util-linux and gcc of Debian.
"""

import argparse
import json
import random
import string
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from launch.soak.host_faults import faults
from launch.soak.host_speed import bytes_per_row, speed
from launch.soak.linked_hosts import Link, LinkedHosts, NotPossible, environment, other_ranks
from launch.soak.tally import Tally

SERVE = "serve", "--exact", "--port=0", "--start-timeout=300"
N_STREAMS = 16
# Exact sums exchange the inputs and outputs of two matrices in each layer, and pipelines exchange
# the result of each stage. For each new token, a host must receive at least this fraction of what
# it needs of one row of these tensors.
LEAST_PART = 0.5
END_LIMIT_S = 60


def main(argv: Sequence[str] | None = None) -> int:
    """Returns: 1 if answers differ or did not cross the link, 2 if hosts cannot be made, else 0."""
    flags = parse(argv)
    try:
        verbs = {"answers": answers, "commands": commands, "faults": faults, "speed": speed}
        return verbs[flags.command](flags)
    except NotPossible as error:
        print(error, file=sys.stderr)
        return 2


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parsers = parser.add_subparsers(dest="command", required=True)
    of_answers, of_commands = parsers.add_parser("answers"), parsers.add_parser("commands")
    of_faults, of_speed = parsers.add_parser("faults"), parsers.add_parser("speed")
    for each in (of_answers, of_commands, of_faults, of_speed):
        each.add_argument("--hosts", default="2+1", help="layouts, such as 1+1,2+1", type=layouts)
    for each in (of_answers, of_commands, of_speed):
        each.add_argument("--pp", type=int, default=1)
        each.add_argument("--delay-us", type=float, default=100)
        each.add_argument("--gbit", type=float, default=1)
    for each in (of_answers, of_commands):
        each.add_argument("--loss", type=float, default=0, help="fraction of lost packets")
        each.add_argument("--requests", type=int, default=1000)
        each.add_argument("--seed", type=int, default=1)
        each.add_argument("--model", default="smollm2", help="or tiny, with random weights")
    of_faults.add_argument("--runs", type=int, default=40)
    of_faults.add_argument("--seed", type=int, default=1)
    of_speed.add_argument("--model", default="llama-3.2-1b")
    of_speed.add_argument("--quant", default="none", choices=("none", "int8", "int4"))
    of_speed.add_argument("--prompt-tokens", type=int, default=512)
    of_speed.add_argument("--max-tokens", type=int, default=128)
    of_speed.add_argument("--repeat", type=int, default=3)
    return parser.parse_args(argv)


def layouts(text: str) -> list[list[int]]:
    """The ranks of each host of each layout."""
    return [[int(n_ranks) for n_ranks in layout.split("+")] for layout in text.split(",")]


def answers(flags: argparse.Namespace) -> int:
    """Compares the answers of every layout with those of one rank."""
    tally = Tally("layouts")
    rng = random.Random(flags.seed)
    requests = [random_request(rng) for _ in range(flags.requests)]
    link = Link(flags.delay_us, flags.gbit, flags.loss, flags.seed)
    with tempfile.TemporaryDirectory() as folder:
        model = tiny(Path(folder)) if flags.model == "tiny" else flags.model
        expected, *_ = answered(requests, [1], link, model, 1)
        n_tokens = sum(choice["tokens"] for answer in expected for choice in answer)
        for layout in flags.hosts:
            found, received = answered(requests, layout, link, model, flags.pp)
            n_equal = sum(a == b for a, b in zip(expected, found, strict=True))
            per_row = bytes_per_row(model, layout, flags.pp, is_exact=True)
            least = [LEAST_PART * n_tokens * each for each in per_row]
            is_linked = all(a >= b for a, b in zip(received, least, strict=True))
            line = f"{'+'.join(map(str, layout))}: {n_equal} of {len(requests)} answers are equal"
            per_token = ", ".join(f"{each / n_tokens / 1024:.1f}" for each in received)
            line += f"; KiB received for each new token: {per_token}"
            tally.add(n_equal == len(requests) and is_linked, line)
    return tally.close(f"{n_tokens} tokens", f"seed {flags.seed}")


def commands(flags: argparse.Namespace) -> int:
    """Compares what commands print on every layout with what they print on one rank."""
    tally = Tally("commands")
    rng = random.Random(flags.seed)
    requests = [random_request(rng) for _ in range(flags.requests)]
    sequences = [rng.choices(range(3, 200), k=rng.randint(2, 60)) for _ in requests]
    link = Link(flags.delay_us, flags.gbit, flags.loss, flags.seed)
    with tempfile.TemporaryDirectory() as folder:
        model = tiny(Path(folder)) if flags.model == "tiny" else flags.model
        prompts, tokens = Path(folder) / "prompts.jsonl", Path(folder) / "tokens.json"
        prompts.write_text("".join(json.dumps(request) + "\n" for request in requests))
        tokens.write_text(json.dumps(sequences))
        for verb in (
            ("generate", f"--prompts={prompts}", f"--seed={flags.seed}"),
            ("score", f"--tokens-file={tokens}"),
        ):
            command = *verb, "--exact", "--json", "--start-timeout=300", f"--model={model}"
            expected = printed(command, [1], link)
            for layout in flags.hosts:
                found = printed([*command, f"--pp={flags.pp}"], layout, link)
                n_equal = sum(a == b for a, b in zip(expected, found, strict=True))
                line = f"{verb[0]}, {'+'.join(map(str, layout))}: {n_equal} of {len(expected)} "
                tally.add(n_equal == len(expected), line + "lines are equal")
    return tally.close(f"seed {flags.seed}")


def printed(command: Sequence[str], layout: Sequence[int], link: Link) -> list[dict[str, Any]]:
    """The JSON lines that a command prints on hosts, without the number of ranks."""
    with LinkedHosts(len(layout), link) as hosts:
        said = hosts.output(layout, *command)
    return [{**json.loads(line), "tp_size": None} for line in said.splitlines()]


def random_request(rng: random.Random) -> dict[str, Any]:
    """Greedy or sampled, with one of three beginnings, so that some have a common prefix."""
    words = ["".join(rng.choices(string.ascii_lowercase, k=rng.randint(1, 9))) for _ in range(40)]
    beginning = rng.choice(["Once upon a time ", "The capital of France is ", ""])
    request = {
        "prompt": beginning + " ".join(words[: rng.randint(1, 40)]), "logprobs": rng.randint(0, 5),
        "max_tokens": rng.randint(1, 24), "temperature": 0, "ignore_eos": True,
    }  # fmt: skip
    if rng.random() < 0.5:
        sampled = {"temperature": rng.uniform(0.5, 1.5), "top_p": rng.choice([1, 0.9])}
        request |= sampled | {"seed": rng.randrange(1 << 30), "n": rng.choice([1, 1, 2])}
    return request


def answered(
    requests: Sequence[dict[str, Any]], layout: Sequence[int], link: Link, model: str, pp: int
) -> tuple[list[Any], list[int]]:
    """The choices for each request, and the bytes that each host has received in this time."""
    with served(layout, link, f"--model={model}", f"--pp={pp}") as (hosts, server):
        before = hosts.received()
        with hosts.threads_on(0, N_STREAMS) as pool:
            replies = list(pool.map(lambda body: server.post("/v1/completions", **body), requests))
        received = [b - a for a, b in zip(before, hosts.received(), strict=True)]
    for reply in replies:
        for choice in reply["choices"]:
            choice["tokens"] = len(choice["logprobs"]["tokens"])
    return [reply["choices"] for reply in replies], received


@contextmanager
def served(layout: Sequence[int], link: Link, *more: str) -> Iterator[tuple[LinkedHosts, Any]]:
    """A server over hosts; at the end it gets SIGTERM, and all ranks must exit with code 0."""
    from served import Served

    with LinkedHosts(len(layout), link) as hosts:
        first, *others = hosts.rank_commands(layout, *SERVE, *more)
        with other_ranks(others, sum(layout)) as processes:
            server = Served(command=first, env=environment(sum(layout)))
            try:
                yield hosts, server
                hosts.signal(0, "TERM")
                codes = [each.wait(END_LIMIT_S) for each in (server.process, *processes)]
                assert not any(codes), f"exit codes of the ranks: {codes}"
            finally:
                server.stop()


def tiny(folder: Path) -> str:
    from tiny_folder import write_endless_folder

    return str(write_endless_folder(folder / "tiny"))


if __name__ == "__main__":
    sys.exit(main())
