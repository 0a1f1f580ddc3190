"""The `tokenizers` library, here for tokenizers that we build, and as a job of `worker` for files.

It imports nothing of this package, so that the worker can load it.
"""

import json
import os
from collections.abc import Mapping
from typing import Any

import tokenizers


class Library:
    """A tokenizer that the library runs: ids of texts, and what it is made of as plain data.

    Truncation and padding that a file may ask for are turned off. Damaged tokenizers also end in a
    Rust panic, which is a BaseException. Several threads may encode at once only if they all give
    the same `special`.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.tokenizer = tokenizer

    def encode(self, text: str, special: bool) -> list[int]:
        if self.tokenizer.encode_special_tokens == special:  # a switch of the whole object
            self.tokenizer.encode_special_tokens = not special
        # As a batch: for a text alone the library keeps all other threads waiting.
        (encoding,) = self.tokenizer.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoding.ids
        return ids

    def contents(self) -> dict[str, Any]:
        """What `TokenizersTokenizer` needs of it, in values that JSON knows."""
        decoder = self.tokenizer.decoder
        added = self.tokenizer.get_added_tokens_decoder()
        return {
            "ids": self.tokenizer.get_vocab(with_added_tokens=True),
            "added": [(id, token.content, token.special) for id, token in added.items()],
            "decoder": json.loads(decoder.__getstate__()) if decoder else None,
            "prefix": self._prefix(),
        }

    def _prefix(self) -> list[int]:
        """The ids that the post-processor puts before a text; those behind it are left out."""
        encoding = self.tokenizer.encode("a")
        first = encoding.sequence_ids.index(0) if 0 in encoding.sequence_ids else 0
        prefix: list[int] = encoding.ids[:first]
        return prefix


class Job:
    """Loads the tokenizer.json that a request brings, then encodes the text of each further one."""

    _library: Library

    def __init__(self) -> None:
        # Its threads would take of the memory that this process may have.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"

    def answer(self, request: Mapping[str, Any], data: bytes) -> dict[str, Any]:
        """Contents or ids; or the reason for a failure."""
        try:
            if "special" in request:
                return {"ids": self._library.encode(data.decode(), request["special"])}
            self._library = Library(tokenizers.Tokenizer.from_buffer(data))
            return self._library.contents()
        except BaseException as error:
            return {"failure": str(error)[:300] or type(error).__name__}
