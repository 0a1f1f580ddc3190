"""Mistral's tokenizer files, compared with mistral-common."""

import random
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from mistral_oracle import decoded, encoded, mistral_tokenizer, taken_of
from tekken_files import specials, tekken_file, write_tekken
from tokenizer_data import MISTRAL_FILES, TEKKEN, real_tokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter

from parallel_llama.config.generation import GenerationDefaults
from parallel_llama.errors import CheckpointError, UsageError
from parallel_llama.tokenizer import StreamDecoder, load_tokenizer
from parallel_llama.tokenizer.gguf_fields import tokenizer_fields
from parallel_llama.tokenizer.tiktoken_ranks import MAX_SPACES, parse_tekken

N_TEXTS = 3_000

WORDS = (
    "the", "of", "Hello", "WORLD", "naïve", "façade", "Straße", "iPhone", "don't", "I'LL", "e.g.",
    "https://a.b/c?d=e&f=%20", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "<unk>", "<pad>",
    "<SPECIAL_20>", "[control_8]", "<0x0A>", "\u2581", "\u2581\u2581",
)  # fmt: skip
CODE = (
    "def f(x):\n    return x ** 2\n", "for (int i = 0; i < n; ++i) {\n\t\ta[i] += 1;\n}\n",
    "SELECT * FROM t WHERE id = 'x';", '<div class="a">&nbsp;</div>', "x=>{y??=z}",
    "#include <a.h>\r\n",
)  # fmt: skip
RANGES = {
    "cjk": (0x4E00, 0x9FFF), "kana": (0x3040, 0x30FF), "hangul": (0xAC00, 0xD7A3),
    "arabic": (0x0620, 0x06D3), "devanagari": (0x0900, 0x097F), "emoji": (0x1F300, 0x1FAFF),
    "marks": (0x0300, 0x036F), "control": (0x0000, 0x001F), "more control": (0x007F, 0x009F),
    "format": (0x200B, 0x206F), "tags": (0xE0000, 0xE007F), "private": (0xE000, 0xE0FF),
    "mathematical": (0x1D400, 0x1D7FF), "latin": (0x00A0, 0x024F),
}  # fmt: skip


def texts(seed: int = 0, n_texts: int = N_TEXTS) -> Iterator[str]:
    """Texts of up to five parts, each of a random kind."""
    draw = random.Random(seed)

    def characters(first: int, last: int) -> str:
        return "".join(chr(draw.randint(first, last)) for _ in range(draw.randint(1, 12)))

    kinds: list[Callable[[], str]] = [
        lambda: " ".join(draw.choices(WORDS, k=draw.randint(1, 8))),
        lambda: draw.choice(CODE),
        lambda: str(draw.randint(-(10**12), 10**18)),
        lambda: repr(draw.uniform(-1e6, 1e6)),
        lambda: " " * draw.choice((1, 2, 3, 17, 120, 600)),
        lambda: (
            draw.choice(("\n", "\r\n", "\t", "\n\n", " \n", "\u00a0", "\u3000"))
            * draw.randint(1, 9)
        ),
        lambda: draw.randbytes(draw.randint(1, 24)).decode("utf-8", "replace"),
        lambda: "".join(draw.choices("aAbB1 .,'-_/\\", k=draw.randint(1, 30))),
        *(lambda bounds=bounds: characters(*bounds) for bounds in RANGES.values()),
    ]
    for _ in range(n_texts):
        yield "".join(draw.choice(kinds)() for _ in range(draw.randint(0, 5)))


# Text and tokens.


@pytest.mark.slow
@pytest.mark.parametrize("path", MISTRAL_FILES, ids=lambda path: path.name)
def test_ids_and_texts_equal_mistral_common(path):
    ours = real_tokenizer(path)
    oracle = mistral_tokenizer(path).instruct_tokenizer.tokenizer
    assert (ours.vocab_size, ours.bos_id, ours.eos_ids) == (
        oracle.n_words, oracle.bos_id, {oracle.eos_id},
    )  # fmt: skip
    for text in texts():
        ids = ours.encode(text, special=False)
        assert ids == [oracle.bos_id, *encoded(path, text)]
        assert ours.decode(ids) == decoded(path, ids)


@pytest.mark.parametrize("path", MISTRAL_FILES, ids=lambda path: path.name)
def test_special_tokens_equal_mistral_common(path):
    tokenizer = real_tokenizer(path)
    oracle = mistral_tokenizer(path).instruct_tokenizer.tokenizer
    assert set(tokenizer.vocabulary.special_ids.values()) == oracle.special_ids
    for text, id in tokenizer.vocabulary.special_ids.items():
        assert id == oracle.get_special_token(text)
        assert tokenizer.encode(text, bos=False) == [id]
        assert id not in tokenizer.encode(text, bos=False, special=False)
        assert tokenizer.decode([id]) == ""


@pytest.mark.parametrize("path", MISTRAL_FILES, ids=lambda path: path.name)
def test_stream_emits_whole_characters_and_the_complete_text(path):
    tokenizer = real_tokenizer(path)
    for text in texts(seed=1, n_texts=1000):
        ids = tokenizer.encode(text, special=False)
        stream = StreamDecoder(tokenizer)
        pieces = [stream.push(id) for id in ids]
        assert "".join(pieces) + stream.flush() == tokenizer.decode(ids)
        assert sum(piece.count("\ufffd") for piece in pieces) <= text.count("\ufffd")


@pytest.mark.parametrize("version", [3, 7, 11, 13])
def test_tekken_vocabulary_is_cut_to_default_vocab_size(tmp_path, version):
    path = write_tekken(tmp_path, version)
    ours = load_tokenizer(tmp_path)
    oracle = mistral_tokenizer(path).instruct_tokenizer.tokenizer
    assert ours.vocab_size == oracle.n_words == 2000
    assert ours.vocabulary.special_ids == {
        text: oracle.get_special_token(text) for text in ours.vocabulary.special_ids
    }
    assert [ours.decode([id]) for id in range(2000)] == [
        oracle.decode([id]) for id in range(2000)
    ]  # fmt: skip
    for text in texts(seed=2, n_texts=300):
        assert ours.encode(text, special=False) == oracle.encode(text, bos=True, eos=False)


def test_runs_of_a_million_spaces_are_encoded():
    """The library panics if the run is not split."""
    ours = real_tokenizer(TEKKEN)
    text = "a" + " " * (MAX_SPACES - 1) + "b" + "\n" * (MAX_SPACES // 2)
    assert ours.encode(text, bos=False) == encoded(TEKKEN, text)
    long = "a" + " " * 1_200_000 + "\u3000b"
    assert ours.decode(ours.encode(long)) == long


@pytest.mark.parametrize(
    ("names", "taken"),
    [
        (["tokenizer.model", "tokenizer.model.v1", "tokenizer.model.v2"], "tokenizer.model.v2"),
        (["tokenizer.model.v2", "tokenizer.model.v3"], "tokenizer.model.v3"),
        (["tokenizer.model.v7", "tokenizer.model.v7m1"], "tokenizer.model.v7m1"),
        (["tokenizer.model.v7m1", "tekken.json"], "tekken.json"),
    ],
)  # fmt: skip
def test_newest_tokenizer_file_is_used_as_in_mistral_common(tmp_path, names, taken):
    assert taken_of(names) == taken
    for name in names:
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(CheckpointError, match=f"/{taken}: the file is empty"):
        load_tokenizer(tmp_path)


def test_tekken_file_named_tokenizer_json_is_recognised(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.symlink_to(TEKKEN)
    assert load_tokenizer(tmp_path).encode("Hello [INST]") == real_tokenizer(TEKKEN).encode(
        "Hello [INST]"
    )


@pytest.mark.slow
def test_llama3_split_of_a_wrong_conversion_is_corrected_from_tekken(tmp_path, caplog):
    """Regression: words after an apostrophe and some others got other tokens.

    The default pattern of the converter in transformers is Llama 3's.
    """
    tokens, specials, _ = parse_tekken(TEKKEN.read_bytes(), "a file")
    converter = TikTokenConverter()
    converter.load_tiktoken_bpe = lambda _: {token: rank for rank, token in enumerate(tokens)}
    converter.converted().save(str(tmp_path / "tokenizer.json"))
    text = "x'several"
    wrong = load_tokenizer(tmp_path).encode(text, bos=False)
    assert not caplog.records
    (tmp_path / "tekken.json").symlink_to(TEKKEN)
    ours = load_tokenizer(tmp_path)
    assert [record.message for record in caplog.records] == [
        f"{tmp_path / 'tokenizer.json'}: splits text by Llama 3's pattern, as a wrong conversion "
        "writes; Mistral's pattern in the tekken.json beside it is used instead"
    ]
    assert wrong != ours.encode(text, bos=False)
    for each in [text, *texts(seed=3, n_texts=300)]:
        ranks = ours.encode(each, bos=False, special=False)
        assert [len(specials) + rank for rank in ranks] == encoded(TEKKEN, each)
    fields = tokenizer_fields(tmp_path, ours.vocab_size, GenerationDefaults())
    assert fields["tokenizer.ggml.pre"] == "tekken"


# Damaged and hostile files.

VOCAB = [{"rank": 0, "token_bytes": "AA==", "token_str": None}]


def last_token(**changes: Any) -> dict[str, Any]:
    """A change that damages the last token that is read."""
    vocab = list(tekken_file()["vocab"][:1050])
    vocab[999] = {**vocab[999], **changes}
    return {"vocab": vocab}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"config": {"pattern": "(a+)+$"}}, r"its pattern is '\(a\+\)\+\$', not Mistral's"),
        ({"config": {"pattern": None}}, "pattern is None, not of type str"),
        ({"config": {"version": "v"}}, "version is 'v', not of the form v1"),
        ({"config": {"default_vocab_size": 2**62}}, "1000 of 4611686018427387904 tokens"),
        ({"config": {"default_vocab_size": 1255}}, "1000 of 1255 tokens are special"),
        ({"config": {"default_num_special_tokens": 2**20}}, "1048576 of 2000 tokens are special"),
        ({"config": {"default_num_special_tokens": 1}}, "there must be 1 distinct special tokens"),
        ({"vocab": VOCAB[0]}, "vocab is {.*, not of type list"),
        ({"vocab": VOCAB}, "there are 1 tokens, fewer than 1000"),
        ({"vocab": VOCAB * 1000}, "token 1 is {'rank': 0"),
        (last_token(token_bytes="AA="), "token 999 is .* not base64"),
        (last_token(token_bytes="\u00e4"), "token 999 is .* not base64"),
        (last_token(token_bytes=""), "token 999 is"),
        (last_token(token_bytes="QUFB" * 342), "token 999 is"),
        (last_token(token_bytes="AA=="), "the tokens must begin with the 256 bytes"),
        (last_token(token_bytes=7), "token_bytes is 7, not of type str"),
        ({"special_tokens": None, "config": {"version": "v11"}}, "special_tokens is None"),
        (specials(), None),
        (specials("<s>"), "there must be 1000 distinct special tokens with <s> and </s>"),
        (specials("<SPECIAL_3>"), "there must be 1000 distinct special tokens"),
        (specials("a", rank=7), "special token 2 is {'rank': 7"),
        (specials("a", token_str=7), "token_str is 7"),
        (specials(""), "special token 2 is"),
        (specials("a\ud800"), "special token 2 is"),
        (specials("a" * 2000), "special token 2 is"),
        ({"special_tokens": [{"rank": 0, "token_str": "<s>"}]}, "special tokens with <s> and </s>"),
        ({"special_tokens": ["<s>"]}, "token_str is None"),
    ],
)  # fmt: skip
def test_a_damaged_tekken_file_is_named_with_the_reason(tmp_path, changes, reason):
    write_tekken(tmp_path, 7, **changes)
    if reason is None:
        assert load_tokenizer(tmp_path).vocab_size == 2000
        return
    with pytest.raises((CheckpointError, UsageError), match=f"tekken.json: .*{reason}"):
        load_tokenizer(tmp_path)


def test_tekken_file_of_many_small_values_is_refused_before_parsing(tmp_path):
    """A file of 64 MB of empty objects would take gigabytes once parsed."""
    path = tmp_path / "tekken.json"
    path.write_text('{"token_bytes": "", "vocab": [' + "{}," * 4_000_000 + "{}]}")
    tracemalloc.start()
    with pytest.raises(
        CheckpointError, match="has about 8000004 values, over the limit of 1048576"
    ):
        load_tokenizer(tmp_path)
    assert tracemalloc.get_traced_memory()[1] < 128 << 20
    tracemalloc.stop()
