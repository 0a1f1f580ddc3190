"""Runs one step in this process and prints its rows as JSON lines; `gpu.py` starts it."""

import argparse
import dataclasses
import importlib
import json

import torch

from launch.bench.gpu_steps import Rows, Setting, attempt


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("step", help="a module of this package, and for `shapes:` the shape")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--copy-bytes-per-s", type=float, default=Setting.copy_bytes_per_s)
    parser.add_argument("--matrix-flops", type=float, default=Setting.matrix_flops)
    given = parser.parse_args()
    device = torch.device("cpu") if given.dry_run else torch.device("cuda", 0)
    setting = Setting(device, given.dry_run, given.copy_bytes_per_s, given.matrix_flops)

    def rows() -> Rows:
        name, *of = given.step.split(":")
        yield from importlib.import_module(f"launch.bench.gpu_steps.{name}").rows(setting, *of)

    for row in attempt(given.step, rows):
        print(json.dumps(dataclasses.asdict(row)), flush=True)


if __name__ == "__main__":
    main()
