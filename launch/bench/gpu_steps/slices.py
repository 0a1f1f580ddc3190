"""One rank's shard of 8B and 70B on 8 GPUs, measured by `parallel-llama bench --slice 0/8`.

Shares are fractions of the speed at which the rank's bytes could be read at the measured copy
bandwidth. The names of modelled figures contain "modelled".
"""

import io
import json
from contextlib import redirect_stdout

from launch.bench.gpu_steps import Row, Rows, Setting, attempt
from launch.bench.gpu_steps.models import named, require_right
from parallel_llama.cli.main import main

_TARGETS = {"llama-3-8b": 1.8, "llama-3-70b": 1.25}


def rows(setting: Setting) -> Rows:
    for name in _TARGETS:
        yield from attempt(f"{name}, rank 0 of 8", lambda name=name: _slice(name, setting))


def _slice(name: str, setting: Setting) -> Rows:
    label, size = f"{name}, rank 0 of 8", setting.pick(8, 2)
    sizes = [f"--prompt-tokens={setting.pick(512, 9)}", f"--max-tokens={setting.pick(64, 4)}"]
    require_right(name, setting, n_ranks=size)
    out = io.StringIO()
    flags = [f"--slice=0/{size}", f"--device={setting.device.type}", "--repeat=2", "--json"]
    with named(name, setting) as model, redirect_stdout(out):
        code = main(["bench", f"--model={model}", *flags, *sizes])
    if code:
        yield Row(label, wrong=f"bench ended with {code}; its message is in the log")
        return
    found = json.loads(out.getvalue())
    n_bytes = found["weight_bytes_per_step"] + found["kv_bytes_per_step"]
    floor_ms = n_bytes / setting.copy_bytes_per_s * 1e3
    measured_ms = found["compute_ms_per_step"]
    target = f"at most {_TARGETS[name]}x of its bytes' time"
    note = f"{measured_ms / floor_ms:.3g}x of its bytes' time"
    yield Row(f"{label}: measured work", measured_ms, "ms", floor_ms / measured_ms, target, note)
    for wait, ms in found["modelled_ms_per_step"].items():
        yield Row(
            f"{label}: modelled step, {wait} per collective",
            ms,
            "ms",
            note=f"{found['collectives_per_step']} collectives",
        )
