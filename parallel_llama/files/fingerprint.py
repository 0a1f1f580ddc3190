"""What tells one model's files from another's, without reading all of them. Imports no torch."""

import hashlib
from pathlib import Path

from parallel_llama.files.bounded_files import is_file, is_folder, names_in, open_file, reading
from parallel_llama.files.model_files import TOKENIZER_FILES, ModelFiles

# Beside the weights, files of a folder that decide what goes in and what comes out.
_TEXT_SUFFIXES = (".json", ".jinja")

_HEAD_BYTES = 256 << 10  # the header of most files
_TAIL_BYTES = 64 << 10  # the directory of torch's
_SAMPLE_BYTES = 64
_MAX_SAMPLES = 1024  # of all weights together
_STRIDE_BYTES = 1 << 20
_WHOLE_BYTES = 64 << 20  # a tokenizer or a manifest is read as a whole


def fingerprint(files: ModelFiles) -> dict[str, str]:
    """A digest of each file by its name: of all it holds, or for weights of samples and the size.

    Two sets of weights of one shape differ in their samples; a flipped bit need not, and is what
    the manifest's hashes are for.

    Raises: CheckpointError if a file cannot be read.
    """
    n_samples = max(1, _MAX_SAMPLES // max(1, len(files.weights)))
    weights = {path: _sampled(path, n_samples) for path in files.weights}
    others = [files.config]
    if is_folder(files.path):
        others = [files.path / name for name in names_in(files.path)]
    texts = {
        path: _sampled(path, 0)
        for path in others
        if (path.suffix in _TEXT_SUFFIXES or path.name in TOKENIZER_FILES)
        and path not in weights
        and is_file(path)
    }
    return {path.name: digest for path, digest in (texts | weights).items()}


def _sampled(path: Path, n_samples: int) -> str:
    """A digest of a file's size, beginning, end and samples between; of all, without samples."""
    digest = hashlib.blake2b(digest_size=32)
    with open_file(path) as file, reading(path):
        size = file.seek(0, 2)
        digest.update(size.to_bytes(8, "little"))
        places = [(0, _HEAD_BYTES if n_samples else _WHOLE_BYTES)]
        if n_samples:
            stride = max(_STRIDE_BYTES, size // n_samples)
            places += [(at, _SAMPLE_BYTES) for at in range(stride // 2, size, stride)]
            places.append((max(0, size - _TAIL_BYTES), _TAIL_BYTES))
        for at, n_bytes in places:
            file.seek(at)
            digest.update(file.read(n_bytes))
    return digest.hexdigest()
