"""SentencePiece tokenizers: those of Llama 1 and 2 and Mistral, and type `llama` of GGUF files."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError
from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2

from parallel_llama.errors import CheckpointError
from parallel_llama.tokenizer.tokenizer import MAX_PIECES, SpecialTokens, Tokenizer, Vocabulary

SPM_PROTO: Any = sentencepiece_model_pb2  # type checkers do not see its generated classes
# Types of pieces; the token types of GGUF files have the same numbers.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
SPACE = "\u2581"
# Bounds on the time and memory that a text costs with a hostile model. Models in use have pieces of
# up to 50 bytes, and normalise a character to at most 40 bytes.
MAX_PIECE_BYTES = 1024
MAX_NORMALIZED_BYTES = 64
_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


class AddedToken(NamedTuple):
    """A token that a file other than the model adds, or marks as a unit of text.

    Whitespace after a token with `strips_right` is not encoded, as in transformers.
    """

    id: int
    text: str
    is_special: bool
    strips_right: bool = False


def parse_spm(data: bytes, source: str) -> Any:
    """The ModelProto in a `tokenizer.model` file.

    Raises: CheckpointError if the data is not a ModelProto, or contains text that is not UTF-8.
    """
    proto = SPM_PROTO.ModelProto()
    try:
        proto.ParseFromString(data)
    except DecodeError as error:
        raise CheckpointError(f"{source}: not a SentencePiece model: {error}") from error
    trainer = proto.trainer_spec
    texts = [trainer.unk_surface, trainer.bos_piece, trainer.eos_piece]
    texts += [piece.piece for piece in proto.pieces]
    if not all(isinstance(text, str) for text in texts):  # protobuf returns invalid UTF-8 as bytes
        raise CheckpointError(f"{source}: not a usable SentencePiece model: text is not UTF-8")
    return proto


class SentencePieceTokenizer(Tokenizer):
    """A SentencePiece model, with special tokens matched here.

    SentencePiece never encodes text as a control piece, so the text is split at special tokens, and
    each part is encoded separately, as in Meta's chat format and llama.cpp. After a special token,
    a part that begins with a space gets no second one, as in transformers: chat templates write the
    space that Mistral's code leaves to SentencePiece.

    Args:
        added: tokens from other files, matched like special tokens. As in transformers, added
            tokens that are not special are matched even if special tokens are not parsed.

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
        self._spm = self._spm_inside = _processor(proto, source)
        normalizer = proto.normalizer_spec
        if normalizer.add_dummy_prefix and not normalizer.remove_extra_whitespaces:
            bare = SPM_PROTO.ModelProto()
            bare.CopyFrom(proto)
            bare.normalizer_spec.add_dummy_prefix = False
            self._spm_inside = _processor(bare, source)
        vocabulary = _vocabulary(proto, added, source)
        prefix = [bos_id] if adds_bos and bos_id is not None else []
        super().__init__(vocabulary, bos_id, eos_ids, prefix)
        special_ids = vocabulary.special_ids
        added_ids = {token.text: token.id for token in added}
        unit_ids = {text: id for text, id in added_ids.items() if text not in special_ids}
        self._specials = SpecialTokens({**special_ids, **added_ids})
        self._units = SpecialTokens(unit_ids)
        self._strips_right = frozenset(token.id for token in added if token.strips_right)

    def _encoded(self, text: str, special: bool) -> list[int]:
        ids: list[int] = []
        for part in (self._specials if special else self._units).split(text):
            if isinstance(part, int):
                ids.append(part)
                continue
            if ids and ids[-1] in self._strips_right:
                part = part.lstrip()
            spm = self._spm_inside if ids and part.startswith(" ") else self._spm
            ids += spm.EncodeAsIds(part)
        return ids

    def _continued(self, text: str, special: bool) -> list[int]:
        first, *others = (self._specials if special else self._units).split(text)
        if isinstance(first, int):
            return self._encoded(text, special)
        ids: list[int] = self._spm_inside.EncodeAsIds(first)
        return ids + self._encoded(text[len(first) :], special) if others else ids

    def to_model(self) -> bytes:
        """The contents of a tokenizer.model, without tokens that other files added."""
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
        raise CheckpointError(f"{source}: has {len(proto.pieces)} pieces, not 1 to {MAX_PIECES}")
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
    """The length of the longest text in a charsmap.

    A charsmap consists of the size of a trie, the trie, and texts that end with a zero byte.
    """
    n_trie = int.from_bytes(charsmap[:4], "little")
    return max(map(len, charsmap[4 + n_trie :].split(b"\0")))


def _vocabulary(proto: Any, added: Sequence[AddedToken], source: str) -> Vocabulary:
    pieces: list[bytes] = []
    special_ids: dict[str, int] = {}
    openings: dict[int, bytes] = {}
    units = {_spelled(piece.piece) for piece in proto.pieces if piece.type == USER_DEFINED}
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
            pieces.append(_spelled(text).encode())
            if drops_space and text.startswith(SPACE):
                openings[id] = pieces[id][1:]
    for id, text, is_special, _ in sorted(added):
        if not 0 <= id <= len(pieces):
            raise CheckpointError(
                f"{source}: added token {text!r} has id {id}, beyond the model's {len(pieces)} "
                "pieces"
            )
        spelled = text if is_special else _spelled(text)
        pieces[id : id + 1] = [spelled.encode()]
        openings.pop(id, None)
        if is_special:
            special_ids[text] = id
        else:
            units.add(spelled)
    return Vocabulary(pieces, special_ids, openings, frozenset(units))


def _spelled(piece: str) -> str:
    return piece.replace(SPACE, " ")


def _byte(text: str, source: str) -> bytes:
    match = _BYTE_PIECE.fullmatch(text)
    if match is None:
        raise CheckpointError(f"{source}: byte piece {text[:40]!r} is not of the form <0x0A>")
    return bytes([int(match.group(1), 16)])
