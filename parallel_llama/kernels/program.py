"""From a kernel in LLVM's intermediate representation to a function that Python can call.

A kernel runs on the threads that torch's own operations run on: torch's copy of GNU OpenMP starts
it. A second set of threads would fight with that one over the cores.

Source: libgomp's ABI, section "Implementing PARALLEL construct" of its manual.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import llvmlite.binding as llvm
import torch
from llvmlite import ir

from parallel_llama.kernels.builder import BYTE, I32, I64, VOID, declared

# What builds the body of a kernel: its arguments, the thread's number and how many there are.
Body = Callable[[ir.IRBuilder, list[ir.Value], ir.Value, ir.Value], None]


@dataclass(frozen=True)
class Machine:
    """What kernels are shaped by: bytes of a vector register, and how many of them there are."""

    vector_bytes: int
    n_vectors: int


@cache
def this_machine() -> Machine:
    """The vectors of the CPU at hand."""
    features = llvm.get_host_cpu_features()
    if features.get("avx512f"):
        return Machine(64, 32)
    if features.get("avx2"):
        return Machine(32, 16)
    return Machine(16, 32 if features.get("neon") else 16)


@cache
def openmp() -> ctypes.CDLL | None:
    """The OpenMP library that torch runs on; None where it is not GNU's or like it."""
    preloaded = ctypes.CDLL(None)
    if hasattr(preloaded, "GOMP_parallel"):
        return preloaded
    found = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*"))
    return ctypes.CDLL(str(found[0])) if found else None


@cache
def computes(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether kernels can be made for tensors of this type and place."""
    if device.type != "cpu" or dtype not in (torch.float32, torch.float64) or openmp() is None:
        return False
    features = llvm.get_host_cpu_features()
    # Without it, each product and sum would be a call of a function.
    return bool(features.get("fma") or features.get("neon"))


def worthwhile_threads(n_numbers: int) -> int:
    """On how many threads to pass over so many numbers; few are done before another starts."""
    return torch.get_num_threads() if n_numbers > 1 << 16 else 1


class Program:
    """A kernel, compiled; calling it runs it on some of torch's threads and waits for them.

    Arguments are 64-bit integers and addresses; `n_arguments` of them reach `body` as i64 values.
    """

    def __init__(self, name: str, n_arguments: int, body: Body) -> None:
        library = openmp()
        assert library is not None, "kernels need torch's own OpenMP"
        module = ir.Module(name)
        _entry(module, n_arguments, body)
        self._engine = _compiled(module, library)
        self._entry = ctypes.c_void_p(self._engine.get_function_address("entry"))
        self._arguments = ctypes.c_int64 * n_arguments
        self._start = library.GOMP_parallel

    def __call__(self, n_threads: int, *arguments: int) -> None:
        self._start(self._entry, self._arguments(*arguments), n_threads, 0)


def _entry(module: ir.Module, n_arguments: int, body: Body) -> None:
    """What each thread starts with: it looks its number up and unpacks the arguments."""
    function = ir.Function(module, ir.FunctionType(VOID, [BYTE.as_pointer()]), "entry")
    b = ir.IRBuilder(function.append_basic_block())
    packed = b.bitcast(function.args[0], I64.as_pointer())
    arguments = [b.load(b.gep(packed, [I64(number)])) for number in range(n_arguments)]
    thread, n_threads = (
        b.sext(b.call(declared(module, name, I32, []), []), I64)
        for name in ("omp_get_thread_num", "omp_get_num_threads")
    )
    body(b, arguments, thread, n_threads)
    b.ret_void()


def _compiled(module: ir.Module, library: ctypes.CDLL) -> llvm.ExecutionEngine:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    for name in ("omp_get_thread_num", "omp_get_num_threads"):
        address = ctypes.cast(getattr(library, name), ctypes.c_void_p).value
        assert address is not None
        llvm.add_symbol(name, address)
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3
    )
    code = llvm.parse_assembly(str(module))
    code.verify()
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(2))
    passes.getModulePassManager().run(code, passes)
    engine = llvm.create_mcjit_compiler(code, machine)
    engine.finalize_object()
    return engine
