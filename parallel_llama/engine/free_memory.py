"""Memory that this process has freed and its C library still holds."""

import ctypes


class _Mallinfo2(ctypes.Structure):
    """glibc's struct mallinfo2; `fordblks` are the free bytes in all arenas."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
            "fordblks", "keepcost",
        )
    )  # fmt: skip


def n_kept_bytes() -> int:
    """Bytes that are free in the C library's arenas; 0 if unknown."""
    read = getattr(ctypes.CDLL(None), "mallinfo2", None)  # glibc's from 2.33 on
    if read is None:
        return 0
    read.restype = _Mallinfo2
    return int(read().fordblks)


def give_back_memory() -> None:
    """Return the free memory of the C library's arenas to the system, where it can."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc's
        trim(0)
