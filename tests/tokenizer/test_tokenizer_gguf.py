"""The tokenizer in GGUF files: byte-level BPE and SentencePiece."""

import json
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import gguf
import pytest
import regex
from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2
from tokenizer_data import (
    LLAMA3,
    MISTRAL_V1,
    MISTRAL_V3,
    SMOLLM2,
    TEKKEN,
    byte_level_tokenizer,
    random_texts,
    real_tokenizer,
    real_tokenizer_files,
    smollm2_of_transformers,
)
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Library
from transformers.convert_slow_tokenizer import bytes_to_unicode

from parallel_llama.config.generation import GenerationDefaults
from parallel_llama.errors import CheckpointError, UsageError
from parallel_llama.tokenizer import Tokenizer, load_tokenizer
from parallel_llama.tokenizer.gguf import build_gguf_tokenizer, export_gguf_tokenizer
from parallel_llama.tokenizer.gguf_fields import tokenizer_fields
from parallel_llama.tokenizer.pre_tokenizers import PRE_TOKENIZERS


def gguf_file(path: Path, architecture: str = "llama", **fields: Any) -> Path:
    """A GGUF file with a tokenizer alone; None leaves a field out."""
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in fields.items():
        key = f"tokenizer.{name}" if name == "chat_template" else f"tokenizer.ggml.{name}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif value is not None:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def small_bpe(path: Path, **changes: Any) -> Path:
    tokens = ["<eos>", "<bos>", *ALPHABET, "he", "ll", "hell", "hello", "12"]
    fields = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [3, 3] + [1] * (len(tokens) - 2),
        "merges": ["h e", "l l", "he ll", "1 2"],
        "eos_token_id": 0,
        "bos_token_id": 1,
    }
    return gguf_file(path, **{**fields, **changes})


def spm_fields(path: Path, n_tokens: int | None = None) -> dict[str, Any]:
    """The fields that a converter writes for a SentencePiece model, or for its first tokens."""
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(path.read_bytes())
    pieces = proto.pieces[:n_tokens]
    return {
        "model": "llama",
        "tokens": [piece.piece for piece in pieces],
        "scores": [float(piece.score) for piece in pieces],
        "token_type": [int(piece.type) for piece in pieces],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
    }


@pytest.mark.slow
def test_smollm2_equals_transformers_on_random_text():
    oracle = smollm2_of_transformers()
    ours = real_tokenizer(SMOLLM2)
    assert ours.vocab_size == 49152
    assert ours.bos_id == 1
    assert ours.eos_ids == {2}
    for text in [*random_texts(3000), "a  1", "<|im_start|>user\nx<|im_end|>"]:
        ids = oracle(text).input_ids
        assert ours.encode(text) == ids
        assert ours.decode(ids) == oracle.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("path", [MISTRAL_V1, MISTRAL_V3], ids=lambda path: path.name)
def test_gguf_llama_tokenizer_equals_its_sentencepiece_model(tmp_path, path):
    ours = load_tokenizer(gguf_file(tmp_path / "a.gguf", **spm_fields(path)))
    oracle = SentencePieceProcessor(str(path))
    for text in random_texts(2000):
        ids = oracle.EncodeAsIds(text)
        assert ours.encode(text, special=False) == [1, *ids]
        assert ours.decode(ids) == real_tokenizer(path).decode(ids)
    assert ours.eos_ids == {2}


def test_gguf_llama_tokenizer_obeys_bos_and_space_prefix_fields(tmp_path):
    fields = {**spm_fields(MISTRAL_V1, 1000), "add_bos_token": False, "add_space_prefix": False}
    ours = load_tokenizer(gguf_file(tmp_path / "a.gguf", **fields))
    pieces = [ours.vocabulary.piece(id) for id in ours.encode("hello")]
    assert b"".join(pieces) == b"hello"
    assert ours.decode(ours.encode(" hello")) == " hello"
    fields["unknown_token_id"] = None  # 0 if the file has no such field
    assert load_tokenizer(gguf_file(tmp_path / "b.gguf", **fields)).encode("x") == ours.encode("x")


def test_user_defined_gguf_token_is_one_id_and_decodes_to_its_text(tmp_path):
    fields = spm_fields(MISTRAL_V1, 1000)
    fields["tokens"][-1], fields["token_type"][-1] = "<|im_start|>", 4
    ours = load_tokenizer(gguf_file(tmp_path / "a.gguf", **fields))
    last = ours.vocab_size - 1
    assert ours.encode("<|im_start|>hi", bos=False) == [last, *ours.encode("hi", bos=False)]
    assert ours.decode([last]) == "<|im_start|>"
    assert ours.encode("<|im_start|>hi", special=False) == ours.encode("<|im_start|>hi")


def gemma_folder(folder: Path, added: dict[str, Any]) -> SentencePieceProcessor:
    """Writes a tokenizer.model with user-defined pieces for runs of spaces, as in Gemma's file.

    Args:
        added: the added_tokens_decoder of tokenizer_config.json.
    """
    proto = sentencepiece_model_pb2.ModelProto()
    proto.ParseFromString(MISTRAL_V1.read_bytes())
    del proto.pieces[1000:]
    proto.pieces[-1].piece = "<table>"
    for piece in proto.pieces:
        if piece.piece in ("<table>", "\u2581" * len(piece.piece)) and len(piece.piece) > 1:
            piece.type = 4
    proto.normalizer_spec.add_dummy_prefix = False
    (folder / "tokenizer.model").write_bytes(proto.SerializeToString())
    config = {"add_bos_token": False, "added_tokens_decoder": added}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return SentencePieceProcessor(str(folder / "tokenizer.model"))


# Gemma 2's tokenizer_config.json repeats the runs of spaces; these have ids 259 and 260 here.
REPEATED = {str(id): {"content": "\u2581" * n, "special": False} for id, n in ((259, 2), (260, 4))}


@pytest.mark.parametrize("added", [{}, REPEATED], ids=["model alone", "repeated in the config"])
def test_user_defined_runs_of_spaces_are_spaces_in_folder_and_gguf_file(tmp_path, added):
    """Regression: they were decoded as U+2581, and were not matched with special=False."""
    oracle = gemma_folder(tmp_path, added)
    fields = tokenizer_fields(tmp_path, 1000, GenerationDefaults())
    assert fields["tokenizer.ggml.tokens"][259] == "  "
    names = {key.removeprefix("tokenizer.ggml."): value for key, value in fields.items()}
    spelled = {**names, "tokens": [oracle.IdToPiece(id) for id in range(1000)]}
    readers = [
        load_tokenizer(tmp_path),
        load_tokenizer(gguf_file(tmp_path / "a.gguf", **names)),
        load_tokenizer(gguf_file(tmp_path / "b.gguf", **spelled)),
    ]
    texts = ["def f(x):\n        y =   x<table>", *random_texts(500)]
    for text in texts:
        if "\u2581" in text:  # SentencePiece replaces it by a space
            continue
        ids = oracle.EncodeAsIds(text)
        for ours in readers:
            assert ours.encode(text) == ours.encode(text, special=False) == ids
            assert ours.decode(ids) == oracle.DecodeIds(ids)
    assert readers[0].vocabulary.units == readers[1].vocabulary.units


@pytest.mark.slow
def test_exported_tokenizer_without_a_space_prefix_has_none_in_transformers(tmp_path):
    """Regression: transformers put a space before texts of Gemma exported from a GGUF file."""
    from transformers import AutoTokenizer  # a slow import that most tests do not need

    fields = spm_fields(MISTRAL_V1)
    for id, token in ((259, "  "), (31990, "<table>"), (31991, "<end_of_turn>")):
        fields["tokens"][id], fields["token_type"][id] = token, 4
    path = gguf_file(tmp_path / "a.gguf", "gemma", add_space_prefix=False, **fields)
    for name, data in export_gguf_tokenizer(path).items():
        (tmp_path / name).write_bytes(data)
    (tmp_path / "config.json").write_text('{"model_type": "gemma"}')
    oracle, ours = AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(path)
    chat = "<s>hi  <table><end_of_turn>\n<end_of_turn> x"
    for text in ["hello", " hello", chat, *(text for text in random_texts(300) if text)]:
        if "\u2581" in text:  # SentencePiece replaces it by a space
            continue
        ids = ours.encode(text)
        assert oracle(text).input_ids == ids
        assert oracle.decode(ids, skip_special_tokens=True) == ours.decode(ids)


def test_special_token_beyond_the_vocabulary_is_left_out_with_a_warning(tmp_path, caplog):
    """Regression: Gemma 3 1B could not be written as GGUF: its image token has no row."""
    gemma_folder(tmp_path, {"1000": {"content": "<image_soft_token>", "special": True}})
    fields = tokenizer_fields(tmp_path, 1000, GenerationDefaults())
    for key in ("tokens", "token_type", "scores"):
        assert len(fields[f"tokenizer.ggml.{key}"]) == 1000
    assert "<image_soft_token> have ids beyond the model's 1000 tokens" in caplog.text
    assert (
        len(tokenizer_fields(tmp_path, 1001, GenerationDefaults())["tokenizer.ggml.tokens"]) == 1001
    )
    gemma_folder(tmp_path, {"1000": {"content": "<table2>", "special": False}})
    with pytest.raises(UsageError, match="has 1001 tokens and the model 1000"):
        tokenizer_fields(tmp_path, 1000, GenerationDefaults())


def mistral_folder(folder: Path, **changes: Any) -> None:
    """Writes a tokenizer.model and a tokenizer.json with one more token, as transformers 5 does."""
    contents = json.loads(real_tokenizer_files()["sentencepiece"])
    # transformers writes merges of spaces first, although tokenizer.model scores spaces lowest.
    contents["model"]["merges"].sort(key=lambda merge: set("".join(merge)) == {"\u2581"})
    token = contents["added_tokens"][0]
    contents["added_tokens"].append({**token, "id": 32000, "content": "<|im_end|>", **changes})
    (folder / "tokenizer.json").write_text(json.dumps(contents))
    (folder / "tokenizer.model").symlink_to(MISTRAL_V1)


@pytest.mark.parametrize("is_special", [True, False])
def test_token_that_only_tokenizer_json_states_is_written_for_sentencepiece(tmp_path, is_special):
    """Regression: it became [PAD32000], and was encoded as ordinary text."""
    mistral_folder(tmp_path, special=is_special)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    fields = tokenizer_fields(tmp_path, 32001, GenerationDefaults())
    assert fields["tokenizer.ggml.tokens"][32000] == "<|im_end|>"
    folder, file = load_tokenizer(tmp_path), build_gguf_tokenizer(fields, "written")
    assert file.encode("hi<|im_end|>") == folder.encode("hi<|im_end|>")
    assert file.encode("hi<|im_end|>")[-1] == 32000
    assert file.eos_ids == folder.eos_ids == {32000}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rstrip": True}, r"drops whitespace after '<\|im_end\|>', which no GGUF file can state"),
        ({"lstrip": True}, r"drops whitespace before '<\|im_end\|>', which no GGUF file can state"),
        ({"single_word": True}, r"finds '<\|im_end\|>' only as a whole word, which no GGUF file"),
        ({"id": 32001}, r"'<\|im_end\|>' has id 32001, beyond the 32000 tokens of tokenizer.model"),
    ],
)
def test_added_token_that_gguf_cannot_state_is_refused(tmp_path, changes, message):
    """Regression: they were written without these settings, and the last as token 32000."""
    mistral_folder(tmp_path, **changes)
    with pytest.raises(UsageError, match=message):
        tokenizer_fields(tmp_path, 32002, GenerationDefaults())


@pytest.mark.parametrize("is_normalized", [False, True])
def test_token_hidden_by_the_normalizer_of_old_llama_folders_is_refused(tmp_path, is_normalized):
    """Their normalizer puts a space before a normalized token, which is not found after a word.

    Such settings of `<unk>`, `<s>` and `</s>` are common, and are accepted.
    """
    mistral_folder(tmp_path, normalized=is_normalized)
    path = tmp_path / "tokenizer.json"
    contents = json.loads(path.read_text())
    for token in contents["added_tokens"][:3]:
        token |= {"normalized": True, "lstrip": True}
    contents["normalizer"] = {
        "type": "Sequence",
        "normalizers": [
            {"type": "Prepend", "prepend": "\u2581"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
        ],
    }
    path.write_text(json.dumps({**contents, "pre_tokenizer": None}))
    refusal = pytest.raises(UsageError, match=r"normalises text before it looks for '<\|im_end\|>'")
    with refusal if is_normalized else nullcontext():
        tokenizer_fields(tmp_path, 32001, GenerationDefaults())


@pytest.mark.parametrize(
    ("text", "settings", "message"),
    [
        ("<tool>", {"normalized": True}, None),
        ("<tool>", {"lstrip": True}, "drops whitespace before '<tool>'"),
        ("<tool>", {"rstrip": True}, "drops whitespace after '<tool>'"),
        ("<tool>", {"single_word": True}, "finds '<tool>' only as a whole word"),
        ("caf\u00e9", {"normalized": False}, None),
        ("caf\u00e9", {"normalized": True}, "normalises text before it looks for 'caf\u00e9'"),
    ],
)
def test_byte_level_token_that_gguf_cannot_state_is_refused(tmp_path, text, settings, message):
    """Regression: it was written, and matched literally."""
    library = byte_level_tokenizer()
    library.normalizer = normalizers.NFC()
    library.add_tokens([AddedToken(text, special=False, **{"normalized": False, **settings})])
    library.save(str(tmp_path / "tokenizer.json"))
    n_tokens = library.get_vocab_size()
    with pytest.raises(UsageError, match=message) if message else nullcontext():
        fields = tokenizer_fields(tmp_path, n_tokens, GenerationDefaults())
        assert fields["tokenizer.ggml.tokens"][-1] == text


def test_written_bos_is_that_of_the_tokenizer_if_config_json_states_another(tmp_path):
    """Regression: chats began with the other token, because templates write `bos_token`."""
    byte_level_tokenizer().save(str(tmp_path / "tokenizer.json"))
    config = tmp_path / "tokenizer_config.json"
    config.write_text('{"bos_token": "<s>"}')
    tokenizer = load_tokenizer(tmp_path)
    fields = tokenizer_fields(tmp_path, tokenizer.vocab_size, GenerationDefaults(bos_id=0))
    assert fields["tokenizer.ggml.bos_token_id"] == tokenizer.bos_id != 0
    config.unlink()
    fields = tokenizer_fields(tmp_path, tokenizer.vocab_size, GenerationDefaults(bos_id=0))
    assert fields["tokenizer.ggml.bos_token_id"] == 0


def test_chat_format_without_a_template_is_left_out_with_a_warning(tmp_path, caplog):
    gemma_folder(tmp_path, {})
    tokenizer_fields(tmp_path, 1000, GenerationDefaults())
    assert not caplog.records
    (tmp_path / "params.json").write_text("{}")
    tokenizer_fields(tmp_path, 1000, GenerationDefaults())
    assert f"{tmp_path}: written without its chat format" in caplog.text
    caplog.clear()
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    fields = tokenizer_fields(tmp_path, 1000, GenerationDefaults())
    assert fields["tokenizer.chat_template"] == "{{ messages }}"
    assert not caplog.records


def test_special_byte_level_token_beyond_the_vocabulary_is_left_out(tmp_path):
    library = byte_level_tokenizer()
    n_tokens = library.get_vocab_size()
    library.add_special_tokens(["<image>"])
    library.save(str(tmp_path / "tokenizer.json"))
    fields = tokenizer_fields(tmp_path, n_tokens, GenerationDefaults())
    assert len(fields["tokenizer.ggml.tokens"]) == n_tokens
    assert "<image>" not in fields["tokenizer.ggml.tokens"]


# The added tokens of Phi-3, with `special` and `rstrip`; `</s>` is token 2 of the model.
PHI3 = {
    "</s>": (2, False, True),
    "<|endoftext|>": (32000, True, False),
    "<|assistant|>": (32001, True, True),
    "<|end|>": (32002, True, True),
    "<|user|>": (32003, True, True),
}
PHI3_TEXTS = (
    "<s><|user|>\nSay hi<|end|>\n<|assistant|>\n",
    "<|user|> \t\u2003 two words <|end|>\n\n<|end|> \n",
    "a</s>\n b<|endoftext|>\nc<s>\nd",
)


def phi3_of_tokenizers() -> Library:
    """The oracle for Phi-3: its tokenizer.json has these added tokens and this normalizer."""
    contents = json.loads(real_tokenizer_files()["sentencepiece"])
    kept = [token for token in contents["added_tokens"] if token["content"] not in PHI3]
    contents["added_tokens"] = kept + [
        {**kept[0], "id": id, "content": text, "special": is_special, "rstrip": rstrip}
        for text, (id, is_special, rstrip) in PHI3.items()
    ]
    library = Library.from_str(json.dumps(contents))
    library.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    library.pre_tokenizer = None
    return library


def phi3_folder(folder: Path) -> None:
    (folder / "tokenizer.model").symlink_to(MISTRAL_V1)
    added = {
        str(id): {"content": text, "special": is_special, "rstrip": rstrip}
        for text, (id, is_special, rstrip) in PHI3.items()
    }
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))


def test_phi3_folder_and_gguf_file_drop_whitespace_after_tokens_as_tokenizers_does(tmp_path):
    """Regression: whitespace after a token with rstrip was encoded."""
    oracle = phi3_of_tokenizers()
    phi3_folder(tmp_path)
    fields = spm_fields(MISTRAL_V1)
    for text, (id, is_special, _) in PHI3.items():
        fields["tokens"][id : id + 1] = [text]
        fields["scores"][id : id + 1] = [-1000.0]
        fields["token_type"][id : id + 1] = [3 if is_special else 4]
    path = gguf_file(tmp_path / "phi3.gguf", "phi3", **fields)
    (exported := tmp_path / "exported").mkdir()
    for name, data in export_gguf_tokenizer(path).items():
        (exported / name).write_bytes(data)
    for text in PHI3_TEXTS:
        ids = oracle.encode(text, add_special_tokens=False).ids
        for each in (tmp_path, path, exported):
            assert load_tokenizer(each).encode(text, bos=False) == ids
    llama = load_tokenizer(gguf_file(tmp_path / "llama.gguf", **fields))
    assert llama.encode("<|user|>\na") != llama.encode("<|user|>a")


def test_phi4_gguf_file_drops_whitespace_beside_special_tokens(tmp_path):
    """Regression: a newline at the end of a question was encoded; Phi-4's tokenizer drops it."""
    tokens = [*ALPHABET, "he", "<|im_sep|>", "<|im_end|>", "<think>"]
    types = [1] * (len(tokens) - 3) + [3, 3, 4]
    fields = {"tokens": tokens, "token_type": types, "merges": ["h e"], "pre": "dbrx"}
    phi4 = small_bpe(tmp_path / "phi4.gguf", architecture="phi3", **fields)
    (exported := tmp_path / "exported").mkdir()
    for name, data in export_gguf_tokenizer(phi4).items():
        (exported / name).write_bytes(data)
    spaced, plain = "<|im_sep|>\nhe he \n<|im_end|> ", "<|im_sep|>he he<|im_end|>"
    for path in (phi4, exported):
        ours = load_tokenizer(path)
        assert ours.encode(spaced, bos=False) == ours.encode(plain, bos=False)
        assert ours.decode(ours.encode("he <think>\nhe")) == "he <think>\nhe"
    llama = load_tokenizer(small_bpe(tmp_path / "llama.gguf", **fields))
    assert llama.decode(llama.encode(spaced, bos=False)) == "\nhe he \n "


def test_control_token_that_a_config_calls_not_special_stays_text_with_special_false(tmp_path):
    phi3_folder(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert 2 in tokenizer.encode("a</s>")
    assert 2 not in tokenizer.encode("a</s>", special=False)


@pytest.mark.parametrize(
    ("pre", "adds_bos"),
    [("gpt-2", False), ("llama-bpe", True), ("tekken", True), ("smollm", False), (None, False)],
)
def test_byte_level_bos_follows_add_bos_token_then_the_family(tmp_path, pre, adds_bos):
    silent = load_tokenizer(small_bpe(tmp_path / "a.gguf", pre=pre))
    assert (silent.encode("x")[0] == 1) is adds_bos
    told = load_tokenizer(small_bpe(tmp_path / "b.gguf", pre=pre, add_bos_token=not adds_bos))
    assert (told.encode("x")[0] == 1) is not adds_bos


def test_timeout_error_of_a_signal_handler_does_not_blame_the_tokenizer(tmp_path, monkeypatch):
    """Regression: it was reported as a CheckpointError of the file."""

    def expire(*_: object) -> None:
        raise TimeoutError

    tokenizer = load_tokenizer(small_bpe(tmp_path / "a.gguf"))
    monkeypatch.setattr(tokenizer._encoder._library, "encode", expire)
    with pytest.raises(TimeoutError):
        tokenizer.encode("x")


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.decode([id]) for id in tokenizer.encode(text, bos=False)]


def test_pre_tokenizer_decides_how_digits_are_split(tmp_path):
    def cut(pre: str) -> list[str]:
        return pieces(load_tokenizer(small_bpe(tmp_path / f"{pre}.gguf", pre=pre)), "12 12")

    assert cut("gpt-2") == ["12", " ", "12"]
    assert cut("smollm") == ["1", "2", " ", "1", "2"]
    assert cut("qwen2") == ["1", "2", " ", "1", "2"]
    assert cut("llama-bpe") == ["12", " ", "12"]


def test_llama3_whole_word_tokens_are_used_without_merges(tmp_path):
    """`hello` is a token that no merge produces."""
    for pre, expected in (("llama-bpe", ["hello"]), ("gpt-2", ["hell", "o"])):
        tokenizer = load_tokenizer(small_bpe(tmp_path / f"{pre}.gguf", pre=pre))
        assert pieces(tokenizer, "hello") == expected


def test_text_of_qwen_cohere_and_neox_is_nfc_normalised_in_gguf_and_exported_files(tmp_path):
    """Regression: GGUF files ignored the NFC of these tokenizers, and gave other tokens."""
    apart, composed = "cafe\u0301<s>", "caf\u00e9<s>"
    nfc = ("qwen2", "qwen35", "command-r", "olmo", "mpt")
    for pre, is_composed in (*((pre, True) for pre in nfc), ("gpt-2", False), ("smollm", False)):
        path = small_bpe(tmp_path / f"{pre}.gguf", pre=pre)
        (folder := tmp_path / pre).mkdir()
        for name, data in export_gguf_tokenizer(path).items():
            (folder / name).write_bytes(data)
        for tokenizer in (load_tokenizer(path), load_tokenizer(folder)):
            assert (tokenizer.encode(apart) == tokenizer.encode(composed)) is is_composed


@pytest.mark.parametrize(
    ("kind", "pre"),
    [
        ("CohereTokenizer", "command-r"),
        ("GPTNeoXTokenizer", "olmo"),
        ("Qwen2Tokenizer", "qwen2"),
        ("Qwen3_5Tokenizer", "qwen35"),
    ],
)
def test_tokenizer_of_a_transformers_class_is_written_under_its_name(tmp_path, kind, pre):
    """Regression: Command R's was refused, because its text is NFC-normalised."""
    import transformers  # a slow import that most tests do not need

    vocab = {token: id for id, token in enumerate([*ALPHABET, "he"])}
    oracle = getattr(transformers, kind)(vocab=vocab, merges=[("h", "e")])
    oracle.save_pretrained(tmp_path)
    n_tokens = load_tokenizer(tmp_path).vocab_size
    fields = tokenizer_fields(tmp_path, n_tokens, GenerationDefaults())
    assert fields["tokenizer.ggml.pre"] == pre
    ours = build_gguf_tokenizer(fields, "written")
    for text in random_texts(200):
        assert ours.encode(text, bos=False) == oracle.encode(text, add_special_tokens=False)


# A text that every two rules split differently, and its pieces under each rule. The pieces are from
# the models' own tokenizer.json files, or from llama.cpp if no such file was at hand.
TEXT = "I'Sx  aBc'll  1234!`\u0301=գ€e 你カ，\n (x)× \r\n"
CUTS = {
    "default": "I|'|Sx| | aBc|'|ll| | |123|4|!|`\u0301|=|գ|€|e| 你カ|，|\n |(|x|)|×| \r\n",
    "falcon": "I|'|Sx| | aBc|'|ll| | |123|4|!`|\u0301|=|գ|€|e| 你カ|，|\n |(|x|)|×| \r\n",
    "gpt-2": "I|'|Sx| | aBc|'ll| | 1234|!`\u0301=|գ|€|e| 你カ|，|\n| (|x|)×| \r\n",
    "smollm": "I|'|Sx| | aBc|'ll|  |1|2|3|4|!`\u0301=|գ|€|e| 你カ|，|\n| (|x|)×| \r\n",
    "llama3": "I|'S|x| | aBc|'ll| | |123|4|!`\u0301=|գ|€e| 你カ|，\n| (|x|)×| \r\n",
    "minicpm5": "I|'S|x| | aBc|'ll|  |123|4|!`\u0301=|գ|€e| 你カ|，\n| (|x|)×| \r\n",
    "qwen2": "I|'S|x| | aBc|'ll| | |1|2|3|4|!`\u0301=|գ|€e| 你カ|，\n| (|x|)×| \r\n",
    "qwen35": "I|'S|x| | aBc|'ll| | |1|2|3|4|!`|\u0301|=գ|€e| 你カ|，\n| (|x|)×| \r\n",
    "seed-coder": "I|'S|x| | aBc|'ll| | |1|2|3|4|!`\u0301=|գ|€e| 你カ|，|\n| (|x|)×| \r\n",
    "ufakzeka": "I|'Sx| | aBc|'ll| | |1|2|3|4|!`\u0301=|գ|€e| 你カ|，\n| (|x|)×| \r\n",
    "tekken": "I|'Sx| | a|Bc|'ll| | |1|2|3|4|!`\u0301=|գ|€e| 你カ|，\n| (|x|)×| \r\n",
    "gpt-4o": "I'S|x| | a|Bc'll| | |123|4|!`\u0301=|գ|€e| 你カ|，\n| (|x|)×| \r\n",
    "bloom": "I'Sx| | aBc'll| | 1234|!|`\u0301=գ€e| 你カ|，\n (|x|)|×| \r\n",
    "viking": "I'Sx| | aBc'll| | |1|2|3|4|!|`\u0301=գ€e| 你カ|，\n (|x|)|×| \r\n",
    "deepseek-llm": "I|'|Sx| | aBc|'|ll|  |1|2|3|4|!`|\u0301|=|գ|€|e| |你カ|，|\n| (|x|)|×| |\r|\n",
    "deepseek-coder": "I|'|Sx| | aBc|'|ll|  |1|2|3|4|!|`\u0301=|գ|€|e| |你カ|，|\n| (|x|)|× |\r|\n",
    "deepseek-v3": "I|'Sx| | aBc|'ll|  |123|4|!`|\u0301|=|գ|€|e| |你カ|，\n| (|x|)×| \r\n",
}


def cutter(name: str) -> pre_tokenizers.PreTokenizer:
    patterns = PRE_TOKENIZERS[name].patterns
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    )


@pytest.mark.parametrize("name", CUTS)
def test_each_pre_tokenizer_splits_a_hard_text_as_its_models_do(name):
    assert "|".join(piece for piece, _ in cutter(name).pre_tokenize_str(TEXT)) == CUTS[name]


def test_hard_text_covers_and_distinguishes_every_pre_tokenizer():
    rules = {rule.patterns for rule in PRE_TOKENIZERS.values()}
    assert {PRE_TOKENIZERS[name].patterns for name in CUTS} == rules
    assert len(set(CUTS.values())) == len(rules)


def test_whole_word_and_bos_families_equal_llama_cpp():
    llama3 = {"llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral"}
    bos = {name for name, rule in PRE_TOKENIZERS.items() if rule.adds_bos}
    assert bos == llama3 | {"midm-2.0", "lfm2", "tekken"}
    whole = {name for name, rule in PRE_TOKENIZERS.items() if rule.whole_words}
    assert whole == bos | {"glm4", "glm5", "minicpm5"}


def isolated(pattern: "regex.Pattern[str]", text: str) -> Iterator[str]:
    """The matches of a pattern and the text between the matches."""
    end = 0
    for match in pattern.finditer(text):
        yield from (part for part in (text[end : match.start()], match.group()) if part)
        end = match.end()
    if text[end:]:
        yield text[end:]


@pytest.mark.slow
@pytest.mark.parametrize("name", CUTS)
def test_patterns_split_equally_in_another_regex_engine(name):
    patterns = [regex.compile(text, regex.VERSION1) for text in PRE_TOKENIZERS[name].patterns]
    cut = cutter(name)
    for text in random_texts(2000, seed=1):
        pieces = [text]
        for pattern in patterns:
            pieces = [part for piece in pieces for part in isolated(pattern, piece)]
        assert [piece for piece, _ in cut.pre_tokenize_str(text)] == pieces


def test_tekken_pattern_splits_as_the_pattern_in_mistrals_file():
    oracle = regex.compile(json.loads(TEKKEN.read_text())["config"]["pattern"])
    cut = cutter("tekken")
    for text in random_texts(2000, seed=1):
        pieces = [match.group() for match in oracle.finditer(text)]
        assert [piece for piece, _ in cut.pre_tokenize_str(text)] == pieces


@pytest.mark.slow
def test_deepseek_letter_class_has_the_count_and_edges_of_its_list():
    """DeepSeek's list has 2,729 characters in 95 ranges; the sets below are at edges of ranges."""
    letters = Regex(PRE_TOKENIZERS["deepseek-llm"].patterns[1].removeprefix(r"\s?"))
    every = "".join(chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000)
    split = pre_tokenizers.Split(letters, "removed", invert=True)
    chosen = "".join(piece for piece, _ in split.pre_tokenize_str(every))
    assert len(chosen) == 2729
    assert set("\u00b5\u0531\u10a0\u13a0\u1c90\u2c7e\ua78e\uab70\ufb00\U00010400") <= set(chosen)
    assert not set("\u00aa\u0561\u10d0\u1c80\u2d00\ua790\uab30\U0001d400") & set(chosen)


def test_llama3_gguf_file_equals_metas_tokenizer(tmp_path):
    """Merges are rebuilt as in converters: the two tokens of lower rank that form a token."""
    meta = real_tokenizer(LLAMA3)
    spell = bytes_to_unicode()
    ranks = {meta.vocabulary.piece(id): id for id in range(12_000)}
    tokens = ["".join(spell[byte] for byte in token) for token in ranks]
    merges = []
    for token, rank in ranks.items():
        parts = [bytes([byte]) for byte in token]
        while len(parts) > 2:
            joined = [ranks.get(a + b, rank) for a, b in pairwise(parts)]
            best = min(range(len(joined)), key=joined.__getitem__)
            if joined[best] >= rank:
                break
            parts[best : best + 2] = [parts[best] + parts[best + 1]]
        if len(parts) == 2:
            left, right = ("".join(spell[byte] for byte in part) for part in parts)
            merges.append(f"{left} {right}")
    path = gguf_file(
        tmp_path / "a.gguf", model="gpt2", pre="llama-bpe", tokens=tokens, merges=merges,
        add_bos_token=False,
    )  # fmt: skip
    ours = load_tokenizer(path)
    n_compared = 0
    for text in random_texts(3000):
        ids = meta.encode(text, bos=False)
        if all(id < len(tokens) for id in ids):
            n_compared += 1
            assert ours.encode(text) == ids
    assert n_compared > 300


def test_file_without_a_tokenizer_is_refused(tmp_path):
    with pytest.raises(UsageError, match="contains no tokenizer"):
        load_tokenizer(gguf_file(tmp_path / "a.gguf"))


def test_empty_tokens_are_accepted_and_decode_to_nothing(tmp_path):
    """Regression: two empty tokens were refused as one token that appears twice."""
    tokens = ["", "", *ALPHABET, "he"]
    types = [1] * len(tokens)
    path = small_bpe(tmp_path / "a.gguf", tokens=tokens, token_type=types, merges=["h e"])
    ours = load_tokenizer(path)
    assert ours.encode("he", bos=False) == [len(tokens) - 1]
    assert ours.decode([0, 1, len(tokens) - 1]) == "he"


def test_empty_sentencepiece_tokens_are_unused_and_decode_to_nothing(tmp_path):
    """Regression: SentencePiece refuses a piece without text, and two equal pieces."""
    fields = spm_fields(MISTRAL_V1, 1000)
    full = load_tokenizer(gguf_file(tmp_path / "full.gguf", **fields))
    fields["tokens"][-2:] = ["", ""]
    path = gguf_file(tmp_path / "a.gguf", **fields)
    ours = load_tokenizer(path)
    assert ours.vocab_size == 1000
    assert ours.encode("hi [EMPTY_998]") == full.encode("hi [EMPTY_998]")
    assert ours.decode([998, *ours.encode("hi"), 999]) == "hi"
    for name, data in export_gguf_tokenizer(path).items():
        (tmp_path / name).write_bytes(data)
    assert load_tokenizer(tmp_path).encode("hi [EMPTY_998]") == ours.encode("hi [EMPTY_998]")


def test_unsigned_minus_one_as_a_special_id_means_none(tmp_path):
    """Regression: llama2.c's files, with padding_token_id=4294967295, could not be exported."""
    names = ("bos", "eos", "eot", "unknown", "padding")
    none = {f"{name}_token_id": 2**32 - 1 for name in names}
    bpe = small_bpe(tmp_path / "bpe.gguf", **none)
    spm = gguf_file(tmp_path / "spm.gguf", **{**spm_fields(MISTRAL_V1, 1000), **none})
    for path, expected in ((bpe, (None, set())), (spm, (1, {2}))):
        tokenizer = load_tokenizer(path)
        assert (tokenizer.bos_id, tokenizer.eos_ids) == expected
        assert "pad_token" not in json.loads(export_gguf_tokenizer(path)["tokenizer_config.json"])


def test_unknown_model_or_pre_is_refused_by_name(tmp_path):
    with pytest.raises(UsageError, match=r"'bert'.*gpt2 and llama"):
        load_tokenizer(small_bpe(tmp_path / "a.gguf", model="bert"))
    with pytest.raises(UsageError, match=r"'x{80}' tokenizer"):
        load_tokenizer(small_bpe(tmp_path / "d.gguf", model="x" * 9999))
    with pytest.raises(UsageError, match=r"pre='viken' is .* did you mean 'viking'\?$"):
        load_tokenizer(small_bpe(tmp_path / "b.gguf", pre="viken"))
    with pytest.raises(UsageError, match=r"pre='\u00d8{80}' is .* how text is split$"):
        load_tokenizer(small_bpe(tmp_path / "c.gguf", pre="\u00d8" * 9999))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tokens": None}, "there are 0 tokens"),
        ({"tokens": ["a", "a"], "token_type": None}, "1 tokens appear more than once"),
        ({"tokens": [1, 2, 3]}, "tokens has items that are not of type str"),
        ({"token_type": [1, 1]}, "token_type has 2 items"),
        ({"token_type": [9] * 263}, "token 0 has type 9"),
        ({"merges": None}, "there are no merges"),
        ({"merges": ["ab"]}, "merge 0 is 'ab'"),
        ({"merges": ["x zz"]}, "tokenizers"),
        ({"bos_token_id": 5000}, "bos_token_id is 5000"),
        ({"add_bos_token": "yes"}, "add_bos_token is a str"),
        ({"model": "llama"}, "scores has 0 items"),
    ],
)
def test_damaged_fields_are_refused_with_file_and_reason(tmp_path, changes, reason):
    path = small_bpe(tmp_path / "a.gguf", **changes)
    with pytest.raises(CheckpointError, match=reason) as caught:
        load_tokenizer(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("limit", "reason"),
    [("MAX_MERGES", "there are 4 merges, more than 3"), ("MAX_ADDED", "2 tokens are special or")],
)
def test_too_many_merges_or_added_tokens_are_refused(tmp_path, monkeypatch, limit, reason):
    """Regression: a million added tokens took 20 s, and eight million merges took 2.3 GB."""
    path = small_bpe(tmp_path / "a.gguf")
    for at_most, is_refused in ((4, False), (3 if limit == "MAX_MERGES" else 1, True)):
        monkeypatch.setattr(f"parallel_llama.tokenizer.gguf.{limit}", at_most)
        with pytest.raises(CheckpointError, match=reason) if is_refused else nullcontext():
            load_tokenizer(path)


def test_an_incomplete_set_of_byte_tokens_is_refused(tmp_path):
    fields = spm_fields(MISTRAL_V1, 1000)
    fields["token_type"][3] = 1
    with pytest.raises(CheckpointError, match="not a usable SentencePiece model"):
        load_tokenizer(gguf_file(tmp_path / "a.gguf", **fields))
