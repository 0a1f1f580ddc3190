"""The writers of quantised HF folders, by the name of the format."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import bitsandbytes_folders
import packed_folders
import scaled_folders


def quantised_writers(source: Path) -> dict[str, Callable[[Path], Path]]:
    """Functions that write the model of an HF folder, as `write_quantised` does, to another folder.

    The numbers of inputs of its matrices must be multiples of 64.
    """
    return {
        **{
            kind: partial(packed_folders.write_packed, source, kind=kind, size=64)
            for kind in packed_folders.KINDS
        },
        **{
            kind: partial(scaled_folders.write_scaled, source, kind=kind)
            for kind in scaled_folders.KINDS
        },
        **{
            f"bitsandbytes, {kind}": partial(
                bitsandbytes_folders.write_bitsandbytes, source, kind=kind
            )
            for kind in bitsandbytes_folders.KINDS
        },
    }
