"""Compares the speed that `plan --hosts` predicts with the speed that `bench` measures."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from launch.soak.linked_hosts import ROOT, Link, LinkedHosts, NotPossible, run
from parallel_llama.cli.model import args_of
from parallel_llama.cli.prediction import exchanges
from parallel_llama.dtypes import make_precision
from parallel_llama.files.model_files import find_model
from parallel_llama.memory import head_bytes
from parallel_llama.plan import count_pieces, make_plan

ECHO = """
import socket
with socket.create_server(("10.231.0.1", 29600)) as server:
    print("ready", flush=True)
    other, _ = server.accept()
    other.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while words := other.recv(64):
        other.sendall(words)
"""
PING = """
import socket, time
other = socket.create_connection(("10.231.0.1", 29600))
other.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
for _ in range(400):
    began_s = time.perf_counter()
    other.sendall(bytes(64))
    other.recv(64)
    print((time.perf_counter() - began_s) / 2)
"""


def speed(flags: argparse.Namespace) -> int:
    """Prints the predicted and the measured speed of each layout. Returns: 0.

    The program that delays packets runs on the cores of the ranks, unlike a real network. Its CPU
    time is added to the predicted time of prefill, which exchanges nearly all the bytes.
    """
    for layout in flags.hosts:
        load = os.getloadavg()[0]
        with (
            tempfile.TemporaryDirectory() as name,
            LinkedHosts(len(layout), Link(flags.delay_us, flags.gbit)) as hosts,
        ):
            predicted, latency_us = plan(flags, layout, hosts, Path(name))
            measured = bench(flags, layout, hosts)
            n_sent, switch_s = sum(hosts.received()), hosts.switch_s()
        n_bytes = sum(bytes_per_row(flags.model, layout, flags.pp, is_exact=False))
        added_s = n_bytes * switch_s / n_sent / len(os.sched_getaffinity(0))
        lengthen(predicted, "prefill", added_s)
        switched = f"{n_sent / 1e9:.1f} GB sent, which took {switch_s:.1f} s of CPU time"
        print(
            f"{'+'.join(map(str, layout))}, {flags.model}, quant {flags.quant}, pp {flags.pp}, "
            f"{latency_us:.0f} us, {flags.gbit:g} Gbit/s, "
            f"load average {load:.1f} at the beginning; {switched}"
        )
        for what in ("prefill", "decode"):
            key = f"{what}_tokens_per_s"
            ratio = predicted[key] / measured[key]
            print(
                f"  {what:8}{predicted[key]:8.2f} predicted {measured[key]:8.2f} measured "
                f"({measured[key + '_min']:g} to {measured[key + '_max']:g}) tokens/s: {ratio:.2f}",
                flush=True,
            )
    return 0


def plan(
    flags: argparse.Namespace, layout: Sequence[int], hosts: LinkedHosts, folder: Path
) -> tuple[dict[str, float], float]:
    """The prediction of `plan --hosts`, and the measured latency of the link."""
    latency_us = measured_latency_us(hosts)
    link = {"latency_us": latency_us, "gbit_per_s": flags.gbit}
    (rates, added_s), entries = calibrate(flags, layout, folder), []
    for number, n_ranks in enumerate(layout):
        begin = 0 if flags.pp > 1 else sum(layout[:number])
        own = {**rates, "ranks": rates["ranks"][begin : begin + n_ranks]}
        (folder / f"{number}.json").write_text(json.dumps(own))
        entries.append({"ranks": n_ranks, "calibration": f"{number}.json", "link": link})
    (folder / "hosts.json").write_text(json.dumps(entries))
    n_tokens = flags.prompt_tokens + flags.max_tokens
    own_flags = f"--hosts={folder}/hosts.json", f"--max-seq-len={n_tokens}", f"--pp={flags.pp}"
    said = json.loads(parallel_llama("plan", *own_flags, *of_model(flags)))
    if said["predicted"] is None:
        raise NotPossible(f"plan predicts no speed: {said['unpredicted']}")
    lengthen(said["predicted"], "decode", added_s)
    return said["predicted"], latency_us


def lengthen(predicted: dict[str, float], what: str, added_s: float) -> None:
    """Adds seconds to the predicted time of each token."""
    predicted[f"{what}_tokens_per_s"] = 1 / (1 / predicted[f"{what}_tokens_per_s"] + added_s)


def bytes_per_row(model: str, layout: Sequence[int], pp: int, *, is_exact: bool) -> list[float]:
    """Bytes that each host receives for each token of a step."""
    size, args = sum(layout), args_of(find_model(model))
    if pp > 1:  # the results of the other stages
        return [4.0 * args.dim * (pp - 1)] * len(layout)
    _, n_bytes = exchanges(args, size, 4, is_exact=is_exact)
    return [n_bytes * (size - own) / max(size - 1, 1) for own in layout]


def measured_latency_us(hosts: LinkedHosts) -> float:
    """Half the median round-trip time of a small message from host 1 to host 0 and back."""
    echo = hosts.command(0, sys.executable, "-c", ECHO)
    with subprocess.Popen(echo, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        times_s = run(*hosts.command(1, sys.executable, "-c", PING))
    return statistics.median(map(float, times_s.split())) * 1e6


def calibrate(
    flags: argparse.Namespace, layout: Sequence[int], folder: Path
) -> tuple[dict[str, Any], float]:
    """The rates of the ranks, and the seconds that these hosts add to a decode step of a pipeline.

    Without stages, all ranks measure at once. The stages of a pipeline decode one after another,
    so the ranks of one stage measure alone. But unlike real hosts, these share cores and memory:
    in a prefill, the stages that work in a tick share the cores, and after a decode step all ranks
    read the output layer at once.
    """
    if flags.pp == 1:
        return rates_on(flags, folder, range(sum(layout))), 0.0
    n_own, n_cores = max(layout), len(os.sched_getaffinity(0))
    rates = rates_on(flags, folder, range(n_own))
    at_once = [range(first, first + n_own) for first in range(0, max(n_cores, n_own), n_own)]
    with ThreadPoolExecutor(len(at_once)) as pool:
        together = [
            rank
            for host in pool.map(lambda ranks: rates_on(flags, folder, ranks), at_once)
            for rank in host["ranks"]
        ]
    crowding = ranks_per_core(flags, n_own, n_cores)
    for key in ("operations_per_s", "piece_operations_per_s"):
        slowest = min(rank[key] for rank in together)
        for rank in rates["ranks"]:
            rank[key] = slowest / crowding
    alone = statistics.mean(rank["read_bytes_per_s"] for rank in rates["ranks"]) * sum(layout)
    added_s = 1 / sum(rank["read_bytes_per_s"] for rank in together) - 1 / alone
    return rates, output_bytes(flags) * added_s


def ranks_per_core(flags: argparse.Namespace, n_own: int, n_cores: int) -> float:
    """The mean over the ticks of a prefill step; at least 1 in each tick."""
    n_pieces = count_pieces(flags.prompt_tokens, flags.pp)
    n_ticks = n_pieces + flags.pp - 1
    running = (min(tick + 1, n_ticks - tick, n_pieces, flags.pp) for tick in range(n_ticks))
    return statistics.mean(max(1.0, n_stages * n_own / n_cores) for n_stages in running)


def output_bytes(flags: argparse.Namespace) -> int:
    """The bytes of the output layer."""
    args = args_of(find_model(flags.model))
    (shard,) = make_plan(args, 1).shards
    return head_bytes(args, shard, make_precision(args, "float32", "cpu", flags.quant))


def rates_on(flags: argparse.Namespace, folder: Path, ranks: range) -> dict[str, Any]:
    """The rates of ranks on the cores that they have in `bench`."""
    path = folder / f"rates-{ranks[0]}.json"
    short = "--prompt-tokens=8", "--max-tokens=8", "--repeat=1", "--no-exact"
    command = "bench", f"--nproc={len(ranks)}", f"--calibrate={path}", *short, *of_bench(flags)
    parallel_llama(*command, ranks=ranks)
    return json.loads(path.read_text())


def bench(flags: argparse.Namespace, layout: Sequence[int], hosts: LinkedHosts) -> dict[str, float]:
    """The figures of `bench` over the hosts."""
    sizes = f"--prompt-tokens={flags.prompt_tokens}", f"--max-tokens={flags.max_tokens}"
    more = f"--repeat={flags.repeat}", f"--pp={flags.pp}", "--start-timeout=300", *of_bench(flags)
    return json.loads(hosts.output(layout, "bench", *sizes, *more))


def of_model(flags: argparse.Namespace) -> list[str]:
    return [f"--model={flags.model}", "--dtype=float32", f"--quant={flags.quant}", "--json"]


def of_bench(flags: argparse.Namespace) -> list[str]:
    return [*of_model(flags), "--timeout=300", "--random-weights=1"]


def parallel_llama(*verb: str, ranks: range = range(1)) -> str:
    """The output of a command on the cores of these ranks, with one thread for each rank."""
    env, cores = {**os.environ, "OMP_NUM_THREADS": "1"}, sorted(os.sched_getaffinity(0))
    own = {str(cores[rank % len(cores)]) for rank in ranks}
    pinned = "taskset", "--cpu-list", ",".join(own)
    return run(*pinned, sys.executable, "-m", "parallel_llama", *verb, env=env, cwd=ROOT)
