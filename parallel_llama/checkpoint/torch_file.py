"""Opens files of torch.save (.pth, .bin) without running code, and checks which bytes they map.

torch maps the file without checks, so a forged archive could map a weight to the bytes of another
record, or to bytes outside of all records. Therefore the storages of the tensors are compared with
the records of the zip archive.
"""

import os
import struct
import zipfile
from io import BufferedReader
from operator import itemgetter
from pathlib import Path

import torch
from torch import Tensor

from parallel_llama.dtypes import STORED
from parallel_llama.errors import CheckpointError, kind_of
from parallel_llama.files.bounded_files import open_file
from parallel_llama.files.safetensors_header import FileTensor
from parallel_llama.ops.formats import torch_dtype

MAX_RECORDS = 100_000
MAX_PICKLE_BYTES = 100_000_000

_NAMES = {torch_dtype(name): stored for stored, name in STORED.items()}

_LOCAL_HEADER = struct.Struct("<4s22xHH")  # magic, ..., length of the name, length of the extras


def open_torch_file(path: Path) -> dict[str, Tensor]:
    """The tensors of a file of torch.save, memory-mapped and not read.

    Raises: CheckpointError for anything but a zip archive of torch.save that holds one dictionary
    of names to CPU tensors.
    """
    return _opened(path)[0]


def read_torch_header(path: Path) -> dict[str, FileTensor]:
    """The locations of all tensors of a torch file, by name; two tensors may share bytes.

    Raises: CheckpointError as in `open_torch_file`, or if a tensor is not stored row-major.
    """
    state, records = _opened(path)
    storages = [tensor.untyped_storage() for tensor in state.values()]
    mapped = [storage.data_ptr() for storage in storages if storage.nbytes()]
    # The address of the mapping is unknown, but its first storage is the first record.
    shift = min((offset for offset, _ in records), default=0) - min(mapped, default=0)
    located = {}
    for name, tensor in state.items():
        if not tensor.is_contiguous():
            raise CheckpointError(
                f"{path}: tensor {name!r:.200} is not contiguous; if you trust the file, load it "
                "with torch and save it again"
            )
        offset = tensor.data_ptr() + shift if tensor.numel() else 0
        dtype = _NAMES.get(tensor.dtype, str(tensor.dtype))
        located[name] = FileTensor(name, dtype, tuple(tensor.shape), offset, tensor.nbytes)
    return located


def _opened(path: Path) -> tuple[dict[str, Tensor], list[tuple[int, int]]]:
    """The tensors, and the offset and size of each record of the archive."""
    records = _storage_records(path)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # hostile bytes can raise nearly anything
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{path}: cannot be read as plain weights ({reason:.500})") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path}: has {kind_of(state)}, expected a dict of tensors")
    for name, tensor in state.items():
        _require_plain(path, name, tensor)
    _require_own_records(path, list(state.values()), records)
    return {name: tensor.detach() for name, tensor in state.items()}, records


def _storage_records(path: Path) -> list[tuple[int, int]]:
    """The offset and size of each record of tensor data, checked to be inside the file."""
    with open_file(path) as file:
        magic, size = file.read(4), os.fstat(file.fileno()).st_size
    if not _is_zip(path):
        if magic == b"PK\x03\x04":
            raise CheckpointError(
                f"{path}: truncated or damaged: has {size} bytes and no zip directory at its end; "
                "fetch it again"
            )
        raise CheckpointError(
            f"{path}: not a zip archive; a file from before torch 1.6 can only be read by running "
            "its code: if you trust it, load it and save it again with torch.save, or use "
            "safetensors"
        )
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, ValueError, OSError, NotImplementedError) as error:
        raise CheckpointError(f"{path}: damaged zip archive ({error})") from error
    if len(members) > MAX_RECORDS:
        raise CheckpointError(f"{path}: has {len(members)} records; at most {MAX_RECORDS} are read")
    if len({member.filename for member in members}) != len(members):
        raise CheckpointError(f"{path}: two records have the same name; forged or damaged")
    with open_file(path) as file:
        located = [(member, _data_offset(path, file, member)) for member in members]
        position = 0
        for member, offset in sorted(located, key=itemgetter(1)):
            end = offset + member.file_size
            if member.header_offset < position or end > size:
                raise CheckpointError(
                    f"{path}: record {member.filename!r:.200} claims bytes {offset} to {end}, and "
                    f"{position} to {size} are left; truncated or forged"
                )
            position = end
        for offset in (at for member, at in located if _in_archive(member) == "byteorder"):
            file.seek(offset)
            if file.read(len(b"little")) != b"little":
                raise CheckpointError(
                    f"{path}: its byte order differs from this machine's; load it where it was "
                    "written, and save it as safetensors"
                )
    return [
        (offset, member.file_size)
        for member, offset in located
        if _in_archive(member).startswith("data/") and member.file_size
    ]


def _in_archive(member: zipfile.ZipInfo) -> str:
    """The name of a record without the prefix of the archive name."""
    return member.filename.partition("/")[2]


def _is_zip(path: Path) -> bool:
    try:
        return zipfile.is_zipfile(path)
    except zipfile.BadZipFile:  # a contradictory directory; opening the archive reports the error
        return True


def _data_offset(path: Path, file: BufferedReader, member: zipfile.ZipInfo) -> int:
    def refuse(why: str) -> CheckpointError:
        return CheckpointError(f"{path}: record {member.filename!r:.200} {why}; forged or damaged")

    if member.compress_type != zipfile.ZIP_STORED or member.compress_size != member.file_size:
        raise refuse("is compressed, which torch.save never does")
    if member.filename.endswith("data.pkl") and member.file_size > MAX_PICKLE_BYTES:
        raise refuse(f"has {member.file_size} bytes; at most {MAX_PICKLE_BYTES} are read")
    file.seek(member.header_offset)
    header = file.read(_LOCAL_HEADER.size)
    if len(header) < _LOCAL_HEADER.size:
        raise refuse("begins after the end of the file")
    magic, name_length, extra_length = _LOCAL_HEADER.unpack(header)
    if magic != b"PK\x03\x04":
        raise refuse("does not begin where the archive says")
    return member.header_offset + _LOCAL_HEADER.size + int(name_length) + int(extra_length)


def _require_plain(path: Path, name: object, tensor: object) -> None:
    if not isinstance(name, str) or not isinstance(tensor, Tensor):
        raise CheckpointError(
            f"{path}: entry {name!r:.200} is {kind_of(tensor)}, expected a tensor; only "
            "flat dictionaries of weights are read"
        )
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
        raise CheckpointError(f"{path}: tensor {name!r:.200} is not a plain dense tensor")


def _require_own_records(path: Path, tensors: list[Tensor], records: list[tuple[int, int]]) -> None:
    """Check that the storages of the tensors are exactly the records of the archive.

    The address of the mapping is unknown, so offsets are compared relative to the first one.
    """
    storages = {
        (storage.data_ptr(), storage.nbytes())
        for storage in (tensor.untyped_storage() for tensor in tensors)
        if storage.nbytes()
    }
    if _relative(list(storages)) != _relative(records):
        raise CheckpointError(
            f"{path}: its tensors are not the records of the archive; forged or damaged"
        )


def _relative(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    ordered = sorted(spans)
    return [(offset - ordered[0][0], size) for offset, size in ordered]
