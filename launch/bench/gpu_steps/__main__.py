"""Runs one step in this process and prints its rows as JSON lines; `gpu.py` starts it.

Before the rows of each part it prints a line with the name of the part.
"""

import argparse
import dataclasses
import faulthandler
import importlib
import json
import sys
from collections.abc import Callable, Mapping
from functools import partial
from itertools import dropwhile, islice

import torch

from launch.bench.gpu_steps import DEVICE_LOST, DeviceLost, Rows, Setting, attempt
from parallel_llama.ops.cuda import decode_attention

# Programs of decode attention in a rehearsal. The interpreter runs programs one after another, and
# with as many programs as on a GPU, most would have no work.
_FEW_PROGRAMS = 4
_LEFT_S = 2.0  # the stacks of a late step are written this long before it is killed


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("step", help="a module of this package, and its arguments after colons")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--after", help="skip this part and all parts before it")
    parser.add_argument(
        "--limit-s", type=float, default=0.0, help="write stacks before this time, in seconds"
    )
    parser.add_argument("--read-bytes-per-s", type=float, default=Setting.read_bytes_per_s)
    parser.add_argument("--copy-bytes-per-s", type=float, default=Setting.copy_bytes_per_s)
    parser.add_argument("--matrix-flops", type=float, default=Setting.matrix_flops)
    given = parser.parse_args()
    if given.limit_s > _LEFT_S:
        faulthandler.enable()
        faulthandler.dump_traceback_later(given.limit_s - _LEFT_S)
    device = torch.device("cpu") if given.dry_run else torch.device("cuda", 0)
    rates = given.read_bytes_per_s, given.copy_bytes_per_s, given.matrix_flops
    setting = Setting(device, given.dry_run, *rates)
    torch.manual_seed(0)
    if given.dry_run:
        decode_attention._PROGRAMS = _FEW_PROGRAMS
    parts = parts_of(given.step)
    names = list(parts)
    if given.after is not None:
        names = list(islice(dropwhile(lambda name: name != given.after, names), 1, None))
    for name in names:
        print(json.dumps({"part": name}), flush=True)
        try:
            for row in attempt(name, partial(parts[name], setting)):
                print(json.dumps(dataclasses.asdict(row)), flush=True)
        except DeviceLost:
            return DEVICE_LOST
    faulthandler.cancel_dump_traceback_later()
    return 0


def parts_of(step: str) -> Mapping[str, Callable[[Setting], Rows]]:
    """The parts of a step by name; the step itself if it has one part, or cannot be imported."""
    name, *of = step.split(":")
    try:
        module = importlib.import_module(f"launch.bench.gpu_steps.{name}")
    except Exception as error:
        return {step: partial(_fails, error)}
    if hasattr(module, "PARTS"):
        parts: Mapping[str, Callable[[Setting], Rows]] = module.PARTS
        return parts
    return {step: lambda setting: module.rows(setting, *of)}


def _fails(error: Exception, _: Setting) -> Rows:
    raise error
    yield  # a generator, like every part


if __name__ == "__main__":
    sys.exit(main())
