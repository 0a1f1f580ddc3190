"""Tokenizers against the libraries that their models were trained with."""

import base64
import json
import os
import random
import re
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from llama_models.llama3.tokenizer import Tokenizer as MetaTokenizer
from sentencepiece import SentencePieceProcessor
from tokenizer_data import (
    LLAMA3,
    MISTRAL_V1,
    MISTRAL_V3,
    REAL_FILES,
    SMOLLM2,
    byte_level_tokenizer,
    random_ids,
    random_texts,
    real_tokenizer,
    real_tokenizer_files,
    sentencepiece_model,
)
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from parallel_llama.errors import CheckpointError, UsageError
from parallel_llama.tokenizer import load_tokenizer
from parallel_llama.tokenizer import tokenizer as tokenizer_module
from parallel_llama.tokenizer.tiktoken_ranks import MAX_RUN
from parallel_llama.tokenizer.tokenizer import SpecialTokens
from parallel_llama.tokenizer.tokenizer_json import BuiltEncoder


@pytest.fixture(scope="module")
def meta() -> MetaTokenizer:
    return MetaTokenizer(LLAMA3)


def test_llama3_equals_metas_tokenizer_on_random_text(meta):
    ours = real_tokenizer(LLAMA3)
    for text in random_texts(4000):
        ids = ours.encode(text)
        assert ids == meta.encode(text, bos=True, eos=False, allowed_special="all")
        assert ours.decode(ids) == text


def test_llama3_special_tokens_are_metas(meta):
    ours = real_tokenizer(LLAMA3)
    assert ours.vocabulary.special_ids == meta.special_tokens
    assert (ours.vocab_size, ours.bos_id) == (meta.n_words, meta.bos_id)
    assert ours.eos_ids == frozenset(meta.stop_tokens)


def test_llama3_long_runs_are_cut_where_meta_cuts_them(meta):
    """Without the cut, the time grows with the square of the length of a run of spaces."""
    ours = real_tokenizer(LLAMA3)
    for text in (
        "a" * (2 * MAX_RUN + 7) + " " * (MAX_RUN + 3) + "b",
        "ab " * 5 + "\n" * MAX_RUN + "x" * MAX_RUN + "y",
        ("word " * 6 + "\t") * 13_000,
    ):
        assert ours.encode(text, bos=False) == meta.encode(text, bos=False, eos=False)


@pytest.mark.parametrize("path", [MISTRAL_V1, MISTRAL_V3], ids=lambda path: path.name)
def test_sentencepiece_models_equal_sentencepiece(path):
    ours, oracle = real_tokenizer(path), SentencePieceProcessor(str(path))
    for text in random_texts(2000):
        assert ours.encode(text, bos=False, special=False) == oracle.EncodeAsIds(text)
        assert ours.encode(text, special=False) == [oracle.bos_id(), *oracle.EncodeAsIds(text)]
    for ids in random_ids(ours.vocab_size, 2000):
        text = oracle.DecodeIds(ids)
        if "\ufffd" not in text:  # SentencePiece replaces each broken byte, unlike `decode`
            assert ours.decode(ids) == text
    assert ours.bos_id == oracle.bos_id()
    assert ours.eos_ids == {oracle.eos_id()}
    assert ours.vocab_size == oracle.GetPieceSize()


@pytest.mark.parametrize("path", REAL_FILES, ids=lambda path: path.name)
def test_special_token_text_is_parsed_unless_special_is_false(path):
    tokenizer = real_tokenizer(path)
    for text, id in list(tokenizer.vocabulary.special_ids.items())[:20]:
        assert id in tokenizer.encode(f"a{text}b")
        plain = tokenizer.encode(f"a{text}b", bos=False, special=False)
        assert not set(plain) & set(tokenizer.vocabulary.special_ids.values())
        assert tokenizer.decode(plain) == f"a{text}b"
        assert tokenizer.decode([id]) == ""
        assert tokenizer.decode([id], skip_special=False) == text


def test_sentencepiece_encodes_text_between_special_tokens_separately():
    tokenizer, oracle = real_tokenizer(MISTRAL_V1), SentencePieceProcessor(str(MISTRAL_V1))
    assert tokenizer.encode("<s>one</s>two", bos=False) == [
        1, *oracle.EncodeAsIds("one"), 2, *oracle.EncodeAsIds("two"),
    ]  # fmt: skip


def test_space_after_a_special_token_is_not_doubled_by_sentencepiece():
    tokenizer, oracle = real_tokenizer(MISTRAL_V1), SentencePieceProcessor(str(MISTRAL_V1))
    space = oracle.PieceToId("\u2581")
    assert tokenizer.encode("</s> two", bos=False) == [2, *oracle.EncodeAsIds("two")]
    assert tokenizer.encode("</s>  two", bos=False) == [2, *oracle.EncodeAsIds(" two")]
    assert tokenizer.encode("</s> <s>\n", bos=False) == [2, space, 1, *oracle.EncodeAsIds("\n")]
    assert tokenizer.encode(" one", bos=False) == oracle.EncodeAsIds(" one")


@pytest.mark.parametrize("path", REAL_FILES, ids=lambda path: path.name)
def test_half_a_surrogate_pair_is_refused(path):
    with pytest.raises(UsageError, match=r"character 2 of the text is '\\udce4'"):
        real_tokenizer(path).encode("ab\udce4")


# The kind of a file is detected by its content.


@pytest.mark.parametrize("path", [LLAMA3, MISTRAL_V1, SMOLLM2], ids=lambda path: path.name)
def test_tokenizer_kind_is_detected_by_content_and_not_by_name(tmp_path, path):
    (tmp_path / "tokenizer.model").symlink_to(path)
    found = load_tokenizer(tmp_path)
    assert type(found) is type(real_tokenizer(path))
    assert found.encode("Hello, world 42") == real_tokenizer(path).encode("Hello, world 42")


def test_missing_tokenizer_error_names_the_files_looked_for(tmp_path):
    with pytest.raises(
        UsageError, match=r"looked for tokenizer\.json, tekken\.json, .*, tokenizer\.model\. Copy"
    ):
        load_tokenizer(tmp_path)
    with pytest.raises(UsageError, match="no such file or folder"):
        load_tokenizer(tmp_path / "absent")


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "empty"),
        (b"{", "tokenizers"),
        (b'{"model": {"type": "BPE"}}', "tokenizers"),
        (b"\x0a\xff\xff\xff\xff", "not a SentencePiece model"),
        (b"\x00" * 100, "not a SentencePiece model"),
        (b"AAAA 0\nAAA= 1\n", "has 2 ranks"),
        (b"AAAA 0\nAAA= 7\n", "ranks are not 0 to 1"),
        (b"AAAA 0\nnot base64 1\n", "line 2"),
        (b"GGUF\x03\x00\x00\x00", "left|ends"),
    ],
)
def test_a_damaged_file_is_named_with_the_reason(tmp_path, content, reason):
    path = tmp_path / "tokenizer.model"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=reason) as caught:
        load_tokenizer(tmp_path)
    assert str(path) in str(caught.value)


def test_sentencepiece_model_with_changed_bytes_works_or_is_refused(tmp_path):
    """Regression: protobuf accepts text that is not UTF-8, which failed only after loading."""
    whole = sentencepiece_model(MISTRAL_V1).SerializeToString()
    draw = random.Random(0)
    n_refused = 0
    for _ in range(300):
        mutant = bytearray(whole)
        mutant[draw.randrange(len(mutant))] = draw.randrange(256)
        (tmp_path / "tokenizer.model").write_bytes(mutant)
        try:
            tokenizer = load_tokenizer(tmp_path)
        except CheckpointError:
            n_refused += 1
        else:
            tokenizer.decode(tokenizer.encode("hello <s> w\u00f6rld"))
    assert 100 < n_refused < 300


@pytest.mark.parametrize(
    ("name", "start", "bound"),
    [("tokenizer.json", b"{", 64 << 20), ("tokenizer.model", b"\n", 16 << 20)],
)
def test_file_over_the_size_limit_is_refused(tmp_path, name, start, bound):
    (tmp_path / name).write_bytes(start)
    os.truncate(tmp_path / name, bound + 1)
    with pytest.raises(CheckpointError, match=f"larger than {bound} bytes"):
        load_tokenizer(tmp_path)


def test_tiktoken_file_of_another_model_is_refused():
    """The file of Llama 4 has the same format, but its model splits text by another pattern."""
    with pytest.raises(CheckpointError, match=r"has 200000 ranks, not 128000"):
        load_tokenizer(LLAMA3.parents[1] / "llama4" / "tokenizer.model")


def test_sentencepiece_charsmap_with_a_long_expansion_is_refused(tmp_path):
    """Regression: a rule that writes 1 kB for each letter took gigabytes."""
    charsmap = (4).to_bytes(4, "little") + b"trie" + b"b" * 65 + b"\0"
    proto = sentencepiece_model(MISTRAL_V1, precompiled_charsmap=charsmap)
    (tmp_path / "tokenizer.model").write_bytes(proto.SerializeToString())
    with pytest.raises(CheckpointError, match="normalises a character to more than 64 bytes"):
        load_tokenizer(tmp_path)


def test_a_sentencepiece_model_with_long_pieces_is_refused(tmp_path):
    """At each position, a unigram model tries all lengths up to that of its longest piece."""
    proto = sentencepiece_model(MISTRAL_V1)
    proto.pieces[300].piece = "a" * 1025
    (tmp_path / "tokenizer.model").write_bytes(proto.SerializeToString())
    with pytest.raises(CheckpointError, match="piece 300 has more than 1024 bytes"):
        load_tokenizer(tmp_path)


def test_tiktoken_file_without_a_token_for_a_byte_is_refused(tmp_path):
    """Regression: the first text with that byte made tiktoken panic, which no handler caught."""
    lines = LLAMA3.read_bytes().splitlines()
    (at,) = (n for n, line in enumerate(lines) if line.split()[0] == base64.b64encode(b"~"))
    lines[at] = base64.b64encode(b"~ and more") + b" " + lines[at].split()[1]
    (tmp_path / "tokenizer.model").write_bytes(b"\n".join(lines))
    with pytest.raises(CheckpointError, match="no token for the single byte 0x7e"):
        load_tokenizer(tmp_path)


# HF folders.


def with_template(single: str) -> Tokenizer:
    tokenizer = byte_level_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single,
        special_tokens=[(text, tokenizer.token_to_id(text)) for text in ("<s>", "</s>")],
    )
    return tokenizer


def hf_folder(folder: Path, tokenizer: Tokenizer, **config: Any) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def test_byte_level_json_equals_tokenizers(tmp_path):
    oracle = byte_level_tokenizer()
    ours = load_tokenizer(hf_folder(tmp_path, oracle))
    for text in random_texts(500):
        ids = oracle.encode(text).ids
        assert ours.encode(text) == ids
        assert ours.decode(ids) == oracle.decode(ids)
    for ids in random_ids(ours.vocab_size, 500):
        assert ours.decode(ids) == oracle.decode(ids)
        everything = oracle.decode(ids, skip_special_tokens=False)
        assert ours.decode(ids, skip_special=False) == everything


def test_added_tokens_of_byte_level_files_decode_to_their_text(tmp_path):
    """As a byte-level character, the e with its accent is one byte that is not valid UTF-8."""
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens(["caf\u00e9"])
    ours = load_tokenizer(hf_folder(tmp_path, tokenizer))
    assert ours.decode(ours.encode("a caf\u00e9")) == "a caf\u00e9"


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.Sequence(
            [
                decoders.Replace("\u2581", " "),
                decoders.ByteFallback(),
                decoders.Fuse(),
                decoders.Strip(" ", 1, 0),
            ]
        ),
        decoders.Metaspace(),
    ],
    ids=["sequence", "metaspace"],
)
def test_sentencepiece_like_json_decodes_as_tokenizers(tmp_path, decoder):
    words = ["<unk>", "<s>", "\u2581he", "llo", "\u2581", "a", "ä", "<0xF0>", "b\u2581c"]
    vocab = [(word, -float(index)) for index, word in enumerate(words)]
    oracle = Tokenizer(models.Unigram(vocab, unk_id=0, byte_fallback=False))
    oracle.decoder = decoder
    oracle.add_special_tokens(["<s>"])
    ours = load_tokenizer(hf_folder(tmp_path, oracle))
    for ids in random_ids(len(words), 500):
        expected = oracle.decode(ids)
        if "\ufffd" not in expected:
            assert ours.decode(ids) == expected


@pytest.mark.parametrize(
    ("single", "config", "prefix"),
    [
        ("$A", {}, []),
        ("<s> $A", {}, ["<s>"]),
        ("<s> $A </s>", {}, ["<s>"]),
        ("<s> $A", {"add_bos_token": False, "bos_token": "<s>"}, []),
        ("$A", {"add_bos_token": True, "bos_token": {"content": "<s>"}}, ["<s>"]),
        ("$A", {"add_bos_token": True}, []),
        ("$A", {"bos_token": "<s>"}, []),
    ],
)
def test_bos_follows_the_post_processor_and_add_bos_token(tmp_path, single, config, prefix):
    tokenizer = with_template(single)
    ours = load_tokenizer(hf_folder(tmp_path, tokenizer, **config))
    plain = tokenizer.encode("hello", add_special_tokens=False).ids
    assert ours.encode("hello") == [*map(tokenizer.token_to_id, prefix), *plain]
    assert ours.encode("hello", bos=False) == plain


def test_config_names_bos_and_eos(tmp_path):
    tokenizer = byte_level_tokenizer()
    hf_folder(tmp_path, tokenizer, eos_token={"content": "<|im_end|>", "lstrip": False})
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')
    ours = load_tokenizer(tmp_path)
    assert ours.bos_id == tokenizer.token_to_id("<s>")
    assert ours.eos_ids == {tokenizer.token_to_id("<|im_end|>")}


def test_truncation_and_padding_of_the_file_are_not_used(tmp_path):
    tokenizer = byte_level_tokenizer()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    ours = load_tokenizer(hf_folder(tmp_path, tokenizer))
    assert len(ours.encode("xyzxyzxyz")) == 9


def test_tokenizer_json_wins_over_tokenizer_model(tmp_path):
    hf_folder(tmp_path, byte_level_tokenizer())
    shutil.copy(MISTRAL_V1, tmp_path / "tokenizer.model")
    assert load_tokenizer(tmp_path).vocab_size == byte_level_tokenizer().get_vocab_size()


def test_unknown_decoder_error_lists_supported_decoders(tmp_path):
    tokenizer = byte_level_tokenizer()
    tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(CheckpointError, match=r"WordPiece.*supported are ByteLevel"):
        load_tokenizer(hf_folder(tmp_path, tokenizer))


@pytest.mark.parametrize(
    "config",
    [
        "[]",
        "{",
        '{"add_bos_token": "yes"}',
        '{"added_tokens_decoder": {"x": 1}}',
        '{"added_tokens_decoder": {"%s": {"content": "x"}}}' % ("9" * 5000),
    ],
)
def test_a_damaged_config_is_named(tmp_path, config):
    hf_folder(tmp_path, byte_level_tokenizer())
    (tmp_path / "tokenizer_config.json").write_text(config)
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json"):
        load_tokenizer(tmp_path)


def test_added_tokens_extend_a_sentencepiece_model(tmp_path):
    (tmp_path / "tokenizer.model").symlink_to(MISTRAL_V1)
    (tmp_path / "added_tokens.json").write_text('{"<|im_start|>": 32000}')
    added = {"32001": {"content": "<tool>", "special": False}}
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"added_tokens_decoder": added, "add_bos_token": False})
    )
    ours = load_tokenizer(tmp_path)
    ids = ours.encode("<|im_start|>hi<tool>")
    assert ids == [32000, *ours.encode("hi"), 32001]
    assert ours.vocab_size == 32002
    assert ours.decode(ids) == "hi<tool>"
    assert ours.decode(ids, skip_special=False) == "<|im_start|> hi<tool>"


@pytest.mark.parametrize("id", [4000000000, -1])
def test_added_token_id_out_of_range_is_refused(tmp_path, id):
    (tmp_path / "tokenizer.model").symlink_to(MISTRAL_V1)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<x>": id}))
    with pytest.raises(CheckpointError, match=f"id {id}, beyond the model's 32000"):
        load_tokenizer(tmp_path)


def test_added_token_may_be_a_plain_string(tmp_path):
    (tmp_path / "tokenizer.model").symlink_to(MISTRAL_V1)
    config = {"added_tokens_decoder": {"32000": "<tool>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = load_tokenizer(tmp_path)
    assert ours.decode(ours.encode("a<tool>")) == "a<tool>"


def test_tiktoken_lines_may_be_in_any_order(tmp_path):
    lines = LLAMA3.read_bytes().splitlines()
    random.Random(0).shuffle(lines)
    path = tmp_path / "tokenizer.model"
    path.write_bytes(b"\n".join(lines) + b"\n\n")
    assert load_tokenizer(path).encode("any order") == real_tokenizer(LLAMA3).encode("any order")


def test_llama3_pieces_equal_tiktoken():
    ours = real_tokenizer(LLAMA3)
    ranks = {
        base64.b64decode(line.split()[0]): int(line.split()[1])
        for line in LLAMA3.read_bytes().splitlines()
    }
    encoding = tiktoken.Encoding("t", pat_str=r"\S+", mergeable_ranks=ranks, special_tokens={})
    for id in range(0, 128_000, 97):
        assert ours.vocabulary.piece(id) == encoding.decode_single_token_bytes(id)


def test_longest_special_token_at_a_position_wins():
    tokens = SpecialTokens({"<a": 1, "<a>": 2, "": 3})
    assert list(tokens.split("x<a><ay")) == ["x", 2, 1, "y"]
    assert list(SpecialTokens({}).split("x")) == ["x"]


@settings(max_examples=500)
@given(
    st.sets(st.text("<ab|>", min_size=1, max_size=6), min_size=1, max_size=12),
    st.integers(0, 4),
    st.data(),
)
def test_special_tokens_are_split_as_by_an_alternation_of_all_texts(texts, nesting, data):
    ids = {text: id for id, text in enumerate(sorted(texts))}
    pieces = data.draw(st.lists(st.sampled_from([*ids, "<", "a", "x"]), max_size=12))
    pattern = "|".join(map(re.escape, sorted(ids, key=len, reverse=True)))
    expected = [ids.get(part, part) for part in re.split(f"({pattern})", "".join(pieces)) if part]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer_module, "MAX_NESTING", nesting)
        assert list(SpecialTokens(ids).split("".join(pieces))) == expected


def test_many_special_tokens_may_be_prefixes_of_each_other():
    """Regression: nested groups exceeded the recursion limit of `re`."""
    tokens = SpecialTokens({"a" * n: n for n in range(1, 500)})
    assert list(tokens.split("a" * 700 + "b")) == [499, 201, "b"]


def test_cost_of_splitting_does_not_grow_with_the_number_of_special_tokens():
    """Regression: 1 MB of this text held the GIL for seconds with 1,000 special tokens."""

    def cost_s(n: int) -> float:
        tokens, costs_s = SpecialTokens({f"<SPECIAL_{id}>": id for id in range(n)}), []
        for _ in range(4):
            began_s = time.thread_time()
            list(tokens.split("<SPECIAL_" * 20_000))
            costs_s.append(time.thread_time() - began_s)
        return min(costs_s)

    assert cost_s(1000) < 20 * cost_s(10)


# Hostile files.


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["byte-level", "byte-level with whole words", "sentencepiece"])
def test_sandboxed_tokenizer_equals_tokenizers_on_real_files(tmp_path, kind):
    file = real_tokenizer_files()[kind]
    (tmp_path / "tokenizer.json").write_bytes(file)
    ours, oracle, plain = load_tokenizer(tmp_path), *(Tokenizer.from_buffer(file) for _ in "ab")
    plain.encode_special_tokens = True
    specials = list(ours.vocabulary.special_ids)[:3]
    for text in [*random_texts(1000), " ".join(specials), "".join(f"a{s}b" for s in specials)]:
        assert ours.encode(text, bos=False) == oracle.encode(text, add_special_tokens=False).ids
        expected = plain.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, bos=False, special=False) == expected
        assert ours.encode(text) == oracle.encode(text).ids
    assert ours.vocab_size == oracle.get_vocab_size()


def small_file(folder: Path, **parts: Any) -> Path:
    """A byte-level tokenizer.json with some parts replaced."""
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(byte_level_tokenizer().to_str()), **parts}))
    return path


def replacements(n_steps: int) -> dict[str, Any]:
    """A normalizer of `n_steps` steps that each replace one `a` by ten."""
    step = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}
    return {"type": "Sequence", "normalizers": [step] * n_steps}


def backtracking(pattern: str) -> dict[str, Any]:
    return {
        "type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False
    }  # fmt: skip


CHARSMAP = {
    "type": "Precompiled",
    "precompiled_charsmap": "AA==",
}  # makes `tokenizers` panic


def test_file_that_allocates_gigabytes_is_stopped_during_loading(tmp_path):
    """Regression: this file of 2 kB took 90 s and 9 GB in the process that loads the model."""
    path = small_file(tmp_path, normalizer=replacements(9))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: .* more than \d+ MiB of memory"):
        load_tokenizer(path)


def test_a_text_that_becomes_gigabytes_is_stopped(tmp_path):
    tokenizer = load_tokenizer(small_file(tmp_path, normalizer=replacements(4)))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: .*(memory|CPU time)"):
        tokenizer.encode("a" * 10_000)
    assert len(tokenizer.encode("ab")) == 10_001


@pytest.mark.slow
def test_a_pattern_that_backtracks_is_stopped(tmp_path):
    """Each word takes 0.1 s, so a text of a few megabytes would take hours."""
    tokenizer = load_tokenizer(small_file(tmp_path, pre_tokenizer=backtracking("(a|aa)+$")))
    started = time.monotonic()
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: .* of CPU time"):
        tokenizer.encode(("a" * 28 + "!") * 1000)
    assert time.monotonic() - started < 200
    assert tokenizer.decode(tokenizer.encode("aab")) == "aab"


def test_a_panic_at_loading_is_an_error_that_names_the_file(tmp_path):
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: .*precompiled_charsmap"):
        load_tokenizer(small_file(tmp_path, normalizer=CHARSMAP))


def test_a_panic_at_encoding_is_an_error_that_names_the_file(tmp_path):
    """Regression: the panic is a BaseException, which no handler of Exception caught."""
    tokenizer = load_tokenizer(small_file(tmp_path, pre_tokenizer=backtracking("(a+)+$")))
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: .*retry-limit-in-match"):
        tokenizer.encode("a" * 40 + "!")
    assert tokenizer.decode(tokenizer.encode("aab")) == "aab"


def test_panic_of_an_in_process_tokenizer_names_the_file():
    def build() -> Tokenizer:
        tokenizer = byte_level_tokenizer()
        tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("(a+)+$"), "isolated")
        return tokenizer

    encoder = BuiltEncoder(build, "a.gguf")
    with pytest.raises(CheckpointError, match=r"a\.gguf: .*retry-limit-in-match"):
        encoder.encode("a" * 40 + "!", special=True)


def test_killed_tokenizer_process_restarts_with_the_original_file(tmp_path):
    others = set(psutil.Process().children())
    tokenizer = load_tokenizer(hf_folder(tmp_path, with_template("<s> $A"), bos_token="<s>"))
    before = tokenizer.encode("hello</s>")
    small_file(tmp_path, normalizer=replacements(1))
    (process,) = set(psutil.Process().children()) - others
    process.kill()
    process.wait(60)
    assert tokenizer.encode("hello</s>") == before


@pytest.mark.parametrize(
    ("decoder", "reason"),
    [
        ([{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}], "equal or shorter"),
        ([{"type": "Fuse"}] * 17, "more than 16 steps"),
    ],
)
def test_decoder_that_lengthens_text_or_has_many_steps_is_refused(tmp_path, decoder, reason):
    """Regression: ten steps that each replace one letter by ten took all memory."""
    with pytest.raises(CheckpointError, match=reason):
        load_tokenizer(small_file(tmp_path, decoder={"type": "Sequence", "decoders": decoder}))


def test_tokenizer_with_custom_code_needs_a_tokenizer_json(tmp_path):
    """Code of ChatGLM puts tokens before every text; without these tokens, answers are nonsense."""
    shutil.copy(MISTRAL_V1, tmp_path / "tokenizer.model")
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"tokenizer_class": "ChatGLMTokenizer"}))
    with pytest.raises(UsageError, match=r"ChatGLMTokenizer is code .* give token ids"):
        load_tokenizer(tmp_path)
    byte_level_tokenizer().save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(tmp_path).vocab_size > 0


def test_encoding_a_long_text_does_not_block_other_threads():
    """Regression: `tokenizers` held the GIL for 1.2 s per megabyte, which stalled all streams."""
    tokenizer = real_tokenizer(SMOLLM2)
    tokenizer.encode("a")
    took_s: list[float] = []

    def encode() -> None:
        started = time.monotonic()
        tokenizer.encode("hello world " * 87_000)
        took_s.append(time.monotonic() - started)

    thread = threading.Thread(target=encode)
    thread.start()
    gaps, before = [], time.monotonic()
    while thread.is_alive():
        time.sleep(0.001)
        now = time.monotonic()
        gaps.append(now - before)
        before = now
    assert max(gaps) < took_s[0] / 2
