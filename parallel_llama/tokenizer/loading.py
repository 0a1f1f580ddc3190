"""Loads a model's tokenizer and chat template."""

import json
import logging
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parallel_llama.config.meta import is_mistral_params
from parallel_llama.errors import CheckpointError, UsageError, kind_of
from parallel_llama.files.bounded_files import is_file, is_there, open_file, read_bytes
from parallel_llama.files.fields import MAX_CONFIG_BYTES, json_object
from parallel_llama.files.gguf_header import read_gguf_header
from parallel_llama.files.model_files import TOKENIZER_FILES
from parallel_llama.tokenizer.chat import TOKEN_NAMES, ChatTemplate
from parallel_llama.tokenizer.chat_formats import Llama2Chat, Llama3Chat, MistralChat
from parallel_llama.tokenizer.gguf import GGUFVocabulary, build_gguf_tokenizer
from parallel_llama.tokenizer.jinja_chat import JinjaChat
from parallel_llama.tokenizer.pre_tokenizers import LLAMA3_PATTERN, PRE_TOKENIZERS
from parallel_llama.tokenizer.spm import AddedToken, SentencePieceTokenizer, parse_spm
from parallel_llama.tokenizer.tiktoken_ranks import TekkenTokenizer, TiktokenTokenizer, is_tekken
from parallel_llama.tokenizer.tokenizer import Tokenizer
from parallel_llama.tokenizer.tokenizer_json import FileEncoder, TokenizersTokenizer

MAX_TOKENIZER_BYTES = 64 << 20  # the largest in use have about 35 MB
MAX_MODEL_BYTES = 16 << 20  # of a tokenizer.model; the largest in use have about 5 MB
MAX_TEMPLATE_BYTES = 1 << 20

# Tokenizer classes that need code besides tokenizer.model.
_CODE_TOKENIZERS = ("ChatGLMTokenizer", "ChatGLM4Tokenizer")
_MISTRAL_FAMILIES = ("mistral", "mixtral")
_RANK_LINE = re.compile(rb"[A-Za-z0-9+/]+={0,2} \d+\r?\n")
# The patterns of Llama 3 and of Mistral, as they are written in JSON.
_LLAMA3_SPLIT, _MISTRAL_SPLIT = (
    json.dumps(pattern).encode()
    for pattern in (LLAMA3_PATTERN, PRE_TOKENIZERS["tekken"].patterns[0])
)

logger = logging.getLogger(__name__)


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer of a model: a folder in HF's, Meta's or Mistral's layout, or a GGUF file.

    The type of the tokenizer is determined from the file's contents, not from its name.

    Raises: UsageError if there is no tokenizer or its type is not supported; CheckpointError if its
    file is damaged.
    """
    if not is_there(path):
        raise UsageError(f"{path}: no such file or folder")
    if is_file(path):
        return _tokenizer_in(path, TokenizerConfig())
    for name in TOKENIZER_FILES:
        if is_file(path / name):
            if name != "tokenizer.json":
                _require_no_code(path / "tokenizer_config.json")
            return _tokenizer_in(path / name, read_tokenizer_config(path))
    raise UsageError(
        f"{path}: contains no tokenizer; looked for {', '.join(TOKENIZER_FILES)}. Copy the model's "
        "tokenizer there"
    )


def load_chat_template(path: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
    """The chat template of a model; None if it has none.

    Folders in Meta's and Mistral's layouts, and folders that `reshard` wrote from these, have no
    template: there the tokenizer and params.json determine the built-in format, Llama 2's, Llama
    3's, or a version of Mistral's.

    Raises: CheckpointError if a file is damaged.
    """
    if is_file(path):
        return _gguf_template(path, tokenizer)
    templates, source = folder_templates(path)
    if templates:
        names = _own_names(tokenizer) | read_tokenizer_config(path).names
        tool_use = templates.get("tool_use")
        return JinjaChat(templates["default"], tokenizer, names, source, tool_use=tool_use)
    return _built_in_chat(path, tokenizer)


def _require_no_code(config: Path) -> None:
    if (name := _object_in(config).get("tokenizer_class")) in _CODE_TOKENIZERS:
        raise UsageError(
            f"{config}: {name} is code in the model's folder, which is never run; give token ids, "
            "or add a tokenizer.json"
        )


@dataclass(frozen=True)
class TokenizerConfig:
    """The settings of a tokenizer in the JSON files beside it."""

    names: dict[str, str] = field(default_factory=dict)  # special tokens: bos_token -> "<s>"
    adds_bos: bool | None = None
    added: tuple[AddedToken, ...] = ()


def _text_in(path: Path, max_bytes: int) -> str:
    try:
        return read_bytes(path, max_bytes).decode("utf-8")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: not UTF-8 text at byte {error.start}") from error


def _object_in(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no file."""
    return json_object(path, _text_in(path, MAX_CONFIG_BYTES)) if is_there(path) else {}


def read_tokenizer_config(folder: Path) -> TokenizerConfig:
    path = folder / "tokenizer_config.json"
    config = _object_in(path)
    special = _object_in(folder / "special_tokens_map.json")
    texts = {
        name: _token_text(config.get(name)) or _token_text(special.get(name))
        for name in TOKEN_NAMES
    }
    adds_bos = config.get("add_bos_token")
    if adds_bos is not None and not isinstance(adds_bos, bool):
        raise CheckpointError(f"{path}: add_bos_token is {adds_bos!r:.80}, not true or false")
    names = {name: text for name, text in texts.items() if text}
    return TokenizerConfig(names, adds_bos, _added_tokens(folder, config))


def _token_text(value: Any) -> str | None:
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _added_tokens(folder: Path, config: dict[str, Any]) -> tuple[AddedToken, ...]:
    """Tokens added to a tokenizer.model, from both places where transformers has written them."""
    texts = {
        id: AddedToken(id, text, is_special=True)
        for text, id in _object_in(folder / "added_tokens.json").items()
        if isinstance(id, int)
    }
    decoder = config.get("added_tokens_decoder")
    for key, value in decoder.items() if isinstance(decoder, dict) else ():
        text = _token_text(value)
        if text is None or not re.fullmatch("[0-9]{1,10}", key):
            raise CheckpointError(
                f"{folder / 'tokenizer_config.json'}: added_tokens_decoder has {key!r:.80} with "
                f"{value!r:.80}; it maps ids to tokens"
            )
        settings = value if isinstance(value, dict) else {}
        is_special, strips_right = bool(settings.get("special")), bool(settings.get("rstrip"))
        texts[int(key)] = AddedToken(int(key), text, is_special, strips_right)
    return tuple(texts.values())


def _tokenizer_in(path: Path, config: TokenizerConfig) -> Tokenizer:
    source = str(path)
    with open_file(path) as file:
        head = file.read(4096)
    if head.startswith(b"GGUF"):
        return build_gguf_tokenizer(read_gguf_header(path).fields, source)
    if head.lstrip().startswith(b"{"):
        data = read_bytes(path, MAX_TOKENIZER_BYTES)
        if is_tekken(data):
            return TekkenTokenizer(data, source)
        corrected = with_tekken_split(path, data)
        if corrected != data:
            logger.warning(
                "%s: splits text by Llama 3's pattern, as a wrong conversion writes; Mistral's "
                "pattern in the tekken.json beside it is used instead",
                source,
            )
        return _from_json(corrected, source, config)
    data = read_bytes(path, MAX_MODEL_BYTES)
    if not data:
        raise CheckpointError(f"{source}: the file is empty")
    if _RANK_LINE.match(head):
        return TiktokenTokenizer(data, source)
    return _from_spm(data, source, config)


def with_tekken_split(path: Path, data: bytes) -> bytes:
    """The contents of a tokenizer.json, with Llama 3's pattern replaced by that of tekken.json.

    Such files of Mistral are the result of a wrong conversion, which transformers corrects with
    `fix_mistral_regex`. Without a tekken.json in the folder, the contents are unchanged.
    """
    tekken = path.parent / "tekken.json"
    if (
        _LLAMA3_SPLIT in data
        and is_file(tekken)
        and _MISTRAL_SPLIT in read_bytes(tekken, MAX_TOKENIZER_BYTES)
    ):
        return data.replace(_LLAMA3_SPLIT, _MISTRAL_SPLIT)
    return data


def _from_json(data: bytes, source: str, config: TokenizerConfig) -> TokenizersTokenizer:
    encoder = FileEncoder(data, source)
    eos_text = config.names.get("eos_token")
    eos_id = encoder.contents.ids.get(eos_text) if eos_text else None
    return TokenizersTokenizer(
        encoder,
        source,
        bos_text=config.names.get("bos_token"),
        adds_bos=config.adds_bos,
        eos_ids=frozenset() if eos_id is None else frozenset([eos_id]),
    )


def _from_spm(data: bytes, source: str, config: TokenizerConfig) -> SentencePieceTokenizer:
    proto = parse_spm(data, source)
    ids = {piece.piece: id for id, piece in enumerate(proto.pieces)}
    ids.update((token.text, token.id) for token in config.added)
    bos_text = config.names.get("bos_token", proto.trainer_spec.bos_piece)
    eos_text = config.names.get("eos_token", proto.trainer_spec.eos_piece)
    return SentencePieceTokenizer(
        proto,
        source,
        bos_id=ids.get(bos_text),
        adds_bos=config.adds_bos is not False,
        eos_ids=frozenset(ids[text] for text in (eos_text,) if text in ids),
        added=config.added,
    )


def _gguf_template(path: Path, tokenizer: Tokenizer) -> JinjaChat | None:
    fields = read_gguf_header(path).fields
    template = fields.get("tokenizer.chat_template")
    if template is None:
        return None
    names = GGUFVocabulary(fields, str(path)).names()
    tool_use = fields.get("tokenizer.chat_template.tool_use")
    return JinjaChat(
        _checked_template(template, str(path)),
        tokenizer,
        names,
        str(path),
        tool_use=None if tool_use is None else _checked_template(tool_use, str(path)),
        adds_bos=True,
    )


def _own_names(tokenizer: Tokenizer) -> dict[str, str]:
    """The special tokens of the tokenizer's own file, by their names in templates."""
    ids = {"bos_token": tokenizer.bos_id}
    if len(tokenizer.eos_ids) == 1:
        ids["eos_token"] = next(iter(tokenizer.eos_ids))
    return {
        name: tokenizer.decode([id], skip_special=False)
        for name, id in ids.items()
        if id is not None
    }


def folder_templates(folder: Path) -> tuple[dict[str, str], str]:
    """The default and tool_use templates of an HF folder, if any, and their file.

    Separate files take precedence over the configuration.
    """
    source = folder / "chat_template.jinja"
    files = {"default": source, "tool_use": folder / "additional_chat_templates/tool_use.jinja"}
    templates: dict[str, Any] = {
        name: _text_in(path, MAX_TEMPLATE_BYTES) for name, path in files.items() if is_file(path)
    }
    if not templates:
        source = folder / "tokenizer_config.json"
        template = _object_in(source).get("chat_template")
        if template is None:
            return {}, str(source)
        templates = _named(template)
    if "default" not in templates:
        names = ", ".join(templates) or "nothing"
        raise CheckpointError(f"{source}: chat_template has {names:.200} but no 'default'")
    return {
        name: _checked_template(templates[name], str(source)) for name in files if name in templates
    }, str(source)


def _named(template: Any) -> dict[str, Any]:
    """Templates by name; a single one is the default."""
    if not isinstance(template, list):
        return {"default": template}
    return {str(item.get("name")): item.get("template") for item in template if type(item) is dict}


def _checked_template(template: Any, source: str) -> str:
    if not isinstance(template, str):
        raise CheckpointError(f"{source}: the chat template is {kind_of(template)}")
    if len(template) > MAX_TEMPLATE_BYTES:
        raise CheckpointError(
            f"{source}: the chat template has {len(template)} characters, over the limit of "
            f"{MAX_TEMPLATE_BYTES}"
        )
    return template


def _built_in_chat(path: Path, tokenizer: Tokenizer) -> ChatTemplate | None:
    if isinstance(tokenizer, TekkenTokenizer):
        return MistralChat(tokenizer, tokenizer.version)
    if not is_file(path / "params.json"):
        return None
    if isinstance(tokenizer, TiktokenTokenizer):
        return Llama3Chat(tokenizer)
    if not isinstance(tokenizer, SentencePieceTokenizer):
        return None
    special_ids, eos_ids = tokenizer.vocabulary.special_ids, sorted(tokenizer.eos_ids)
    if "[INST]" in special_ids:
        return MistralChat(tokenizer, 7 if "[SYSTEM_PROMPT]" in special_ids else 3)
    if is_mistral_params(_object_in(path / "params.json")) or _is_mistral(path):
        return MistralChat(tokenizer, 1)
    if tokenizer.bos_id is None or not eos_ids:
        return None
    return Llama2Chat(tokenizer, tokenizer.bos_id, eos_ids[0])


def _is_mistral(folder: Path) -> bool:
    """Whether config.json or native.json states a Mistral family; params.json has Meta's keys."""
    arguments = _object_in(folder / "native.json").get("args")
    family = arguments.get("family") if isinstance(arguments, dict) else None
    return _object_in(folder / "config.json").get("model_type", family) in _MISTRAL_FAMILIES
