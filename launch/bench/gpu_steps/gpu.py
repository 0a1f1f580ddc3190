"""Versions of the GPU and libraries, and the peak rates that other figures are compared with.

The copy bandwidth counts bytes read and bytes written. The read bandwidth is the rate of the
faster of two reductions.
"""

import platform
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version

import torch

from launch.bench.gpu_steps import COPY, MATRIX, READ, Row, Rows, Setting, Wrong, attempt
from launch.bench.gpu_steps.clock import (
    device_seconds,
    eager_seconds,
    host_seconds,
    in_us,
    measured,
)
from launch.bench.gpu_steps.read_rate import n_parts, read_sums

_PACKAGES = ("torch", "triton", "transformers", "numpy")
_N_LAUNCHES = 1000


def rows(setting: Setting) -> Rows:
    yield Row("versions", note=_versions(setting))
    yield Row("order of attention kernels", note=_attention_order())
    parts = (READ, _read), (COPY, _copy), (MATRIX, _matrix), ("launches", _launches)
    for name, part in parts:
        yield from attempt(name, lambda part=part: part(setting))


def _versions(setting: Setting) -> str:
    found = [f"Python {platform.python_version()}"]
    for package in _PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"no {package}")
    if not setting.is_rehearsal:
        gpu = torch.cuda.get_device_properties(setting.device)
        found.append(f"CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}")
        found.append(f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB, sm_{gpu.major}{gpu.minor}")
    return ", ".join(found)


def _attention_order() -> str:
    """The order in which torch's attention tries its backends, if this torch shows it."""
    order = getattr(torch._C, "_get_sdp_priority_order", None)
    if order is None:
        return "not shown by this torch"
    names = {-1: "none", 0: "math", 1: "flash", 2: "memory-efficient", 3: "cuDNN", 4: "override"}
    return ", ".join(names.get(int(each), str(each)) for each in order())


def _read(setting: Setting) -> Rows:
    values = torch.randint(2**62, (setting.pick(2**29, 2**13),), device=setting.device)
    sums = values.new_empty(n_parts(len(values)))
    n, found = setting.pick(4, 1), []
    for name, read in (
        ("torch.sum", values.sum),
        ("a kernel that only reads", lambda: read_sums(values, sums)),
    ):
        seconds = device_seconds([read] * n, setting)
        found.append(measured(Row(name), seconds, lambda s: values.nbytes / s / 1e9, "GB/s"))
    if int(sums.sum()) != int(values.sum()):
        raise Wrong("the sums of the kernel that only reads differ from torch's")
    slower, faster = sorted(found, key=lambda row: row.value or 0.0)
    yield replace(faster, name=READ, note=f"{faster.name}; {slower.name}: {slower.value:.4g} GB/s")


def _copy(setting: Setting) -> Rows:
    n = setting.pick(2**31, 2**16)
    source = torch.randn(n, dtype=torch.bfloat16, device=setting.device)
    target = torch.empty_like(source)
    seconds = device_seconds([lambda: target.copy_(source)] * setting.pick(4, 1), setting)
    yield measured(Row(COPY), seconds, lambda s: 2 * source.nbytes / s / 1e9, "GB/s")


def _matrix(setting: Setting) -> Rows:
    n = setting.pick(8192, 64)
    a, b = torch.randn(2, n, n, device=setting.device).to(torch.bfloat16)
    seconds = device_seconds([lambda: a @ b] * setting.pick(4, 1), setting)
    yield measured(Row(MATRIX), seconds, lambda s: 2 * n**3 / s / 1e12, "TFLOP/s")


def _launches(setting: Setting) -> Rows:
    x = torch.zeros(1, device=setting.device)
    n = setting.pick(_N_LAUNCHES, 10)

    def launch() -> None:
        for _ in range(n):
            x.add_(1)

    yield in_us(Row("launch, on the host"), host_seconds(launch, setting) / n)
    yield in_us(Row("launch, one after another"), eager_seconds(launch, setting) / n)
    seconds = device_seconds([lambda: x.add_(1)] * n, setting)
    yield in_us(Row("kernel in a graph, with its gap"), seconds)
