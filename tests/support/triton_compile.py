"""Compiles Triton kernels for GPUs on a machine without one.

`compiled(__file__, "launches")` calls the function `launches` of a test module, which calls
operators on tensors of typical shapes. It runs in a process that compiles every launch instead of
running it.
"""

import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TARGETS = (80, 90, 100)


@dataclass(frozen=True)
class Compiled:
    """One kernel for one architecture; `stack_bytes` are spilled registers.

    `is_fused` says whether multiply-adds may be fused, which rounds once instead of twice.
    """

    kernel: str
    target: int
    registers: int
    stack_bytes: int
    shared_bytes: int
    is_fused: bool


def compiled(test_file: str, function: str) -> list[Compiled]:
    """Compiles the first launch of every kernel for every target, and others for one in turn."""
    with tempfile.TemporaryDirectory() as cache:
        done = subprocess.run(
            [sys.executable, __file__, test_file, function],
            cwd=ROOT,
            env={
                **{name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"},
                "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests/support"), *sys.path]),
                "TRITON_CACHE_DIR": cache,
            },
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    return [Compiled(**json.loads(line)) for line in done.stdout.splitlines()]


def main(test_file: str, function: str) -> None:
    from triton.runtime.jit import JITFunction

    seen: dict[str, set[str]] = {}

    def run(kernel: Any, *arguments: Any, **constants: Any) -> None:
        source, options = _source(kernel, arguments, constants)
        key = f"{source.signature} {source.constants} {source.attrs} {options}"
        known = seen.setdefault(kernel.__name__, set())
        if key not in known:
            targets = (TARGETS[len(known) % len(TARGETS)],) if known else TARGETS
            known.add(key)
            for target in targets:
                print(json.dumps(asdict(_compile(source, options, target))), flush=True)

    JITFunction.run = run
    spec = importlib.util.spec_from_file_location("launches", test_file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    getattr(module, function)()


def _source(
    kernel: Any, arguments: tuple[Any, ...], constants: Mapping[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """The kernel with the types of its arguments, and the options of the compiler.

    As in a launch, integers of 1 are constants, and values divisible by 16 are marked as such,
    except for arguments that are not specialised.
    """
    from triton.compiler import ASTSource

    names = kernel.arg_names
    options = {name: constants[name] for name in constants.keys() - {*names, "grid", "warmup"}}
    own = {name: value for name, value in constants.items() if name in names}
    given = {**dict(zip(names, arguments, strict=False)), **own}
    signature, constexprs, attrs = {}, {}, {}
    for place, param in enumerate(kernel.params):
        value = given.get(param.name, param.default)
        kind = "constexpr" if param.is_constexpr else _type_of(value, param.do_not_specialize)
        signature[param.name] = kind
        if kind == "constexpr":
            constexprs[(place,)] = value
        elif _is_divisible(value) and not (
            param.do_not_specialize or param.do_not_specialize_on_alignment
        ):
            attrs[(place,)] = [["tt.divisibility", 16]]
    return ASTSource(kernel, signature, constexprs, attrs), options


def _type_of(value: Any, is_any: bool) -> str:
    import torch
    from triton.runtime.jit import type_canonicalisation_dict

    if isinstance(value, torch.Tensor):
        return f"*{type_canonicalisation_dict[str(value.dtype).removeprefix('torch.')]}"
    if value is None or (value == 1 and type(value) is int and not is_any):
        return "constexpr"
    if isinstance(value, bool):
        return "i1"
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64"
    return "fp32"


def _is_divisible(value: Any) -> bool:
    import torch

    number = value.data_ptr() if isinstance(value, torch.Tensor) else value
    return type(number) is int and number % 16 == 0


def _compile(source: Any, options: dict[str, Any], target: int) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.language import target_info

    gpu = GPUTarget("cuda", target, 32)

    def tell() -> GPUTarget:
        return gpu

    tell.__triton_builtin__ = True  # type: ignore[attr-defined]
    target_info.current_target = tell  # there is no driver that could tell
    made = triton.compile(source, target=gpu, options=dict(options))
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        command = [tool, "--dump-resource-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack, shared = (
        int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK", "SHARED")
    )
    shared, is_fused = max(shared, made.metadata.shared), made.metadata.enable_fp_fusion
    return Compiled(source.name, target, registers, stack, shared, is_fused)


if __name__ == "__main__":
    main(*sys.argv[1:])
