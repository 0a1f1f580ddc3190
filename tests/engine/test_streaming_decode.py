"""Text of a running completion: the pieces joined are the text of all tokens at once."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizer_data import (
    LLAMA3,
    MISTRAL_V1,
    MISTRAL_V3,
    REAL_FILES,
    SMOLLM2,
    random_ids,
    random_texts,
    real_tokenizer,
)

from parallel_llama.tokenizer import StreamDecoder, Tokenizer

every_real_file = pytest.mark.parametrize("path", REAL_FILES, ids=lambda path: path.name)


def streamed(tokenizer: Tokenizer, ids: list[int], prompt: tuple[int, ...] = ()) -> list[str]:
    decoder = StreamDecoder(tokenizer, prompt)
    pieces = [decoder.push(id) for id in ids]
    return [*pieces, decoder.flush()]


@every_real_file
def test_joined_pieces_equal_the_decoded_text_for_random_ids(path):
    tokenizer = real_tokenizer(path)
    for ids in random_ids(tokenizer.vocab_size, 1500):
        assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)


@every_real_file
def test_joined_pieces_equal_the_decoded_text_for_random_text(path):
    """U+2581 is SentencePiece's own space, so it decodes to a space; SmolLM2 lacks some bytes."""
    tokenizer = real_tokenizer(path)
    for text in random_texts(1000):
        ids = tokenizer.encode(text, bos=False, special=False)
        assert "".join(streamed(tokenizer, ids)) == tokenizer.decode(ids)
        if path in (MISTRAL_V1, MISTRAL_V3):
            assert tokenizer.decode(ids) == text.replace("\u2581", " ")
        elif path == LLAMA3:
            assert tokenizer.decode(ids) == text


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.text(max_size=30))
def test_joined_pieces_equal_any_encoded_text(text):
    tokenizer = real_tokenizer(LLAMA3)
    assert "".join(streamed(tokenizer, tokenizer.encode(text, special=False))) == text


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.binary(max_size=12))
def test_streamed_bytes_decode_as_utf8_with_replacement(data):
    """Each byte is a token of its own, by byte fallback and by byte-level BPE."""
    spm, bpe = real_tokenizer(MISTRAL_V1), real_tokenizer(LLAMA3)
    bytes_of_bpe = {bpe.vocabulary.piece(id): id for id in range(256)}
    for tokenizer, ids in (
        (spm, [3 + byte for byte in data]),
        (bpe, [bytes_of_bpe[bytes([byte])] for byte in data]),
    ):
        joined = "".join(streamed(tokenizer, ids))
        assert joined == tokenizer.decode(ids)
        expected = data.decode("utf-8", "replace")
        assert joined == expected or (tokenizer is spm and joined == expected.removeprefix(" "))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.binary(max_size=12), st.integers(0, 12))
def test_text_after_a_prompt_is_that_after_its_pushed_tokens(data, n_prompt):
    """Only the last bytes of a prompt are decoded."""
    bpe = real_tokenizer(LLAMA3)
    bytes_of_bpe = {bpe.vocabulary.piece(id): id for id in range(256)}
    ids = [bytes_of_bpe[bytes([byte])] for byte in data]
    pieces = streamed(bpe, ids)
    assert streamed(bpe, ids[n_prompt:], tuple(ids[:n_prompt])) == pieces[min(n_prompt, len(ids)) :]


@every_real_file
def test_no_piece_holds_part_of_an_emoji(path):
    tokenizer = real_tokenizer(path)
    ids = tokenizer.encode("🦙🫠𝕏", bos=False)
    assert len(ids) > 3, "the test wants characters that several tokens spell"
    pieces = streamed(tokenizer, ids)
    assert "\ufffd" not in "".join(pieces)
    assert [piece for piece in pieces if piece.strip()] == ["🦙", "🫠", "𝕏"]


@every_real_file
def test_an_unfinished_character_is_flushed_as_one_replacement(path):
    tokenizer = real_tokenizer(path)
    ids = tokenizer.encode("hi 🦙", bos=False)[:-1]
    pieces = streamed(tokenizer, ids)
    assert "".join(pieces[:-1]).rstrip() == "hi"
    assert pieces[-1] == "\ufffd"
    assert "".join(pieces) == tokenizer.decode(ids)


def test_a_completion_of_a_prompt_keeps_its_leading_space():
    """Decoded by itself a SentencePiece text loses its first space, so words would run together."""
    tokenizer = real_tokenizer(MISTRAL_V1)
    prompt = tokenizer.encode("The capital of France is")
    answer = tokenizer.encode("Paris", bos=False)
    assert "".join(streamed(tokenizer, answer)) == "Paris"
    assert "".join(streamed(tokenizer, answer, tuple(prompt))) == " Paris"
    assert tokenizer.bos_id is not None
    assert "".join(streamed(tokenizer, answer, (tokenizer.bos_id,))) == "Paris"


def test_a_completion_finishes_the_character_that_its_prompt_began():
    tokenizer = real_tokenizer(SMOLLM2)
    ids = tokenizer.encode("🦙!", bos=False)
    assert "".join(streamed(tokenizer, ids[1:], tuple(ids[:1]))) == "🦙!"


def test_padding_ids_beyond_the_vocabulary_decode_to_nothing():
    tokenizer = real_tokenizer(SMOLLM2)
    assert tokenizer.decode([tokenizer.vocab_size, tokenizer.vocab_size + 100]) == ""
    with pytest.raises(ValueError, match="token id -1 is negative"):
        tokenizer.decode([-1])


def test_push_time_does_not_grow_with_the_completion():
    """Decoding the whole completion again at each token would make this 100 times slower."""
    tokenizer = real_tokenizer(SMOLLM2)
    ids = tokenizer.encode("the 🦙 runs 12 times\n" * 4000, bos=False)
    decoder = StreamDecoder(tokenizer)

    def push_all(part: list[int]) -> float:
        start = time.process_time()
        for id in part:
            decoder.push(id)
        return time.process_time() - start

    first = push_all(ids[:4000])
    push_all(ids[4000:-4000])
    assert push_all(ids[-4000:]) < 10 * first + 0.05
