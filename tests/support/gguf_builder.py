"""GGUF files, valid or broken, written from the specification alone."""

import random
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

F32, F16, Q8_0, BF16 = 0, 1, 8, 30
UINT8, UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64 = 0, 4, 5, 6, 7, 8, 9, 10
_FORMS = {UINT8: "B", UINT32: "I", INT32: "i", FLOAT32: "f", BOOL: "?", UINT64: "Q"}

TINY_FIELDS: dict[str, Any] = {
    "general.architecture": "llama",
    "llama.context_length": 64,
    "llama.embedding_length": 8,
    "llama.block_count": 1,
    "llama.feed_forward_length": 12,
    "llama.attention.head_count": 2,
    "llama.attention.head_count_kv": 1,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.dimension_count": 4,
    "tokenizer.ggml.tokens": ["<s>", "</s>", "a", "b", "c"],
    "tokenizer.ggml.scores": [0.0, 0.0, -1.0, -2.0, -3.0],
    "tokenizer.ggml.add_bos_token": True,
    "tokenizer.ggml.bos_token_id": 0,
    "tokenizer.ggml.eos_token_id": 1,
}


@dataclass
class Tensor:
    """`shape` in torch's order; `offset` counts from the start of the data."""

    name: str
    shape: Sequence[int]
    kind: int = F32
    offset: int | None = None
    data: bytes | None = None


@dataclass
class GGUF:
    """The parts of a file; every count can be set to a wrong value."""

    fields: Mapping[str, Any] = field(default_factory=lambda: dict(TINY_FIELDS))
    tensors: Sequence[Tensor] = field(
        default_factory=lambda: [
            Tensor("token_embd.weight", (5, 8)),
            Tensor("blk.0.attn_norm.weight", (8,)),
            Tensor("blk.0.attn_q.weight", (8, 8)),
        ]
    )
    magic: bytes = b"GGUF"
    version: int = 3
    n_tensors: int | None = None
    n_fields: int | None = None
    alignment: int = 32
    raw_fields: bytes = b""  # after the fields, and counted only by n_fields

    def to_bytes(self) -> bytes:
        n_tensors = len(self.tensors) if self.n_tensors is None else self.n_tensors
        n_fields = len(self.fields) if self.n_fields is None else self.n_fields
        head = self.magic + struct.pack("<IQQ", self.version, n_tensors, n_fields)
        head += b"".join(string(key) + value(item) for key, item in self.fields.items())
        head += self.raw_fields
        data = b""
        for tensor in self.tensors:
            values = 1
            for size in tensor.shape:
                values *= size
            n_bytes = {F32: 4 * values, Q8_0: values // 32 * 34}.get(tensor.kind, 2 * values)
            offset = len(data) if tensor.offset is None else tensor.offset
            head += string(tensor.name) + struct.pack("<I", len(tensor.shape))
            head += b"".join(struct.pack("<Q", size) for size in reversed(tensor.shape))
            head += struct.pack("<IQ", tensor.kind, offset)
            if tensor.offset is None:
                data += tensor.data or bytes(n_bytes)
                data += bytes(-len(data) % self.alignment)
        return head + bytes(-len(head) % self.alignment) + data


def string(text: str | bytes) -> bytes:
    data = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(data)) + data


def value(item: Any) -> bytes:
    """A field's type number and value: bool, int (uint32), float, str, or a list of one type."""
    if isinstance(item, list):
        items = [value(one) for one in item]
        kind = items[0][:4] if items else struct.pack("<I", STRING)
        return (
            struct.pack("<I", ARRAY)
            + kind
            + struct.pack("<Q", len(items))
            + b"".join(one[4:] for one in items)
        )
    if isinstance(item, str):
        return struct.pack("<I", STRING) + string(item)
    kind_number = BOOL if isinstance(item, bool) else UINT32 if isinstance(item, int) else FLOAT32
    return struct.pack("<I" + _FORMS[kind_number], kind_number, item)


def mutations(whole: bytes, rounds: int) -> Iterator[bytes]:
    """Flipped bits, bytes set to extremes, replaced 8-byte numbers, and moved pieces."""
    rng = random.Random(20240)
    sizes = (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**63 - 1, 2**63, 2**64 - 1)
    header = len(whole) - 600
    for _ in range(rounds):
        data = bytearray(whole)
        for _ in range(rng.choice((1, 1, 1, 2, 5))):
            at = rng.randrange(header)
            kind = rng.randrange(5)
            if kind == 0:
                data[at] ^= 1 << rng.randrange(8)
            elif kind == 1:
                data[at] = rng.choice((0, 1, 0x7F, 0x80, 0xFF))
            elif kind == 2:
                data[at : at + 8] = struct.pack("<Q", rng.choice(sizes))
            elif kind == 3:
                del data[at : at + rng.randrange(1, 16)]
            else:
                data[at:at] = data[at : at + rng.randrange(1, 16)]
        yield bytes(data)
