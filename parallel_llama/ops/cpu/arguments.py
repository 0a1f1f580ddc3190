"""Typed arguments of kernels: each kernel declares its arguments once, as a dataclass.

The LLVM types, the memory layout and the loads in the kernel are derived from the fields. An
instance holds numbers and addresses when Python calls the kernel, and `Value`s while the kernel is
built.
"""

import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from operator import attrgetter
from typing import Annotated, Any, Generic, TypeVar, get_origin, get_type_hints

from llvmlite import ir

from parallel_llama.ops.cpu.ir import F32, F64, I8, I32, I64, Value

T = TypeVar("T", covariant=True)  # int or float in a call, Value in a kernel
ArgumentsT = TypeVar("ArgumentsT")  # a dataclass of the fields below, or of other such dataclasses

Integer = Annotated[T, I64]
Float64 = Annotated[T, F64]
# Addresses of values of these types.
Bytes = Annotated[T, I8.as_pointer()]
Words = Annotated[T, I32.as_pointer()]
Integers = Annotated[T, I64.as_pointer()]
Floats = Annotated[T, F32.as_pointer()]
Doubles = Annotated[T, F64.as_pointer()]
# Addresses whose type depends on the kernel's parameters: the dtype to compute in, the dtype of a
# weight, and the dtype of a KV cache.
Numbers = Annotated[T, "numbers"]
Weights = Annotated[T, "weights"]
Rows = Annotated[T, "rows"]


class Signature(Generic[ArgumentsT]):
    """The LLVM types and the memory layout of a dataclass of arguments.

    Args:
        arguments: the dataclass, which may contain others.
        types: the LLVM types of `Numbers`, `Weights` and `Rows`, by their names in lower case.

    Attributes:
        pack: packs arguments as the kernel reads them, 8 bytes each.
    """

    def __init__(self, arguments: type[ArgumentsT], types: Mapping[str, ir.Type]) -> None:
        self._arguments = arguments
        self.names, self.types = zip(*_fields(arguments, types), strict=True)
        assert len(self.names) > 1  # attrgetter returns no tuple for one name
        values = attrgetter(*self.names)
        pack = struct.Struct("".join("d" if type_ == F64 else "q" for type_ in self.types)).pack
        # A closure, because it is faster than a method and every call of a kernel calls it.
        self.pack: Callable[[ArgumentsT], bytes] = lambda arguments: pack(*values(arguments))

    def loaded(self, values: Iterator[Value]) -> Any:
        """An instance of the dataclass with these values, one for each of `types`."""
        return _with_values(self._arguments, values)


def _fields(
    arguments: type[Any], types: Mapping[str, ir.Type], prefix: str = ""
) -> Iterator[tuple[str, ir.Type]]:
    """Yields the dotted name and the LLVM type of each field, in order."""
    for name, hint in _hints(arguments).items():
        if is_dataclass(get_origin(hint)):
            yield from _fields(hint, types, f"{prefix}{name}.")
        else:
            (type_,) = hint.__metadata__
            yield f"{prefix}{name}", types[type_] if isinstance(type_, str) else type_


def _with_values(arguments: type[Any], values: Iterator[Value]) -> Any:
    fields = {
        name: _with_values(hint, values) if is_dataclass(get_origin(hint)) else next(values)
        for name, hint in _hints(arguments).items()
    }
    return arguments(**fields)


def _hints(arguments: type[Any]) -> dict[str, Any]:
    return get_type_hints(get_origin(arguments) or arguments, include_extras=True)
