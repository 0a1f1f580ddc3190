"""Runs the `tokenizers` library: as a job of `sandbox_main` for files, else in this process.

Tokenizers that we build ourselves need no sandbox. This module imports nothing of the package, so
that the sandbox can load it.
"""

import json
import os
from collections.abc import Mapping
from typing import Any

import tokenizers


class Library:
    """A tokenizer of the library: encodes texts, and gives its contents as plain data.

    Truncation and padding that a file sets are turned off. A damaged tokenizer may raise a Rust
    panic, which is a BaseException. Threads may encode at the same time only with the same
    `special`.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.tokenizer = tokenizer

    def encode(self, text: str, special: bool) -> list[int]:
        if self.tokenizer.encode_special_tokens == special:  # a setting of the tokenizer object
            self.tokenizer.encode_special_tokens = not special
        # As a batch: for a single text the library does not release the GIL.
        (encoding,) = self.tokenizer.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoding.ids
        return ids

    def contents(self) -> dict[str, Any]:
        """The contents that `TokenizersTokenizer` reads, as JSON values."""
        decoder = self.tokenizer.decoder
        added = self.tokenizer.get_added_tokens_decoder()
        return {
            "ids": self.tokenizer.get_vocab(with_added_tokens=True),
            "added": [(id, token.content, token.special) for id, token in added.items()],
            "decoder": json.loads(decoder.__getstate__()) if decoder else None,
            "prefix": self._prefix(),
        }

    def _prefix(self) -> list[int]:
        """The ids that the post-processor puts before a text; those after it are ignored."""
        encoding = self.tokenizer.encode("a")
        first = encoding.sequence_ids.index(0) if 0 in encoding.sequence_ids else 0
        prefix: list[int] = encoding.ids[:first]
        return prefix


class Job:
    """Loads the tokenizer.json of the first request, then encodes the text of each later one."""

    _library: Library

    def __init__(self) -> None:
        # Threads would use up this process's memory limit.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"

    def answer(self, request: Mapping[str, Any], data: bytes) -> dict[str, Any]:
        """The tokenizer's contents, or `ids`, or `failure` with its reason."""
        try:
            if "special" in request:
                return {"ids": self._library.encode(data.decode(), request["special"])}
            self._library = Library(tokenizers.Tokenizer.from_buffer(data))
            return self._library.contents()
        except BaseException as error:
            return {"failure": str(error)[:300] or type(error).__name__}
