"""Memory that a process has freed and that its C library keeps."""

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
    """Bytes that are free inside the C library, given back to the system or not; 0 if unknown."""
    read = getattr(ctypes.CDLL(None), "mallinfo2", None)  # glibc's from 2.33 on
    if read is None:
        return 0
    read.restype = _Mallinfo2
    return int(read().fordblks)


def give_back_memory() -> None:
    """Return to the system what is free inside the process, where its C library keeps that."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc's
        trim(0)
