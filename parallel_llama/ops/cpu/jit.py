"""Compiles kernels from LLVM's intermediate representation to functions that Python can call.

Kernels run on torch's copy of GNU OpenMP: a second pool of threads would compete with torch's own
operations for the cores.

Machine code is cached in the user's cache folder. Since the process executes these files, it
accepts only those that no other user can have written: the user must own the folder and the file,
and nobody else may have write permission. A file starts with the digest of its key and content. The
kernel of a damaged, truncated or renamed file is compiled again. Without a cache folder, all
kernels are compiled.

Sources: libgomp's ABI, section "Implementing PARALLEL construct" of its manual; XDG base directory
specification.
"""

import ctypes
import hashlib
import math
import os
import stat
import tempfile
import threading
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
from parallel_llama.ops.cpu.thread_limit import ThreadLimit, run_delay_s
from parallel_llama.ops.cpu.vector_math import ByteDots

Body = Callable[[ir.IRBuilder, Thread, Any], None]  # builds a kernel; its arguments come last

_FROM_OPENMP = "omp_get_thread_num", "omp_get_num_threads"
_FROM_SYSTEM = "sched_yield", "usleep", "send", "recv"

# The code cache. A kernel has about 10 KB; a model in one weight format needs about 12 kernels.
_DIGEST_BYTES = 32
_MAX_BYTES = 1 << 20
_MAX_FILES = 4096


@dataclass(frozen=True)
class CPUFeatures:
    """The properties of a CPU that kernels depend on.

    Args:
        vector_bytes: the size of a vector register.
        n_vectors: the number of vector registers.
        byte_dots: how the CPU computes dot products of bytes.
    """

    vector_bytes: int
    n_vectors: int
    byte_dots: ByteDots = "plain"

    def lanes(self, dtype: torch.dtype, size: int = 0) -> Lanes:
        """The lanes of a whole vector register.

        With `size`, for rows of this many numbers: the largest number of lanes that divides it.
        """
        return Lanes(dtype, dtype, math.gcd(self.vector_bytes // dtype.itemsize, size))


@cache
def this_machine() -> CPUFeatures:
    """The CPU that this process runs on."""
    features = llvm.get_host_cpu_features()
    if features.get("avx512f") and features.get("avx512bw"):
        return CPUFeatures(64, 32, "vnni" if features.get("avx512vnni") else "madd")
    if features.get("avx2"):
        return CPUFeatures(32, 16, "vnni" if features.get("avxvnni") else "madd")
    if features.get("neon"):
        return CPUFeatures(16, 32, "usdot" if features.get("i8mm") else "plain")
    return CPUFeatures(16, 16)


@cache
def openmp() -> ctypes.CDLL | None:
    """The OpenMP library that torch uses, or None if it does not have GNU's interface."""
    loaded = ctypes.CDLL(None)
    if hasattr(loaded, "GOMP_parallel"):
        return loaded
    with suppress(OSError):  # loaded by torch, but its names are visible only to torch
        return ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOW | os.RTLD_NOLOAD)
    bundled = sorted((Path(torch.__file__).parent / "lib").glob("libgomp*"))
    return ctypes.CDLL(str(bundled[0])) if bundled else None


def compute_alone() -> None:
    """Makes torch's operations single-threaded in the calling thread; other threads are unchanged.

    Each thread that calls torch has its own team of OpenMP threads. Two teams have more threads
    than there are cores, and then GNU OpenMP lets its threads sleep after every operation.
    """
    torch.get_num_threads()  # called here, because the first call resets the number of threads
    library = openmp()
    if library is not None:
        library.omp_set_num_threads(1)


@cache
def why_no_kernels() -> str | None:
    """Why kernels cannot run on this host, and the remedy; None if they can."""
    features = llvm.get_host_cpu_features()
    if not (features.get("fma") or features.get("neon")):
        # Every fused multiply-add would be a function call.
        return (
            "the CPU has no fused multiply-add instruction; in a virtual machine, use the CPU "
            "model of the host (-cpu host)"
        )
    if openmp() is None:
        return "torch does not use GNU OpenMP (libgomp); install torch from PyPI"
    return None


def has_kernels() -> bool:
    """Whether kernels run on this CPU, with this build of torch."""
    return why_no_kernels() is None


def computes(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether kernels support tensors of this dtype and device."""
    return device.type == "cpu" and dtype in (torch.float32, torch.float64) and has_kernels()


def threads_for(n_numbers: int) -> int:
    """The number of threads for a pass over n numbers; 1 if more would not pay off."""
    return torch.get_num_threads() if n_numbers > 1 << 16 else 1


class _Team(threading.local):
    """The threads that run the kernels which the current thread calls."""

    def __init__(self) -> None:
        self._ids = frozenset[int]()
        self.limit = ThreadLimit(self._waited_s)

    def _waited_s(self) -> float:
        """How long these threads have waited for a core; NaN if their ids had to be found first."""
        waited_s = run_delay_s(self._ids)
        if len(self._ids) == torch.get_num_threads() and not math.isnan(waited_s):
            return waited_s
        self._ids = _team_ids()
        return math.nan


def _team_ids() -> frozenset[int]:
    """The ids of the threads that OpenMP uses for a kernel."""
    library, ids = openmp(), set[int]()
    assert library is not None
    note = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: ids.add(threading.get_native_id()))
    library.GOMP_parallel(note, None, torch.get_num_threads(), 0)
    return frozenset(ids)


_TEAM = _Team()


class CompiledKernel(Generic[ArgumentsT]):
    """A compiled kernel. Calling it runs it on torch's threads and waits for them.

    While threads wait for cores, it runs on fewer threads than the caller asks for.

    Args:
        arguments: the dataclass that declares the arguments.
        body: builds the kernel.
        types: see `Signature`.

    Attributes:
        part: the address of the function that each thread runs, which takes the address of packed
            arguments, the thread's number, and the number of threads.
        pack: packs arguments as the kernel reads them.
    """

    def __init__(self, arguments: type[ArgumentsT], body: Body, **types: ir.Type) -> None:
        library = openmp()
        assert library is not None, "kernels need torch's own OpenMP"
        signature = Signature(arguments, types)
        self._code = _linked(_compiled(signature, body), library)
        self._entry = ctypes.c_void_p(self._code["entry"])
        self.part: int = self._code["part"]
        self.pack = signature.pack
        self._start = library.GOMP_parallel

    def __call__(self, n_threads: int, arguments: ArgumentsT) -> None:
        packed = self.pack(arguments)
        if n_threads == 1:
            self._start(self._entry, packed, 1, 0)
            return
        _TEAM.limit.run(n_threads, lambda n: self._start(self._entry, packed, n, 0))


class Launcher(Protocol):
    """Calls a kernel: `at_once` runs it, and `Recording.run` records the call."""

    def __call__(
        self, program: CompiledKernel[ArgumentsT], n_threads: int, arguments: ArgumentsT, /
    ) -> None: ...


at_once: Launcher = CompiledKernel.__call__


def _compiled(signature: Signature[Any], body: Body) -> bytes:
    """The machine code of a kernel, from the cache if possible.

    The key is a digest of the source that builds the kernel, not of the built kernel, since
    building takes longer than everything else here.
    """
    machine = _this_target()
    compiler = f"llvmlite {llvmlite.__version__} LLVM {llvm.llvm_version_info} {machine.triple}"
    cpu = f"{llvm.get_host_cpu_name()} {llvm.get_host_cpu_features().flatten()}"

    def make() -> bytes:
        return _optimised(_module(signature, body), machine)

    try:
        body_key = _body_key(body)
    except OSError:
        return make()
    if _SOURCES is None:
        return make()
    key = (compiler, cpu, _SOURCES, *signature.names, *map(str, signature.types), body_key)
    return machine_code("\n".join(key), make)


def _body_key(body: Body) -> str:
    """The function, module source and parameters of a kernel, as a part of its key."""
    function, parameters = body, ()
    if isinstance(body, partial):
        function, parameters = body.func, body.args
        assert not body.keywords, "parameters of kernels are positional"
    assert isinstance(function, FunctionType) and function.__closure__ is None
    source = _source_digest((Path(function.__code__.co_filename),))
    return " ".join((function.__qualname__, source, *map(_text, parameters)))


def _text(parameter: object) -> str:
    """Plain data as text, in full."""
    if is_dataclass(parameter):
        values = (
            f"{field.name}={_text(getattr(parameter, field.name))}" for field in fields(parameter)
        )
        return f"{type(parameter).__qualname__}({', '.join(values)})"
    assert parameter is None or isinstance(parameter, (int, float, str, torch.dtype))
    return repr(parameter)


def _sources() -> tuple[Path, ...]:
    """The files that kernels are built with: those of this package, and those they import."""
    kernels = Path(__file__).parent
    package = kernels.parents[1]
    exchanges = ("collectives.py", "shared_memory.py", "sockets.py", "wait_policy.py")
    return (
        *sorted((*kernels.glob("*.py"), *kernels.parent.glob("*.py"))),
        package / "dtypes.py",
        package / "plan.py",
        *(package / "parallel" / name for name in exchanges),
    )


@cache
def _source_digest(files: tuple[Path, ...]) -> str:
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()


# Read on import, since the files may change before the first kernel is built. A package in an
# archive has no files; its kernels are not cached.
try:
    _SOURCES: str | None = _source_digest(_sources())
except OSError:
    _SOURCES = None


def _module(signature: Signature[Any], body: Body) -> ir.Module:
    """A kernel in LLVM's intermediate representation."""
    module = ir.Module()
    _entry(module, _part(module, signature, body))
    return module


def _part(module: ir.Module, signature: Signature[Any], body: Body) -> ir.Function:
    """The function that each thread runs, with the packed arguments."""
    packed = ir.LiteralStructType(signature.types).as_pointer()
    function = ir.Function(module, ir.FunctionType(VOID, [packed, I64, I64]), "part")
    function.attributes.add("noinline")  # an inlined copy would double the time to compile
    b = ir.IRBuilder(function.append_basic_block())
    address, number, count = function.args
    fields = (b.gep(address, [I32(0), I32(i)]) for i in range(len(signature.types)))
    arguments = signature.loaded(Value(b, b.load(field)) for field in fields)
    body(b, Thread(Value(b, number), Value(b, count)), arguments)
    b.ret_void()
    return function


def _entry(module: ir.Module, part: ir.Function) -> None:
    """The function that OpenMP starts in each thread; passes the thread's number to `part`."""
    packed = part.args[0].type
    function = ir.Function(module, ir.FunctionType(VOID, [packed]), "entry")
    b = ir.IRBuilder(function.append_basic_block())
    queries = (ir.Function(module, ir.FunctionType(I32, []), name) for name in _FROM_OPENMP)
    b.call(part, [function.args[0], *(b.sext(b.call(query, []), I64) for query in queries)])
    b.ret_void()


def _linked(code: bytes, library: ctypes.CDLL) -> llvm.ResourceTracker:
    """Loads machine code. The result maps functions to addresses and keeps the code loaded."""
    linker = llvm.JITLibraryBuilder().add_object_img(code)
    for names, source in ((_FROM_OPENMP, library), (_FROM_SYSTEM, ctypes.CDLL(None))):
        for name in names:
            linker.import_symbol(name, ctypes.cast(getattr(source, name), ctypes.c_void_p).value)
    linker.export_symbol("entry").export_symbol("part")
    return linker.link(llvm.create_lljit_compiler(_this_target()), "kernel")


@cache
def _this_target() -> llvm.TargetMachine:
    """LLVM's description of the CPU that this process runs on."""
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


def machine_code(key: str, make: Callable[[], bytes]) -> bytes:
    """The code for a key, which must contain all that the code depends on."""
    folder, name = _usable_folder(), hashlib.sha256(key.encode()).hexdigest()
    if folder is None:
        return make()
    path = folder / f"{name}.o"
    code = _read(path, name)
    if code is None:
        code = make()
        with suppress(OSError):  # with a full disk, the next start compiles again
            _write(path, _digest(name, code) + code)
    return code


@dataclass(frozen=True)
class CodeCache:
    """The state of the code cache.

    Args:
        folder: its path, whether or not it exists; None without a home folder or with a relative
            XDG_CACHE_HOME.
        is_used: whether kernels are read from and written to the folder.
        n_files: the number of kernels in the folder.
        damaged: the names of damaged files; their kernels will be compiled again.
    """

    folder: Path | None
    is_used: bool
    n_files: int = 0
    damaged: tuple[str, ...] = ()


def code_cache() -> CodeCache:
    """Reads every file of the code cache to find damaged ones."""
    folder = _usable_folder()
    if folder is None:
        return CodeCache(_folder_path(), is_used=False)
    files = list(folder.glob("*.o"))
    damaged = tuple(sorted(file.name for file in files if _read(file, file.stem) is None))
    return CodeCache(folder, os.access(folder, os.W_OK | os.X_OK), len(files), damaged)


def _folder_path() -> Path | None:
    """The path of the cache folder, whether or not it exists."""
    with suppress(RuntimeError):  # a user without a home folder has no cache
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        # The specification forbids relative paths.
        return base / "parallel_llama" / "kernels" if base.is_absolute() else None
    return None


def _usable_folder() -> Path | None:
    """The cache folder, created if missing; None if users other than this one may write to it."""
    folder = _folder_path()
    with suppress(OSError):
        if folder is not None:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if _is_ours(folder.lstat(), stat.S_IFDIR):
                return folder
    return None


def _is_ours(status: os.stat_result, kind: int) -> bool:
    mode = status.st_mode
    others_write = mode & (stat.S_IWGRP | stat.S_IWOTH)
    return stat.S_IFMT(mode) == kind and status.st_uid == os.geteuid() and not others_write


def _read(path: Path, name: str) -> bytes | None:
    """The code in a file, or None if there is no file that can be trusted."""
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
    """Writes a file atomically, and deletes the oldest files beyond the limit."""
    files = sorted(path.parent.glob("*.o"), key=lambda path_: path_.lstat().st_mtime)
    for old in files[: max(0, len(files) + 1 - _MAX_FILES)]:
        old.unlink(missing_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent)  # with mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink()
        raise
