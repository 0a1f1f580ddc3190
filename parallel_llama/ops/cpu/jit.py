"""Compiles kernels, given in LLVM's intermediate representation, to functions that Python can call.

A kernel runs on the threads of torch's own operations: torch's copy of GNU OpenMP starts it. A
second set of threads would compete with that one for the cores.

Machine code is kept in the user's cache folder. What is found there runs, so only files that this
user alone can have written are taken: the folder and the file belong to the user, and nobody else
may write to them. A file also contains the digest of its key and of its content; one that is
damaged, cut short or renamed is made anew. Without such a folder, code is made every time.

Sources: libgomp's ABI, section "Implementing PARALLEL construct" of its manual; XDG base directory
specification.
"""

import ctypes
import hashlib
import math
import os
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
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
from parallel_llama.ops.cpu.ir import I32, I64, VOID, Lanes, Thread, Value
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
    """The files that kernels are built with: those of this package, and those they import."""
    kernels = Path(__file__).parent
    package = kernels.parents[1]
    others = package / "dtypes.py", package / "parallel" / "shared_memory.py"
    return *sorted((*kernels.glob("*.py"), *kernels.parent.glob("*.py"))), *others


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


_DIGEST_BYTES = 32
_MAX_BYTES = 1 << 20  # of one kernel, which has some 10 KB
_MAX_FILES = 256


def machine_code(key: str, make: Callable[[], bytes]) -> bytes:
    """The code for a key, from the cache or made; the key says all that the code depends on."""
    folder, name = _folder(), hashlib.sha256(key.encode()).hexdigest()
    if folder is None:
        return make()
    path = folder / f"{name}.o"
    code = _read(path, name)
    if code is None:
        code = make()
        with suppress(OSError):  # a full disk costs the next start some time
            _write(path, _digest(name, code) + code)
    return code


def _folder() -> Path | None:
    """The cache folder, made where it is not there; None where it is not this user's alone."""
    with suppress(OSError, RuntimeError):  # who has no home folder has no cache
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        if not base.is_absolute():  # as the specification has it
            return None
        folder = base / "parallel_llama" / "kernels"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if _is_ours(folder.lstat(), stat.S_IFDIR):
            return folder
    return None


def _is_ours(status: os.stat_result, kind: int) -> bool:
    mode = status.st_mode
    others_write = mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_IFMT(mode) == kind and status.st_uid == os.geteuid() and not others_write


def _read(path: Path, name: str) -> bytes | None:
    """The code in a file; None where there is none that can be trusted."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            if not _is_ours(os.fstat(descriptor), stat.S_IFREG):
                return None
            content = file.read(_MAX_BYTES)
        code = content[_DIGEST_BYTES:]
        if content[:_DIGEST_BYTES] == _digest(name, code):
            return code
    return None


def _digest(name: str, code: bytes) -> bytes:
    return hashlib.sha256(name.encode() + code).digest()


def _write(path: Path, content: bytes) -> None:
    """Put a whole file in its place; the oldest ones make room."""
    held = sorted(path.parent.glob("*.o"), key=lambda each: each.lstat().st_mtime)
    for old in held[: max(0, len(held) + 1 - _MAX_FILES)]:
        old.unlink(missing_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent)  # nobody else may read or write it
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink()
        raise
