"""SentencePiece tokenizers: Llama 1 and 2, Mistral, and the `llama` kind inside GGUF files."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError
from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2

from parallel_llama.errors import CheckpointError
from parallel_llama.tokenizer.tokenizer import SpecialTokens, Tokenizer
from parallel_llama.tokenizer.vocabulary import MAX_PIECES, Vocabulary

SPM_PROTO: Any = sentencepiece_model_pb2  # its classes are made at import, unseen by checkers
# Kinds of pieces; the token types of GGUF files are the same numbers.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPACE = "\u2581"
# What a text of a hostile model may cost in time and memory hangs on these; those in use have
# pieces of up to 50 bytes, and normalise no character to more than 40.
MAX_PIECE_BYTES = 1024
MAX_NORMALIZED_BYTES = 64
_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


class AddedToken(NamedTuple):
    """A token that other files than the model add to it, or treat as one unit of text."""

    id: int
    text: str
    is_special: bool


def parse_spm(data: bytes, source: str) -> Any:
    """The ModelProto in a `tokenizer.model` file.

    Raises: CheckpointError if the bytes are none, or hold text that is not UTF-8.
    """
    proto = SPM_PROTO.ModelProto()
    try:
        proto.ParseFromString(data)
    except DecodeError as error:
        raise CheckpointError(f"{source}: not a SentencePiece model: {error}") from error
    trainer = proto.trainer_spec
    texts = [trainer.unk_surface, trainer.bos_piece, trainer.eos_piece]
    texts += [piece.piece for piece in proto.pieces]
    if not all(isinstance(text, str) for text in texts):  # protobuf gives other text as bytes
        raise CheckpointError(f"{source}: not a usable SentencePiece model: text is not UTF-8")
    return proto


class SentencePieceTokenizer(Tokenizer):
    """A tokenizer whose pieces SentencePiece finds, and whose special tokens are found here.

    SentencePiece never makes a control piece from text, so the text is cut at special tokens first
    and each part between them is encoded by itself, as Meta's chat format and llama.cpp do. A part
    behind a special token that begins with a space gets no second one, as in transformers: chat
    templates write the space that Mistral's own code leaves to SentencePiece.
    `added` are tokens that other files add to the model's; they are cut out in the same way.

    Raises: CheckpointError if SentencePiece cannot use the model.
    """

    def __init__(
        self,
        proto: Any,
        source: str,
        *,
        bos_id: int | None,
        adds_bos: bool,
        eos_ids: frozenset[int],
        added: Sequence[AddedToken] = (),
    ) -> None:
        _require_supported(proto, source)
        self._spm = self._behind = _processor(proto, source)
        normalizer = proto.normalizer_spec
        if normalizer.add_dummy_prefix and not normalizer.remove_extra_whitespaces:
            bare = SPM_PROTO.ModelProto()
            bare.CopyFrom(proto)
            bare.normalizer_spec.add_dummy_prefix = False
            self._behind = _processor(bare, source)
        vocabulary = _vocabulary(proto, added, source)
        prefix = [bos_id] if adds_bos and bos_id is not None else []
        super().__init__(vocabulary, bos_id, eos_ids, prefix)
        added_ids = {token.text: token.id for token in added}
        self._specials = SpecialTokens({**vocabulary.special_ids, **added_ids})

    def _encoded(self, text: str, special: bool) -> list[int]:
        ids: list[int] = []
        for part in self._specials.split(text) if special else [text]:
            if isinstance(part, int):
                ids.append(part)
            else:
                spm = self._behind if ids and part.startswith(" ") else self._spm
                ids += spm.EncodeAsIds(part)
        return ids

    def _continued(self, text: str) -> list[int]:
        first, *others = self._specials.split(text)
        if isinstance(first, int):
            return self._encoded(text, special=True)
        ids: list[int] = self._behind.EncodeAsIds(first)
        return ids + self._encoded(text[len(first) :], special=True) if others else ids

    def to_model(self) -> bytes:
        """The content of a tokenizer.model; what other files added is not in it."""
        return bytes(self._spm.serialized_model_proto())


def _processor(proto: Any, source: str) -> SentencePieceProcessor:
    processor = SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(proto.SerializeToString())
    except (RuntimeError, OSError, ValueError) as error:
        raise CheckpointError(f"{source}: not a usable SentencePiece model: {error}") from error
    return processor


def _require_supported(proto: Any, source: str) -> None:
    if not 0 < len(proto.pieces) <= MAX_PIECES:
        raise CheckpointError(
            f"{source}: has {len(proto.pieces)} pieces, allowed 1 to {MAX_PIECES}"
        )
    for id, piece in enumerate(proto.pieces):
        if len(piece.piece.encode()) > MAX_PIECE_BYTES:
            raise CheckpointError(f"{source}: piece {id} has more than {MAX_PIECE_BYTES} bytes")
    if _longest_normalized(proto.normalizer_spec.precompiled_charsmap) > MAX_NORMALIZED_BYTES:
        raise CheckpointError(
            f"{source}: normalises a character to more than {MAX_NORMALIZED_BYTES} bytes"
        )
    if proto.trainer_spec.treat_whitespace_as_suffix:
        raise CheckpointError(f"{source}: writes spaces after words, which is not supported")
    if proto.denormalizer_spec.precompiled_charsmap:
        raise CheckpointError(f"{source}: rewrites decoded text, which is not supported")


def _longest_normalized(charsmap: bytes) -> int:
    """The length of the longest text in a charsmap: the size of a trie, the trie, then texts that
    each end with a zero."""
    n_trie = int.from_bytes(charsmap[:4], "little")
    return max(map(len, charsmap[4 + n_trie :].split(b"\0")))


def _vocabulary(proto: Any, added: Sequence[AddedToken], source: str) -> Vocabulary:
    pieces: list[bytes] = []
    special_ids: dict[str, int] = {}
    openings: dict[int, bytes] = {}
    units = {piece.piece for piece in proto.pieces if piece.type == USER_DEFINED}
    drops_space = proto.normalizer_spec.add_dummy_prefix
    for id, piece in enumerate(proto.pieces):
        text, kind = piece.piece, piece.type
        if kind == CONTROL:
            special_ids[text] = id
            pieces.append(text.encode())
        elif kind == BYTE:
            pieces.append(_byte(text, source))
        elif kind == UNKNOWN:
            pieces.append(proto.trainer_spec.unk_surface.encode())
        else:
            spelled = text.replace(SPACE, " ").encode()
            pieces.append(spelled)
            if drops_space and text.startswith(SPACE):
                openings[id] = spelled[1:]
    for id, text, is_special in sorted(added):
        if not 0 <= id <= len(pieces):
            raise CheckpointError(
                f"{source}: added token {text!r} has id {id} and the model ends at {len(pieces)}"
            )
        pieces[id : id + 1] = [text.encode()]
        openings.pop(id, None)
        if is_special:
            special_ids[text] = id
        else:
            units.add(text)
    return Vocabulary(pieces, special_ids, openings, frozenset(units))


def _byte(text: str, source: str) -> bytes:
    match = _BYTE_PIECE.fullmatch(text)
    if match is None:
        raise CheckpointError(f"{source}: byte piece {text[:40]!r} is not of the form <0x0A>")
    return bytes([int(match.group(1), 16)])
