"""Downloads models from the Hugging Face hub into its cache, through huggingface_hub.

Only files that parallel_llama reads are downloaded, and no code. A revision is resolved to a commit
once. All files are downloaded from that commit, and the weights last. When the snapshot is
complete, the file in the cache's `refs` that selects it is written.

Importing this module is slow, so it is imported only for a download.

Source: huggingface_hub 2.4, file_download.py and its guide to the cache.
"""

import errno
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, constants, hf_hub_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from parallel_llama.errors import UsageError, counted, listed, printable
from parallel_llama.files.bounded_files import is_file, is_there
from parallel_llama.files.gguf_header import gguf_parts
from parallel_llama.files.hub_cache import HubName, hub_folder, parse_hub_name
from parallel_llama.files.model_files import (
    CONFIG,
    HF_WEIGHTS,
    MISTRAL_WEIGHTS,
    PARAMS,
    TOKENIZER_FILES,
    names_in_index,
)
from parallel_llama.files.partial_output import replace_file

# Small files that are downloaded if a repository has them, in addition to one of TOKENIZER_FILES.
METADATA_FILES = (
    CONFIG, PARAMS, "generation_config.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "chat_template.jinja", "additional_chat_templates/tool_use.jinja",
)  # fmt: skip

_COMMIT = re.compile(r"[0-9a-f]{40}")
_BLOB = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_LOGIN = "log in with `hf auth login`, or set HF_TOKEN"


def endpoint() -> str:
    """The address of the hub, or of the mirror that HF_ENDPOINT names."""
    address: str = constants.ENDPOINT
    return address


def is_offline() -> bool:
    """Whether HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE forbids downloads."""
    return bool(constants.HF_HUB_OFFLINE)


@dataclass(frozen=True)
class _Commit:
    """A commit of a model's repository.

    Args:
        id: the hash of the commit.
        sizes: the bytes of each file.
        blobs: the name that each file's content has in the folder `blobs` of the cache, if the hub
            states it.
    """

    name: HubName
    id: str
    sizes: Mapping[str, int]
    blobs: Mapping[str, str]

    @property
    def snapshot(self) -> Path:
        return hub_folder(self.name.repo) / "snapshots" / self.id

    def missing(self, files: Sequence[str]) -> list[str]:
        """The given files that the snapshot lacks.

        Raises: UsageError if the repository lacks a file, or the disk has too little space.
        """
        if absent := [file for file in files if file not in self.sizes]:
            raise UsageError(
                f"{self.name}: the repository does not have {listed(absent, 5)}; "
                f"{endpoint()}/{self.name.repo} lists its files"
            )
        missing_files = [file for file in files if not is_file(self.snapshot / file)]
        _require_space(self.name, self.n_bytes(self.without_blob(missing_files)))
        return missing_files

    def without_blob(self, files: Sequence[str]) -> list[str]:
        """The given files that have no complete blob in the cache.

        huggingface_hub downloads the whole file again if its blob is incomplete.
        """
        folder = hub_folder(self.name.repo) / "blobs"
        blobs = {file: self.blobs.get(file) for file in files}
        return [file for file, blob in blobs.items() if blob is None or not is_file(folder / blob)]

    def n_bytes(self, files: Sequence[str]) -> int:
        return sum(self.sizes[file] for file in files)

    def fetch(self, files: Sequence[str]) -> None:
        cache = hub_folder(self.name.repo).parent
        for file in files:
            with _explaining(self.name):
                hf_hub_download(
                    self.name.repo, file, revision=self.id, cache_dir=cache, endpoint=endpoint()
                )


def download_model(name: HubName, announce: Callable[[str], None]) -> None:
    """Downloads the files of a model that the cache lacks.

    If a connection ends early, huggingface_hub connects again and downloads the rest of the file.
    If that fails too, a later call keeps the complete files. On a terminal, huggingface_hub draws a
    progress bar for each file.

    Args:
        announce: called with a line about the weights, before they are downloaded.

    Raises: UsageError if the hub cannot be reached or refuses, if the hub does not have the model,
    or if the disk has too little space; CheckpointError if the index of the weights is damaged.
    """
    commit = _resolve(name)
    if name.file:
        weights = gguf_parts(name.file)
    else:
        small, first = select_files(name, commit.sizes)
        is_index = first.endswith(".json")
        commit.fetch(commit.missing([*small, first] if is_index else small))
        weights = names_in_index(commit.snapshot / first) if is_index else [first]
    missing = commit.missing(weights)
    if absent := commit.without_blob(missing):
        count, megabytes = len(absent), commit.n_bytes(absent) / 1e6
        files = f"{counted(count, 'file')}, {megabytes:,.1f} MB"
        announce(f"downloading the weights of {name}: {files}, commit {commit.id}")
    commit.fetch(missing)
    with _explaining(name):
        _write_ref(name, commit.id)


def _resolve(name: HubName) -> _Commit:
    """The commit of a model's revision."""
    api = HfApi(endpoint=endpoint())
    with _explaining(name):
        info = api.model_info(
            name.repo,
            revision=name.revision,
            timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,  # else no limit
            files_metadata=True,
        )
    commit = str(info.sha)
    if not _COMMIT.fullmatch(commit):
        raise UsageError(
            f"{endpoint()} says that {name} is commit {commit[:60]!r}, which is not 40 hexadecimal "
            "digits; try later"
        )
    files = info.siblings or ()
    sizes = {file.rfilename: file.size or 0 for file in files}
    # The cache names a blob after the hash that the hub sends as ETag: that of Git LFS, or of git.
    hashes = {f.rfilename: f.lfs.sha256 if f.lfs else f.blob_id for f in files}
    blobs = {file: blob for file, blob in hashes.items() if blob and _BLOB.fullmatch(blob)}
    return _Commit(name, commit, sizes, blobs)


def select_files(name: HubName, files_in_repo: Collection[str]) -> tuple[list[str], str]:
    """The small files to download, and the file or the index of the weights.

    If a repository has several layouts, the files are those of the layout that `find_model` reads.

    Raises: UsageError if the repository holds no model that can be run.
    """
    candidates = HF_WEIGHTS if CONFIG in files_in_repo else ()
    if PARAMS in files_in_repo:
        candidates = (*candidates, *MISTRAL_WEIGHTS)
    first = next((file for file in candidates if file in files_in_repo), None)
    if first is None:
        # Only GGUF files can be named as org/name/file.
        ggufs = sorted(
            hub_name for file in files_in_repo if parse_hub_name(hub_name := f"{name.repo}/{file}")
        )
        hint = f"; for one of its GGUF files, use --model {ggufs[0]}" if ggufs else ""
        raise UsageError(
            f"{name}: the repository has no {CONFIG} with weights ({', '.join(HF_WEIGHTS)}), and "
            f"no {PARAMS} with {MISTRAL_WEIGHTS[0]}{hint}"
        )
    tokenizers = [file for file in TOKENIZER_FILES if file in files_in_repo]
    read = tokenizers[:1]
    if read == ["tokenizer.json"]:
        # tekken.json corrects the split of a wrong conversion; the header of a GGUF file is written
        # from SentencePiece's own file.
        read += [file for file in ("tekken.json", "tokenizer.model") if file in tokenizers]
    return [*(file for file in METADATA_FILES if file in files_in_repo), *read], first


def _require_space(name: HubName, n_bytes: int) -> None:
    """Raises: UsageError if the disk of the cache has fewer than `n_bytes` free bytes."""
    cache = hub_folder(name.repo).parent
    existing = next(path for path in (cache, *cache.absolute().parents) if is_there(path))
    free = shutil.disk_usage(existing).free
    if n_bytes > free:
        raise UsageError(
            f"{name}: needs {n_bytes / 1e9:.2f} GB more in {cache}, where {free / 1e9:.2f} GB are "
            "free; free some space, or set HF_HOME to a folder on another disk"
        )


def _write_ref(name: HubName, commit: str) -> None:
    """Points the branch or tag to a complete snapshot."""
    if name.revision != commit:
        ref = hub_folder(name.repo) / "refs" / name.revision
        ref.parent.mkdir(parents=True, exist_ok=True)
        replace_file(ref, ref.with_name(f"{ref.name}.{os.getpid()}.tmp"), commit.encode())


@contextmanager
def _explaining(name: HubName) -> Iterator[None]:
    """Turns an error of a download into a UsageError of one line.

    The errors of huggingface_hub, its HTTP library and its Xet library have no common base.
    """
    try:
        yield
    except Exception as error:
        raise _explained(error, name) from error


def _explained(error: Exception, name: HubName) -> UsageError:
    """The error with the address, the cause and the remedy."""
    repo, hub = name.repo, endpoint()
    if isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    if isinstance(error, GatedRepoError):
        return UsageError(f"{repo} is gated: accept its licence at {hub}/{repo}, then {_LOGIN}")
    if isinstance(error, RepositoryNotFoundError):
        return UsageError(
            f"{repo} is not a model at {hub}: check the name; for a private model, {_LOGIN}"
        )
    if isinstance(error, RevisionNotFoundError):
        return UsageError(
            f"{repo} has no revision {name.revision!r}; {hub}/{repo}/tree/main lists its branches "
            "and tags"
        )
    if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
        return UsageError(f"{name}: a file of the repository is missing at {hub}; try later")
    if isinstance(error, HfHubHTTPError):
        return _refused(error.response.status_code, repo, hub)
    if isinstance(error, OfflineModeIsEnabled):
        return UsageError(
            f"{name} is not downloaded: HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set; unset it"
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return UsageError(
            f"{name}: the disk of {hub_folder(repo)} is full; free some space, or set HF_HOME"
        )
    if isinstance(error, OSError) and error.errno is not None and error.filename is not None:
        return UsageError(f"{error.filename}: {error.strerror}; make it writable, or set HF_HOME")
    reason = printable((str(error).strip().splitlines() or [type(error).__name__])[0], 300)
    return UsageError(
        f"{name} was not downloaded from {hub}: {reason}; check the network and HF_ENDPOINT, and "
        "run the command again: complete files are kept"
    )


def _refused(status: int, repo: str, hub: str) -> UsageError:
    if status == 401:
        return UsageError(f"{hub} does not accept the token: {_LOGIN} to a valid token")
    if status == 403:
        return UsageError(
            f"{hub} refuses access to {repo}: use a token that may read it ({_LOGIN})"
        )
    return UsageError(f"{hub} answered with status {status} for {repo}; try later")
