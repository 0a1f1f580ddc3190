"""Finds models in the download cache of the Hugging Face hub.

The folder layout and the environment variables are the hub's. Nothing is downloaded, and
huggingface_hub is not imported.

Source: huggingface_hub 2.4, constants.py and its guide to the cache.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path

from parallel_llama.errors import UsageError
from parallel_llama.files.bounded_files import expanded, is_folder, is_there, names_in, read_bytes
from parallel_llama.files.gguf_header import PART

MAIN = "main"
MAX_REVISION_BYTES = 256

_PART = r"\w(?:(?!--|\.\.)[\w.-]){0,95}(?<=\w)"
_FILE = r"(?:\w[\w.+-]{0,200}/){0,9}\w[\w.+-]{0,200}\.gguf"
_BRANCH = r"\w(?:(?!\.\.|//)[\w./+-]){0,199}(?<=\w)"
_NAME = re.compile(rf"({_PART}/{_PART})(?:/({_FILE}))?(?:@({_BRANCH}))?", re.ASCII)
_REVISION = re.compile(r"\w[\w.-]*", re.ASCII)


@dataclass(frozen=True)
class HubName:
    """A model on the hub.

    Args:
        repo: the repository, `org/name`.
        file: the path of a .gguf file in the repository; empty for a model in a folder.
        revision: a branch, a tag, or a commit.
    """

    repo: str
    file: str = ""
    revision: str = MAIN

    def __str__(self) -> str:
        name = f"{self.repo}/{self.file}" if self.file else self.repo
        return name if self.revision == MAIN else f"{name}@{self.revision}"

    @property
    def command(self) -> str:
        """The `hf` command that downloads the model."""
        revision = "" if self.revision == MAIN else f" --revision {self.revision}"
        parts = PART.sub(r"-*-of-\2.gguf", self.file)
        file = self.file if parts == self.file else f"--include '{parts}'"
        return " ".join(filter(None, ("hf download", self.repo, file))) + revision


def parse_hub_name(name: str) -> HubName | None:
    """Splits `org/name`, `org/name/file.gguf` and `org/name@revision`; None for other names.

    >>> parse_hub_name("HuggingFaceTB/SmolLM2-135M-Instruct@v1")
    HubName(repo='HuggingFaceTB/SmolLM2-135M-Instruct', file='', revision='v1')
    >>> parse_hub_name("./model") is None
    True
    """
    match = _NAME.fullmatch(name)
    return None if match is None else HubName(match[1], match[2] or "", match[3] or MAIN)


def hub_folder(repo: str) -> Path:
    """The cache folder of a repository, which need not exist."""
    caches = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    home = _expand(os.environ.get("HF_HOME", f"{caches}/huggingface"))
    cache = os.environ.get("HUGGINGFACE_HUB_CACHE", f"{home}/hub")  # the older name
    return _expand(os.environ.get("HF_HUB_CACHE", cache)) / f"models--{repo.replace('/', '--')}"


def find_snapshot(name: HubName) -> Path | None:
    """The folder of the snapshot of a model's revision, or None if it was not downloaded.

    A snapshot is named after its commit; for a branch or a tag, the file refs/REVISION contains the
    commit. Without that file the branch counts as not downloaded, as in huggingface_hub: a snapshot
    in the cache may be an old commit that was requested by its hash.

    Raises: UsageError if the file in refs names no snapshot.
    """
    folder = hub_folder(name.repo)
    snapshots, ref = folder / "snapshots", folder / "refs" / name.revision
    if not is_folder(snapshots):
        return None
    revisions = [revision for revision in names_in(snapshots) if is_folder(snapshots / revision)]
    if name.revision in revisions:
        return snapshots / name.revision
    if not is_there(ref):
        return None
    commit = _commit_in(ref)
    if commit not in revisions:
        raise UsageError(
            f"{folder}: refs/{name.revision} names {commit[:80]!r}, a snapshot that is not "
            f"downloaded; add --download, or run: {name.command}"
        )
    return snapshots / commit


def _commit_in(ref: Path) -> str:
    text = read_bytes(ref, MAX_REVISION_BYTES).decode(errors="replace").strip()
    if not _REVISION.fullmatch(text):
        raise UsageError(
            f"{ref}: {text[:80]!r} is not a revision; remove the file, or download the model again"
        )
    return text


def _expand(path: str) -> Path:
    return Path(os.path.expandvars(expanded(path)))
