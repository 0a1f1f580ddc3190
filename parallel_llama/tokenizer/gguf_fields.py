"""Writes the tokenizer and the chat template of a folder as fields of a GGUF header.

The inverse of `tokenizer.gguf`. A byte-level BPE tokenizer.json is written with the type gpt2 and
the name of the rule by which it splits text; a SentencePiece tokenizer.model with the type llama.

Source: the keys under tokenizer.ggml in ggml's docs/gguf.md.
"""

import logging
import unicodedata
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from parallel_llama.config.generation import GenerationDefaults
from parallel_llama.errors import UsageError
from parallel_llama.files.bounded_files import is_file, read_bytes
from parallel_llama.files.fields import json_object
from parallel_llama.tokenizer import spm
from parallel_llama.tokenizer.gguf import TEMPLATE_FIELDS, build_gguf_tokenizer
from parallel_llama.tokenizer.loading import (
    MAX_TOKENIZER_BYTES,
    TokenizerConfig,
    folder_templates,
    load_chat_template,
    load_tokenizer,
    read_tokenizer_config,
    with_tekken_split,
)
from parallel_llama.tokenizer.pre_tokenizers import GPT2_PATTERN, PRE_TOKENIZERS
from parallel_llama.tokenizer.spm import AddedToken, SentencePieceTokenizer, parse_spm
from parallel_llama.tokenizer.tokenizer import Tokenizer

# Scores of tokens that are not in a SentencePiece model, as in llama.cpp's converter.
_ADDED_SCORE, _PADDING_SCORE = -1000.0, -10000.0
_END_KEYS = "eos", "eot", "eom"

# Letters of several scripts, a decomposed one, numbers, contractions, code and spaces.
_SAMPLE = (
    "Hello, World's 1234567 tests!  We'll see\u2026 DON'T\n\n\tdef f(x):\r\n    return x**2 # 3.1\n"
    "\u4f60\u597d \u043f\u0440\u0438\u0432\u0435\u0442 e\u0301t\u00e9 \u0e2a\u0e27\u0e31\u0e2a"
    "\u0e14\u0e35 \U0001f600\U0001f468\u200d\U0001f469 camelCase HTTPServer_v2 ...   "
)
_N_SAMPLED = 16  # special tokens

# Settings of added tokens that no GGUF file can state: there a token is matched literally.
_UNSTATED = {
    "rstrip": "drops whitespace after {}",
    "lstrip": "drops whitespace before {}",
    "single_word": "finds {} only as a whole word",
}
# Old folders of Llama 2 and Mistral have such settings for these tokens, and GGUF files of these
# models do not.
_USUAL = ("<unk>", "<s>", "</s>")

_INSTEAD = (
    "use --format hf or native, or a copy of the folder without its tokenizer files to write a "
    "GGUF file without a tokenizer"
)

logger = logging.getLogger(__name__)


def tokenizer_fields(folder: Path, vocab_size: int, defaults: GenerationDefaults) -> dict[str, Any]:
    """The header fields tokenizer.*, made from a folder with a tokenizer.

    Args:
        vocab_size: the model's vocabulary size, to which the tokens are padded.
        defaults: the sampling defaults, with the ids that end a text.

    Raises: UsageError for a tokenizer that no GGUF file can state, or that would encode or decode
    text differently after reading the fields back; CheckpointError if its files are damaged.
    """
    tokenizer, config = load_tokenizer(folder), read_tokenizer_config(folder)
    contents = _tokenizer_json(folder)
    fields = _byte_level_fields(folder, contents) or _spm_fields(folder, config, contents)
    if fields is None:
        raise UsageError(
            f"{folder}: its tokenizer cannot be written to a GGUF file; supported: byte-level BPE "
            f"in tokenizer.json, and SentencePiece BPE in tokenizer.model; {_INSTEAD}"
        )
    _drop_special_beyond(fields, vocab_size, folder)
    tokens = fields["tokens"]
    n_missing = vocab_size - len(tokens)
    if n_missing < 0:
        raise UsageError(
            f"{folder}: its tokenizer has {len(tokens)} tokens and the model {vocab_size}; "
            + _INSTEAD
        )
    tokens += [f"[PAD{id}]" for id in range(len(tokens), vocab_size)]
    fields["token_type"] += [spm.UNUSED] * n_missing
    if "scores" in fields:
        fields["scores"] += [_PADDING_SCORE] * n_missing
    fields |= _special_ids(tokenizer, config, tokens, defaults)
    fields["add_bos_token"] = bool(tokenizer.encode(""))
    gguf_fields = {f"tokenizer.ggml.{key}": value for key, value in fields.items()}
    written = build_gguf_tokenizer(gguf_fields, str(folder))
    if contents is not None:
        added = [token for token in contents.get("added_tokens") or () if token["id"] < vocab_size]
        _require_literal(folder, added, _unchecked(config), tokenizer, written)
    _require_same(folder, tokenizer, written)
    templates, _ = folder_templates(folder)
    if not templates and load_chat_template(folder, tokenizer) is not None:
        logger.warning(
            "%s: written without its chat format, which is built in and has no template; to write "
            "one, add it to the folder as chat_template.jinja",
            folder,
        )
    return gguf_fields | {
        key: templates[name] for name, key in TEMPLATE_FIELDS.items() if name in templates
    }


def _drop_special_beyond(fields: dict[str, Any], vocab_size: int, folder: Path) -> None:
    """Drops special tokens at the end that have no row in the model, as llama.cpp's converter does.

    Such a token cannot be in a prompt: its id is beyond the model's vocabulary.
    """
    end = len(fields["tokens"])
    while end > vocab_size and fields["token_type"][end - 1] == spm.CONTROL:
        end -= 1
    if dropped := fields["tokens"][end:]:
        logger.warning(
            "%s: the special tokens %.200s have ids beyond the model's %d tokens and are left out",
            folder, ", ".join(dropped), vocab_size,
        )  # fmt: skip
    for key in ("tokens", "token_type", "scores"):
        if key in fields:
            del fields[key][end:]


def _tokenizer_json(folder: Path) -> dict[str, Any] | None:
    """The contents of tokenizer.json; None if there is no such file."""
    path = folder / "tokenizer.json"
    if not is_file(path):
        return None
    data = with_tekken_split(path, read_bytes(path, MAX_TOKENIZER_BYTES))
    return json_object(path, data.decode())


def _byte_level_fields(folder: Path, contents: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The fields of a tokenizer.json; None if it is not byte-level BPE.

    Raises: UsageError for a way of splitting text that has no name in GGUF files.
    """
    if contents is None:
        return None
    model, decoder = contents["model"], contents.get("decoder") or {}
    if model.get("type", "BPE") != "BPE" or decoder.get("type") != "ByteLevel":
        return None
    ids = {**model["vocab"]}
    kinds: dict[int, int] = {}
    for added in contents.get("added_tokens") or ():
        ids[added["content"]] = added["id"]
        kinds[added["id"]] = spm.CONTROL if added["special"] else spm.USER_DEFINED
    texts = {id: text for text, id in ids.items()}
    all_ids = range(max(texts, default=-1) + 1)
    merges = [
        merge if isinstance(merge, str) else " ".join(merge) for merge in model.get("merges") or ()
    ]
    return {
        "model": "gpt2",
        "pre": _rule_name(folder / "tokenizer.json", contents),
        "tokens": [texts.get(id, f"[PAD{id}]") for id in all_ids],
        "token_type": [kinds.get(id, spm.NORMAL if id in texts else spm.UNUSED) for id in all_ids],
        "merges": merges,
    }


def _rule_name(path: Path, contents: Mapping[str, Any]) -> str:
    """The name of the rule by which a tokenizer.json splits text."""
    patterns = _patterns(contents.get("pre_tokenizer"))
    whole_words = bool(contents["model"].get("ignore_merges"))
    normalizer = contents.get("normalizer")
    for name, rule in PRE_TOKENIZERS.items():
        normal = {"type": "NFC"} if rule.composes else None
        if (rule.patterns, rule.whole_words, normal) == (patterns, whole_words, normalizer):
            return name
    raise UsageError(
        f"{path}: splits text by a rule that has no known name in GGUF files "
        f"({contents.get('pre_tokenizer')!s:.200}); {_INSTEAD}"
    )


def _patterns(pre_tokenizer: Any) -> tuple[str, ...] | None:
    """The patterns of a byte-level pre-tokenizer; None for one of another kind."""
    steps = pre_tokenizer
    if isinstance(steps, dict):
        steps = steps["pretokenizers"] if steps["type"] == "Sequence" else [steps]
    patterns: list[str] = []
    for step in steps or ():
        match step:
            case {
                "type": "Split",
                "pattern": {"Regex": str(pattern)},
                "behavior": "Isolated",
                "invert": False,
            }:
                patterns.append(pattern)
            case {"type": "Digits", "individual_digits": True}:
                patterns.append(r"\p{N}")
            case {"type": "ByteLevel", "add_prefix_space": False}:
                patterns += [GPT2_PATTERN] if step.get("use_regex", True) else []
            case _:
                return None
    return tuple(patterns)


def _added_tokens(
    config: TokenizerConfig, contents: Mapping[str, Any] | None
) -> Sequence[AddedToken]:
    """Tokens added to a tokenizer.model; a tokenizer.json beside it, if any, states them."""
    if contents is None:
        return config.added
    return [
        AddedToken(added["id"], added["content"], added["special"], added["rstrip"])
        for added in contents.get("added_tokens") or ()
    ]


def _spm_fields(
    folder: Path, config: TokenizerConfig, contents: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """The fields of a tokenizer.model; None if it is not SentencePiece BPE.

    Args:
        contents: those of the tokenizer.json beside it, if any.

    Raises: UsageError for an added token that no GGUF file can state.
    """
    path = folder / "tokenizer.model"
    tokenizer = load_tokenizer(path) if is_file(path) else None
    if not isinstance(tokenizer, SentencePieceTokenizer):
        return None
    proto = parse_spm(tokenizer.to_model(), str(path))
    trainer, normalizer = proto.trainer_spec, proto.normalizer_spec
    if trainer.model_type != spm.SPM_PROTO.TrainerSpec.BPE:
        return None
    tokens = [piece.piece for piece in proto.pieces]
    scores = [piece.score for piece in proto.pieces]
    types = [piece.type for piece in proto.pieces]
    for id, text, is_special, strips_right in sorted(_added_tokens(config, contents)):
        if id > len(tokens):
            raise UsageError(
                f"{folder}: added token {text!r:.80} has id {id}, beyond the {len(tokens)} tokens "
                f"of tokenizer.model; {_INSTEAD}"
            )
        if strips_right:
            _refuse_token(folder, text, _UNSTATED["rstrip"])
        if id < len(tokens) and types[id] == spm.UNKNOWN:
            continue
        tokens[id : id + 1] = [text]
        scores[id : id + 1] = [_ADDED_SCORE]
        types[id : id + 1] = [spm.CONTROL if is_special else spm.USER_DEFINED]
    fields = {
        "model": "llama",
        "tokens": [
            token.replace(spm.SPACE, " ") if kind == spm.USER_DEFINED else token
            for token, kind in zip(tokens, types, strict=True)
        ],
        "scores": scores,
        "token_type": types,
        "unknown_token_id": trainer.unk_id,
        "add_space_prefix": normalizer.add_dummy_prefix,
        "remove_extra_whitespaces": normalizer.remove_extra_whitespaces,
    }
    if normalizer.precompiled_charsmap:
        fields["precompiled_charsmap"] = [*normalizer.precompiled_charsmap]
    return fields


def _special_ids(
    tokenizer: Tokenizer,
    config: TokenizerConfig,
    tokens: list[str],
    defaults: GenerationDefaults,
) -> dict[str, int]:
    """The ids of special tokens, by their keys under tokenizer.ggml."""
    # Templates get the tokenizer's bos; the id in config.json may be that of the base model.
    ids = {"bos": defaults.bos_id if tokenizer.bos_id is None else tokenizer.bos_id}
    for key, name in (("unknown", "unk_token"), ("padding", "pad_token")):
        text = config.names.get(name)
        ids[key] = tokens.index(text) if text in tokens else None
    ends = [*(defaults.eos_ids or sorted(tokenizer.eos_ids))]
    ends.sort(key=lambda id: id not in tokenizer.eos_ids)  # the end of a turn first
    if len(ends) > len(_END_KEYS):
        logger.warning(
            "a GGUF file states %d ids that end a text, and this model has %d: %s are left out",
            len(_END_KEYS), len(ends), ends[len(_END_KEYS) :],
        )  # fmt: skip
    ids |= dict(zip(_END_KEYS, ends, strict=False))
    return {
        f"{key}_token_id": id for key, id in ids.items() if id is not None and 0 <= id < len(tokens)
    }


def _unchecked(config: TokenizerConfig) -> Collection[str]:
    """The tokens with only `rstrip` checked: the usual tokens, and the padding token."""
    padding, end = (config.names.get(name) for name in ("pad_token", "eos_token"))
    return _USUAL if padding is None or padding == end else (*_USUAL, padding)


def _require_literal(
    folder: Path,
    added: Sequence[Mapping[str, Any]],
    unchecked: Collection[str],
    tokenizer: Tokenizer,
    written: Tokenizer,
) -> None:
    """Refuses an added token of a tokenizer.json that the GGUF tokenizer would match differently.

    Args:
        unchecked: tokens that are only refused if whitespace after the token is dropped.

    Raises: UsageError that names the token.
    """
    for token in added:
        for setting, effect in _UNSTATED.items():
            if token[setting] and (setting == "rstrip" or token["content"] not in unchecked):
                _refuse_token(folder, token["content"], effect)
    normalized = {
        token["id"]: token["content"]
        for token in added
        if token["normalized"] and token["content"] not in unchecked
    }
    text = "".join(f"a{content}" for content in normalized.values()) + "a"
    if isinstance(written, SentencePieceTokenizer):
        text = text.replace(spm.SPACE, " ")
    # A normalizer may change the token itself, or make it from other characters.
    for spelled in dict.fromkeys([text, *(unicodedata.normalize(f, text) for f in ("NFC", "NFD"))]):
        ids, written_ids = ({*each.encode(spelled)} for each in (tokenizer, written))
        for id, content in normalized.items():
            if (id in ids) != (id in written_ids):
                _refuse_token(folder, content, "normalises text before it looks for {}")


def _refuse_token(folder: Path, token: str, effect: str) -> NoReturn:
    described = effect.format(f"{token!r:.80}")
    raise UsageError(
        f"{folder}: its tokenizer {described}, which no GGUF file can state; {_INSTEAD}"
    )


def _require_same(folder: Path, tokenizer: Tokenizer, written: Tokenizer) -> None:
    """Raises: UsageError if the written tokenizer encodes or decodes a text differently."""
    samples = [_SAMPLE]
    if not isinstance(written, SentencePieceTokenizer):
        special_ids = tokenizer.vocabulary.special_ids
        names = [text for text, id in special_ids.items() if id < written.vocab_size][:_N_SAMPLED]
        samples.append(" a ".join(names) + "b".join(names))
    for sample in samples:
        ids = tokenizer.encode(sample)
        if ids != written.encode(sample) or tokenizer.decode(ids) != written.decode(ids):
            raise UsageError(
                f"{folder}: its tokenizer encodes or decodes text differently from the one that a "
                f"GGUF file can state; {_INSTEAD}"
            )
