"""Broken GGUF files, each with one fault, and the words that its error must contain."""

import struct

from gguf_builder import (
    ARRAY,
    BOOL,
    FLOAT32,
    GGUF,
    Q8_0,
    STRING,
    TINY_FIELDS,
    UINT32,
    Tensor,
    string,
)

HUGE = 2**64 - 1
SHORT = GGUF(tensors=[]).to_bytes()


def extra(raw: bytes) -> GGUF:
    """A file with one additional field, given as raw bytes."""
    return GGUF(raw_fields=raw, n_fields=len(TINY_FIELDS) + 1)


def one(tensor: Tensor) -> GGUF:
    return GGUF(tensors=[tensor])


def array(kind: int, count: int, data: bytes = b"") -> bytes:
    return string("x.array") + struct.pack("<IIQ", ARRAY, kind, count) + data


BROKEN: dict[str, tuple[GGUF | bytes, str]] = {
    "no bytes": (b"", "magic"),
    "less than a magic number": (b"GG", "magic"),
    "another format": (GGUF(magic=b"GGML"), "not a GGUF"),
    "a zip file": (b"PK\x03\x04" + bytes(100), "not a GGUF"),
    "ends after the magic number": (b"GGUF", "version"),
    "ends after the version": (b"GGUF" + struct.pack("<I", 3), "tensor count"),
    "ends after the tensor count": (b"GGUF" + struct.pack("<IQ", 3, 1), "field count"),
    "version 1": (GGUF(version=1), "version 1"),
    "version 4": (GGUF(version=4), "version 4"),
    "big-endian": (GGUF(version=3 << 24), "version 50331648"),
    "too many tensors": (GGUF(n_tensors=HUGE), "tensors"),
    "too many fields": (GGUF(n_fields=HUGE), "fields"),
    "more fields than there are": (GGUF(n_fields=60_000, tensors=[]), "truncated or damaged"),
    "more tensors than there are": (GGUF(n_tensors=4), ""),
    "a name longer than the file": (extra(struct.pack("<Q", 4000)), "truncated or damaged"),
    "a name of 16 exbibytes": (extra(struct.pack("<Q", HUGE)), "at most 4096"),
    "a name that is not text": (extra(string(b"\xff\xfe") + struct.pack("<IB", 0, 1)), "UTF-8"),
    "a field twice": (extra(string("llama.block_count") + struct.pack("<II", UINT32, 1)), "twice"),
    "an unknown value type": (extra(string("x") + struct.pack("<I", 13)), "type 13"),
    "a string longer than the file": (
        extra(string("x") + struct.pack("<IQ", STRING, 1 << 40)),
        "at most",
    ),
    "a string of 16 exbibytes": (extra(string("x") + struct.pack("<IQ", STRING, HUGE)), "x"),
    "a string of 65 mebibytes": (
        extra(string("x") + struct.pack("<IQ", STRING, 65 << 20)),
        "at most",
    ),
    "the end after a name of two lines": (
        GGUF(fields={}, raw_fields=string("a\nb"), n_fields=1, tensors=[], alignment=1),
        "field 'a\\nb' claims 4 bytes and 0 are left",
    ),
    "a string that is not text": (
        extra(string("x") + struct.pack("<I", STRING) + string(b"\xc3\x28")),
        "UTF-8",
    ),
    "a scalar cut off": (SHORT[:-40], ""),
    "an array longer than the file": (extra(array(FLOAT32, 1 << 20)), "truncated or damaged"),
    "an array of 2**64 - 1 numbers": (extra(array(FLOAT32, HUGE)), "at most"),
    "an array of 2**64 - 1 bools": (extra(array(BOOL, HUGE)), "at most"),
    "an array of 2**64 - 1 strings": (extra(array(STRING, HUGE)), "at most"),
    "an array of strings longer than the file": (extra(array(STRING, 1 << 20)), "truncated"),
    "an array of arrays": (extra(array(ARRAY, 1, bytes(64))), "unsupported type 9"),
    "an array of an unknown type": (extra(array(99, 1, bytes(64))), "unsupported type 99"),
    "a tensor without dimensions": (one(Tensor("t", ())), "0 dimensions"),
    "a tensor of 5 dimensions": (one(Tensor("t", (1, 1, 1, 1, 1))), "5 dimensions"),
    "an empty tensor": (one(Tensor("t", (0, 4))), "empty shape"),
    "a tensor type that cannot be read": (one(Tensor("t", (256,), kind=41)), "type Q1_0 (41), "),
    "a removed tensor type": (one(Tensor("t", (32,), kind=31)), "use a file of another type, such"),
    "an unknown tensor type": (one(Tensor("t", (256,), kind=137)), "the ggml type 137, "),
    "a row that is not a multiple of the block": (one(Tensor("t", (4, 33), Q8_0)), "blocks of 32"),
    "a tensor twice": (GGUF(tensors=[Tensor("t", (4,)), Tensor("t", (4,))]), "twice"),
    "overlapping tensors": (
        GGUF(tensors=[Tensor("long", (64,)), Tensor("inside", (4,), offset=32)]),
        "overlap",
    ),
    "a tensor beyond the end": (one(Tensor("t", (4,), offset=1 << 20)), "truncated or damaged"),
    "an offset of 2**64 - 1": (one(Tensor("t", (4,), offset=HUGE)), "truncated or damaged"),
    "sizes whose product overflows 64 bits": (
        one(Tensor("t", (1 << 40, 1 << 40), offset=0)),
        "truncated or damaged",
    ),
    "an alignment of 0": (GGUF(fields={"general.alignment": 0}), "alignment"),
    "an alignment of 3": (GGUF(fields={"general.alignment": 3}), "alignment"),
    "an alignment that is text": (GGUF(fields={"general.alignment": "32"}), "alignment"),
    "an alignment that is a list": (GGUF(fields={"general.alignment": [1] * 999}), "alignment"),
}
