"""GPT-2's way of writing bytes as printable characters, used by all byte-level BPE files."""


def _characters() -> dict[str, int]:
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in printable)
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return table


_BYTES = _characters()


def spelled_bytes(token: str) -> bytes:
    """The bytes that a byte-level token stands for.

    A token with a character that stands for no byte is taken as ordinary text, as `tokenizers`
    does.

    >>> spelled_bytes("\\u0120hi"), spelled_bytes("a b")
    (b' hi', b'a b')
    """
    try:
        return bytes([_BYTES[character] for character in token])
    except KeyError:
        return token.encode()
