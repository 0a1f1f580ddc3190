"""From a kernel in LLVM's intermediate representation to a function that Python can call.

A kernel runs on the threads that torch's own operations run on: torch's copy of GNU OpenMP starts
it. A second set of threads would fight with that one over the cores.

Source: libgomp's ABI, section "Implementing PARALLEL construct" of its manual.
"""

import ctypes
import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, partial
from pathlib import Path
from types import FunctionType
from typing import Any, Generic, Protocol

import llvmlite
import llvmlite.binding as llvm
import torch
from llvmlite import ir

from parallel_llama.ops.cpu.arguments import ArgumentsT, Signature
from parallel_llama.ops.cpu.builder import I32, I64, VOID, Lanes, Thread, Value
from parallel_llama.ops.cpu.code_cache import machine_code
from parallel_llama.ops.cpu.vector_math import ByteDots

Body = Callable[[ir.IRBuilder, Thread, Any], None]  # builds a kernel; takes its arguments last

_FROM_OPENMP = "omp_get_thread_num", "omp_get_num_threads"
_FROM_SYSTEM = ("sched_yield",)


@dataclass(frozen=True)
class Machine:
    """What kernels are shaped by: bytes of a vector register, and how many of them there are.

    `byte_dots` says how it multiplies bytes.
    """

    vector_bytes: int
    n_vectors: int
    byte_dots: ByteDots = "plain"

    def lanes(self, dtype: torch.dtype, size: int = 0) -> Lanes:
        """A register of numbers, or of so many of them that a row of this size has no rest."""
        return Lanes(dtype, dtype, math.gcd(self.vector_bytes // dtype.itemsize, size))


@cache
def this_machine() -> Machine:
    """The vectors of the CPU at hand."""
    features = llvm.get_host_cpu_features()
    if features.get("avx512f") and features.get("avx512bw"):
        return Machine(64, 32, "vnni" if features.get("avx512vnni") else "madd")
    if features.get("avx2"):
        return Machine(32, 16, "vnni" if features.get("avxvnni") else "madd")
    if features.get("neon"):
        return Machine(16, 32, "usdot" if features.get("i8mm") else "plain")
    return Machine(16, 16)


@cache
def openmp() -> ctypes.CDLL | None:
    """The OpenMP library that torch runs on; None where it is not GNU's or like it."""
    preloaded = ctypes.CDLL(None)
    if hasattr(preloaded, "GOMP_parallel"):
        return preloaded
    found = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*"))
    return ctypes.CDLL(str(found[0])) if found else None


def compute_alone() -> None:
    """Let torch's operations run on this thread alone; what other threads have stays as it is.

    Each thread that calls torch gets a team of OpenMP's threads of its own. Two teams are more
    than there are cores, and then GNU's sends its threads to sleep after every operation.
    """
    torch.get_num_threads()  # the first call sets it
    library = openmp()
    if library is not None:
        library.omp_set_num_threads(1)


@cache
def computes(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether kernels can be made for tensors of this type and place."""
    if device.type != "cpu" or dtype not in (torch.float32, torch.float64) or openmp() is None:
        return False
    features = llvm.get_host_cpu_features()
    # Without it, each product and sum would be a call of a function.
    return bool(features.get("fma") or features.get("neon"))


def threads_for(n_numbers: int) -> int:
    """On how many threads to pass over so many numbers; few are done before another starts."""
    return torch.get_num_threads() if n_numbers > 1 << 16 else 1


class Program(Generic[ArgumentsT]):
    """A kernel, compiled; calling it runs it on some of torch's threads and waits for them.

    Args:
        name: for debuggers.
        arguments: the dataclass that declares the arguments.
        body: builds the kernel.
        types: see `Signature`.

    `part` is the address of what one thread does: a function of the address of `packed` arguments,
    the thread's number, and how many threads there are.
    """

    def __init__(
        self, name: str, arguments: type[ArgumentsT], body: Body, **types: ir.Type
    ) -> None:
        library = openmp()
        assert library is not None, "kernels need torch's own OpenMP"
        signature = Signature(arguments, types)
        self._code = _linked(name, _compiled(name, signature, body), library)
        self._entry = ctypes.c_void_p(self._code["entry"])
        self.part: int = self._code["part"]
        self.packed = signature.pack
        self._start = library.GOMP_parallel

    def __call__(self, n_threads: int, arguments: ArgumentsT) -> None:
        self._start(self._entry, self.packed(arguments), n_threads, 0)


class Run(Protocol):
    """What becomes of a program that is to run: it does at once, or it is kept for later."""

    def __call__(
        self, program: Program[ArgumentsT], n_threads: int, arguments: ArgumentsT, /
    ) -> None: ...


at_once: Run = Program.__call__


def _compiled(name: str, signature: Signature[Any], body: Body) -> bytes:
    """The machine code, from the cache where there is some.

    A kernel is known by what builds it, without being built: that takes longer than all else here.
    """
    machine = _this_target()
    made_by = f"llvmlite {llvmlite.__version__} LLVM {llvm.llvm_version_info} {machine.triple}"
    cpu = f"{llvm.get_host_cpu_name()} {llvm.get_host_cpu_features().flatten()}"

    def make() -> bytes:
        return _optimised(_module(name, signature, body), machine)

    try:
        own = _recipe(body)
    except OSError:
        return make()
    if _SOURCES is None:
        return make()
    recipe = (made_by, cpu, _SOURCES, name, *map(str, signature.types), own)
    return machine_code("\n".join(recipe), make)


def _recipe(body: Body) -> str:
    """A kernel's function, its module's source, and its parameters."""
    function, parameters = body, ()
    if isinstance(body, partial):
        function, parameters = body.func, body.args
        assert not body.keywords, "parameters of kernels have their places"
    assert isinstance(function, FunctionType) and function.__closure__ is None
    source = _source_digest((Path(function.__code__.co_filename),))
    return " ".join((function.__qualname__, source, *map(_said, parameters)))


def _said(parameter: object) -> str:
    """All there is to say of a parameter, which is plain data."""
    if is_dataclass(parameter):
        own = (f"{each.name}={_said(getattr(parameter, each.name))}" for each in fields(parameter))
        return f"{type(parameter).__qualname__}({', '.join(own)})"
    assert parameter is None or isinstance(parameter, (int, float, str, torch.dtype))
    return repr(parameter)


def _sources() -> tuple[Path, ...]:
    """All that kernels are built with."""
    package = Path(__file__).parents[1]
    others = package.parent / "dtypes.py", package.parent / "parallel" / "shared_memory.py"
    return *sorted(package.rglob("*.py")), *others


@cache
def _source_digest(files: tuple[Path, ...]) -> str:
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()


# Read as they are imported: once kernels are built, the files may no longer be what builds them.
# There are none in an archive, where code is made every time.
try:
    _SOURCES: str | None = _source_digest(_sources())
except OSError:
    _SOURCES = None


def _module(name: str, signature: Signature[Any], body: Body) -> ir.Module:
    """A kernel in LLVM's intermediate representation."""
    module = ir.Module(name)
    _entry(module, _part(module, signature, body))
    return module


def _part(module: ir.Module, signature: Signature[Any], body: Body) -> ir.Function:
    """What one thread does with the packed arguments."""
    packed = ir.LiteralStructType(signature.types).as_pointer()
    function = ir.Function(module, ir.FunctionType(VOID, [packed, I64, I64]), "part")
    function.attributes.add("noinline")  # a second copy of it would take as long to compile
    b = ir.IRBuilder(function.append_basic_block())
    address, number, count = function.args
    fields = (b.gep(address, [I32(0), I32(i)]) for i in range(len(signature.types)))
    arguments = signature.loaded(Value(b, b.load(field)) for field in fields)
    body(b, Thread(Value(b, number), Value(b, count)), arguments)
    b.ret_void()
    return function


def _entry(module: ir.Module, part: ir.Function) -> None:
    """What OpenMP starts each thread with: it looks its number up."""
    packed = part.args[0].type
    function = ir.Function(module, ir.FunctionType(VOID, [packed]), "entry")
    b = ir.IRBuilder(function.append_basic_block())
    asked = (ir.Function(module, ir.FunctionType(I32, []), name) for name in _FROM_OPENMP)
    b.call(part, [function.args[0], *(b.sext(b.call(each, []), I64) for each in asked)])
    b.ret_void()


def _linked(name: str, code: bytes, library: ctypes.CDLL) -> llvm.ResourceTracker:
    """The machine code, which lives as long as this object; it has the address of each function."""
    linker = llvm.JITLibraryBuilder().add_object_img(code)
    for names, source in ((_FROM_OPENMP, library), (_FROM_SYSTEM, ctypes.CDLL(None))):
        for each in names:
            linker.import_symbol(each, ctypes.cast(getattr(source, each), ctypes.c_void_p).value)
    linker.export_symbol("entry").export_symbol("part")
    return linker.link(llvm.create_lljit_compiler(_this_target()), name)


@cache
def _this_target() -> llvm.TargetMachine:
    """The CPU at hand, as LLVM knows it."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    cpu, features = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=cpu, features=features, opt=3
    )


def _optimised(built: ir.Module, machine: llvm.TargetMachine) -> bytes:
    """The machine code of a module."""
    module = llvm.parse_assembly(str(built))
    module.verify()
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(2))
    passes.getModulePassManager().run(module, passes)
    code: bytes = machine.emit_object(module)
    return code
