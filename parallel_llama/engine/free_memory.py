"""Controls the memory that this process has freed and that glibc keeps for reuse."""

import ctypes

# Parameters of glibc's mallopt; see mallopt(3).
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3

# The largest M_MMAP_THRESHOLD that glibc accepts.
_MAX_KEPT_TENSOR = 32 << 20
_MAX_KEPT_TOTAL = 256 << 20

# With less, loading takes longer, because the system clears more pages.
_MAX_KEPT_WHILE_LOADING = 4 << 20


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
    """The free bytes in the C library's arenas; 0 if unknown."""
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)  # glibc's from 2.33 on
    if mallinfo2 is None:
        return 0
    mallinfo2.restype = _Mallinfo2
    return int(mallinfo2().fordblks)


def give_back_memory() -> None:
    """Return the free memory of the C library's arenas to the system, if the library can."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc's
        trim(0)


def return_freed_memory() -> None:
    """Return the memory of freed tensors to the system at once, in all threads.

    Each thread that reads weights has an arena, and malloc_trim does not return the free end of
    such an arena: up to 64 MiB for each thread would stay unused.
    """
    _set_kept_bytes(_MAX_KEPT_WHILE_LOADING, _MAX_KEPT_WHILE_LOADING)


def keep_freed_memory() -> None:
    """Keep the memory of freed tensors in the C library, for the tensors of the next layer.

    By default glibc returns the memory of activations to the system after each layer, and the
    system must clear the pages before the next layer uses them. This took a tenth of the prefill
    time.
    """
    _set_kept_bytes(_MAX_KEPT_TENSOR, _MAX_KEPT_TOTAL)


def _set_kept_bytes(max_tensor: int, max_total: int) -> None:
    if set_option := getattr(ctypes.CDLL(None), "mallopt", None):  # glibc's
        set_option(_M_MMAP_THRESHOLD, max_tensor)
        set_option(_M_TRIM_THRESHOLD, max_total)
