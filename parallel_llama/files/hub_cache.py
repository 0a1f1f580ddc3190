"""Finds models in the download cache of the Hugging Face hub.

The folder layout and the environment variables are the hub's. Nothing is downloaded, and
huggingface_hub is not imported.

Source: huggingface_hub 2.4, constants.py and its guide to the cache.
"""

import os
import re
from pathlib import Path

from parallel_llama.errors import UsageError
from parallel_llama.files.bounded_files import expanded, is_folder, is_there, names_in, read_bytes

MAX_REVISION_BYTES = 256

_PART = r"\w(?:[\w.-]{0,94}\w)?"
_NAME = re.compile(rf"(?!.*(?:--|\.\.)){_PART}/{_PART}", re.ASCII)
_REVISION = re.compile(r"\w[\w.-]*", re.ASCII)


def is_hub_name(name: str) -> bool:
    """Whether a name is valid for a model on the hub.

    >>> is_hub_name("HuggingFaceTB/SmolLM2-135M-Instruct"), is_hub_name("./model")
    (True, False)
    """
    return _NAME.fullmatch(name) is not None


def hub_folder(name: str) -> Path:
    """The cache folder of a model, which need not exist."""
    caches = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    home = _followed(os.environ.get("HF_HOME", f"{caches}/huggingface"))
    cache = os.environ.get("HUGGINGFACE_HUB_CACHE", f"{home}/hub")  # the older name
    return _followed(os.environ.get("HF_HUB_CACHE", cache)) / f"models--{name.replace('/', '--')}"


def find_snapshot(name: str) -> Path | None:
    """The folder of the snapshot of a model's main branch, or None if nothing was downloaded.

    The file refs/main names the snapshot; without that file there must be exactly one snapshot.

    Raises: UsageError if refs/main names no snapshot, or is missing and the number of
    snapshots is not one.
    """
    folder = hub_folder(name)
    snapshots, main = folder / "snapshots", folder / "refs" / "main"
    if not is_folder(snapshots):
        return None
    held = [revision for revision in names_in(snapshots) if is_folder(snapshots / revision)]
    wanted = [_noted(main)] if is_there(main) else held
    if len(wanted) != 1 or wanted[0] not in held:
        meant = f"names {wanted[0][:80]!r}" if is_there(main) else "is missing"
        raise UsageError(
            f"{folder}: has {len(held)} snapshots, and refs/main, which selects one, "
            f"{meant}; run: hf download {name}"
        )
    return snapshots / wanted[0]


def _noted(main: Path) -> str:
    text = read_bytes(main, MAX_REVISION_BYTES).decode(errors="replace").strip()
    if not _REVISION.fullmatch(text):
        raise UsageError(
            f"{main}: {text[:80]!r} is not a revision; remove the file, or download the model again"
        )
    return text


def _followed(path: str) -> Path:
    return Path(os.path.expandvars(expanded(path)))
