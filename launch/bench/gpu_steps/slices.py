"""The work of one of 8 ranks of 8B and 70B, measured on one GPU by `bench --slice 0/8`.

Shares relate the bytes that the rank reads in a step to the measured bandwidths. The names of
modelled figures contain "modelled".
"""

import io
import json
from contextlib import redirect_stdout

from launch.bench.gpu_steps import Row, Rows, Setting
from launch.bench.gpu_steps.models import named, require_right, why_not_recorded
from parallel_llama.cli.main import main

_TARGETS = {"llama-3-8b": 1.8, "llama-3-70b": 1.25}


def rows(setting: Setting, name: str) -> Rows:
    label, size = f"{name}, rank 0 of 8", setting.pick(8, 2)
    sizes = [f"--prompt-tokens={setting.pick(512, 9)}", f"--max-tokens={setting.pick(64, 4)}"]
    require_right(name, setting, n_ranks=size)
    out = io.StringIO()
    flags = [f"--slice=0/{size}", f"--device={setting.device.type}", "--repeat=2", "--json"]
    with named(name, setting) as model, redirect_stdout(out), why_not_recorded() as reasons:
        code = main(["bench", f"--model={model}", *flags, *sizes])
    if code:
        yield Row(label, wrong=f"bench ended with {code}; its message is in the log")
        return
    found = json.loads(out.getvalue())
    n_bytes = found["weight_bytes_per_step"] + found["kv_bytes_per_step"]
    floor_ms = n_bytes / setting.copy_bytes_per_s * 1e3
    measured_ms = found["compute_ms_per_step"]
    target = f"at most {_TARGETS[name]}x the time to copy its bytes"
    note = "; ".join((f"{measured_ms / floor_ms:.3g}x", *reasons))
    row = Row(f"{label}: measured work", measured_ms, "ms", target=target, note=note)
    yield setting.moved(row, n_bytes, measured_ms / 1e3)
    for wait, ms in found["modelled_ms_per_step"].items():
        yield Row(
            f"{label}: modelled step, {wait} per collective",
            ms,
            "ms",
            note=f"{found['collectives_per_step']} collectives",
        )
