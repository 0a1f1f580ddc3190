"""Tokens that grammar masks allow, for every kind of tokenizer, and costs of hostile grammars."""

import json
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import regex
from bounded_schemas import check_completions
from hostile_inputs import GRAMMARS
from tokenizer_data import (
    LLAMA3,
    MISTRAL_V1,
    MISTRAL_V3,
    REAL_FILES,
    SMOLLM2,
    TEKKEN,
    real_tokenizer,
)

from parallel_llama.errors import CheckpointError, UsageError
from parallel_llama.request import Grammar
from parallel_llama.structured import compiler, grammar_check
from parallel_llama.structured.compiler import GrammarCompiler, Matcher, MatchError
from parallel_llama.structured.token_table import TokenTable
from parallel_llama.tokenizer import StreamDecoder, Tokenizer, bounded_process, load_tokenizer
from parallel_llama.tokenizer.gguf import export_gguf_tokenizer

N_PADDING = 13  # rows of the model that no tokenizer knows; not a multiple of 8
HOLDING_JSON = '{"type": "object", "properties": {"text": {"type": "string", "maxLength": 30}}, \
"required": ["text"], "additionalProperties": false}'


@cache
def compiler_of(path: Path) -> GrammarCompiler:
    tokenizer = real_tokenizer(path)
    return GrammarCompiler(tokenizer, tokenizer.vocab_size + N_PADDING, tokenizer.eos_ids)


def smollm2(kind: str, text: str) -> Matcher:
    return compiler_of(SMOLLM2).matcher(Grammar(kind, text))


def allowed(matcher: Matcher) -> set[int]:
    bits = np.unpackbits(np.frombuffer(matcher.mask(), np.uint8), bitorder="little")
    return set(np.flatnonzero(bits).tolist())


def draw(
    matcher: Matcher, seed: int, most: int = 400, seen: Callable[[set[int]], object] = len
) -> list[int]:
    """A completion from random logits at temperature 1.5, as an engine would run it."""
    random = np.random.default_rng(seed)
    tokens: list[int] = []
    while not matcher.is_finished and len(tokens) < most:
        ids = allowed(matcher)
        seen(ids)
        choices = sorted(ids)
        logits = random.normal(0, 2, len(choices)) / 1.5 + random.gumbel(size=len(choices))
        tokens.append(choices[int(np.argmax(logits))])
        matcher.accept(tokens[-1])
    return tokens


def spell(matcher: Matcher, tokenizer: Tokenizer, text: str) -> None:
    for id in tokenizer.encode(text, bos=False, special=False):
        matcher.accept(id)


# Completions fit the grammar.


def test_random_completions_fit_their_schemas():
    tokenizer = real_tokenizer(SMOLLM2)

    def complete(grammar: Grammar, seed: int) -> tuple[Sequence[int], bool]:
        matcher = compiler_of(SMOLLM2).matcher(grammar)
        return draw(matcher, seed), matcher.is_finished

    n_stopped, problems = check_completions(complete, tokenizer, range(12))
    assert not problems, "\n".join(problems)
    assert n_stopped == 12


@pytest.mark.parametrize(
    ("kind", "text", "pattern"),
    [
        ("regex", r"[0-9]{3}-(äö|日本|😀){1,3}", r"[0-9]{3}-(äö|日本|😀){1,3}"),
        ("regex", r"(yes|no)( maybe)?", r"(yes|no)( maybe)?"),
        ("regex", r"[^a-z\n]{5}", r"[^a-z\n]{5}"),
        ("lark", 'start: GREETING " " NAME "!"\nGREETING: "grüß dich" | "你好"\nNAME: /[A-Z]{1,8}/',
         r"(grüß dich|你好) [A-Z]{1,8}!"),
        ("lark", 'start: "a" start "b" | "c"', r"(a(?1)b|c)"),
    ],
)  # fmt: skip
def test_random_completions_fit_regex_and_lark(kind, text, pattern):
    for seed in range(5):
        matcher = smollm2(kind, text)
        completion = real_tokenizer(SMOLLM2).decode(draw(matcher, seed))
        assert matcher.is_finished
        assert regex.fullmatch(pattern, completion), completion


@pytest.fixture(scope="session")
def smollm2_json(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer_json")
    for name, content in export_gguf_tokenizer(SMOLLM2).items():
        (folder / name).write_bytes(content)
    return load_tokenizer(folder)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gguf", "tiktoken", "spm", "spm v3", "tekken", "tokenizer.json"])
def test_decoded_text_fits_the_grammar_for_every_kind_of_tokenizer(kind, request):
    """The text is streamed after a prompt, so that a leading space of SentencePiece is kept."""
    paths = {
        "gguf": SMOLLM2, "tiktoken": LLAMA3, "spm": MISTRAL_V1, "spm v3": MISTRAL_V3,
        "tekken": TEKKEN,
    }  # fmt: skip
    if kind == "tokenizer.json":
        tokenizer: Tokenizer = request.getfixturevalue("smollm2_json")
        maker = GrammarCompiler(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)
    else:
        tokenizer, maker = real_tokenizer(paths[kind]), compiler_of(paths[kind])
    forbidden = set(tokenizer.vocabulary.special_ids.values()) - tokenizer.eos_ids

    def check(ids: set[int]) -> None:
        assert not ids & forbidden
        assert max(ids) < tokenizer.vocab_size

    for grammar, pattern in (
        (Grammar("json_schema", HOLDING_JSON), None),
        (Grammar("regex", r" [a-z]{1,5} \x{e9}é日.{3,9}"), r" [a-z]{1,5} éé日.{3,9}"),
    ):
        for seed in range(4):
            matcher = maker.matcher(grammar)
            decoder = StreamDecoder(tokenizer, tokenizer.encode("Q:"))
            tokens = draw(matcher, seed, seen=check)
            text = "".join(map(decoder.push, tokens)) + decoder.flush()
            assert matcher.is_finished
            if pattern is None:
                assert list(json.loads(text)) == ["text"]
            else:
                assert re.fullmatch(pattern, text), text


@pytest.mark.parametrize("path", REAL_FILES, ids=lambda path: path.name)
def test_forced_text_is_encoded_losslessly_in_multi_byte_tokens(path):
    """SentencePiece would put a space before the text."""
    tokenizer = real_tokenizer(path)
    table = TokenTable(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)
    for text in ('{"temperature":', "größe 日本", " two  spaces", "<s>", "\x02"):
        ids = table.encode(text.encode())
        assert b"".join(table.tokens[id] for id in ids) == text.encode()
        assert len(ids) < len(text.encode()) or len(text) < 4


def test_text_that_the_tokenizer_normalises_is_encoded_losslessly():
    class Lossy:
        vocabulary = real_tokenizer(SMOLLM2).vocabulary

        def encode(self, text: str, **options: bool) -> list[int]:
            return real_tokenizer(SMOLLM2).encode(text.casefold(), **options)

    table = TokenTable(Lossy(), 49152, frozenset())
    assert b"".join(table.tokens[id] for id in table.encode(b"Hello World")) == b"Hello World"


def test_forced_text_is_produced_even_if_the_tokenizer_raises(smollm2_json, monkeypatch):
    """Regression: the error, raised while a mask was computed, became a panic of llguidance."""

    def refuse(*_: object, **__: object) -> list[int]:
        raise CheckpointError("tokenizer.json: the tokenizer is stopped")

    monkeypatch.setattr(smollm2_json, "encode", refuse)
    maker = GrammarCompiler(smollm2_json, smollm2_json.vocab_size, smollm2_json.eos_ids)
    assert smollm2_json.decode(draw(maker.matcher(Grammar("regex", "hello world")), 0)) == (
        "hello world"
    )


def test_token_that_would_lose_its_space_cannot_begin_a_text():
    tokenizer, maker = real_tokenizer(MISTRAL_V1), compiler_of(MISTRAL_V1)
    grammar = Grammar("regex", r" ?[a-z]{3,9}")
    openings = set(tokenizer.vocabulary.openings)
    assert allowed(maker.matcher(grammar)) & openings
    matcher = maker.matcher(grammar, begins_text=True)
    assert not allowed(matcher.copy()) & openings
    for seed in range(5):
        begun = maker.matcher(grammar, begins_text=True)
        first = allowed(begun)
        tokens = draw(begun, seed)
        assert tokens[0] in first
        decoder = StreamDecoder(tokenizer)
        written = b"".join(map(tokenizer.vocabulary.piece, tokens)).decode()
        assert "".join(map(decoder.push, tokens)) == written


# Where a text may end.


def test_eos_is_allowed_exactly_where_the_text_may_end():
    tokenizer = real_tokenizer(LLAMA3)
    matcher = compiler_of(LLAMA3).matcher(Grammar("regex", "ab(cd)?"))
    seen = []
    for letter in "abcd":
        seen.append((allowed(matcher) & tokenizer.eos_ids, matcher.is_finished))
        spell(matcher, tokenizer, letter)
    some = tokenizer.eos_ids
    assert seen == [(set(), False), (set(), False), (some, False), (set(), False)]
    assert matcher.is_finished
    assert allowed(matcher) == some


def test_any_eos_id_ends_the_text():
    for eos in real_tokenizer(LLAMA3).eos_ids:
        matcher = compiler_of(LLAMA3).matcher(Grammar("regex", "a*"))
        matcher.accept(eos)
        assert matcher.is_finished


def test_an_eos_too_early_is_refused():
    matcher = smollm2("regex", "ab")
    with pytest.raises(MatchError, match="cannot follow its grammar"):
        matcher.accept(min(real_tokenizer(SMOLLM2).eos_ids))
    with pytest.raises(MatchError):
        matcher.mask()


def test_matcher_without_eos_finishes_and_allows_no_more_tokens():
    maker = GrammarCompiler(real_tokenizer(SMOLLM2), 49152, frozenset())
    matcher = maker.matcher(Grammar("regex", "abc"))
    spell(matcher, real_tokenizer(SMOLLM2), "abc")
    assert matcher.is_finished
    assert not any(matcher.mask())


def test_eos_id_with_text_in_the_tokenizer_is_not_allowed_as_text():
    tokenizer = real_tokenizer(SMOLLM2)
    (comma,) = tokenizer.encode(",", bos=False)
    matcher = GrammarCompiler(tokenizer, 49152, frozenset([comma])).matcher(Grammar("regex", ",+a"))
    assert comma not in allowed(matcher)


# Copies and the cache.


def test_copied_matcher_advances_independently():
    tokenizer = real_tokenizer(SMOLLM2)
    matcher = smollm2("regex", "a(b|c)d")
    spell(matcher, tokenizer, "a")
    copy = matcher.copy()
    spell(copy, tokenizer, "bd")
    assert copy.is_finished
    assert not matcher.is_finished
    spell(matcher, tokenizer, "cd")
    assert matcher.is_finished


def test_matcher_does_not_advance_the_cached_grammar():
    first, tokenizer = smollm2("regex", "xyz"), real_tokenizer(SMOLLM2)
    before = first.mask()
    spell(first, tokenizer, "xyz")
    assert smollm2("regex", "xyz").mask() == before


def test_bounded_grammar_cache_evicts_the_least_recently_used(monkeypatch):
    tried: list[str] = []
    monkeypatch.setattr(
        GrammarCompiler, "_check", lambda _, grammar: tried.append(grammar.text) or ""
    )
    monkeypatch.setattr(compiler, "MAX_CACHED_GRAMMARS", 3)
    monkeypatch.setattr(compiler, "MAX_CACHED_CHARS", 100)
    maker = GrammarCompiler(real_tokenizer(SMOLLM2), 49152, frozenset([2]))
    for text in ("a", "b", "c", "a", "d", "a", "b"):
        maker.matcher(Grammar("regex", text))
    assert tried == ["a", "b", "c", "d", "b"]
    for letter in "efe":
        maker.matcher(Grammar("regex", letter * 99))
    assert tried[5:] == ["e" * 99, "f" * 99, "e" * 99]


# Grammars that cannot be used.


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("regex", "(?=a)b", "look-around"),
        ("regex", r"(a)\1", "backreferences are not supported"),
        ("regex", "a{2", r"regex parse error:\n    a\{2\n     \^+\nerror: [^\n]*$"),
        ("lark", "start: b", 'line 1, column 8: unknown name: "b"'),
        ("lark", "start: start", "matches no text"),
        ("lark", 'start: "a" <|im_end|>', "unknown special token"),
        ("json_schema", "{", "EOF"),
        ("json_schema", '{"type": "strin"}', "Invalid type: strin"),
        ("json_schema", '{"type": "array", "uniqueItems": true}', 'Unimplemented keys: ."unique'),
        ("json_schema", '{"x-guidance": {"lenient": true}, "not": {}}', "Unimplemented keys"),
        ("json_schema", '{"oneOf": [{"type": "object"}, {"type": "object"}]}', "use anyOf"),
        ("json_schema", '{"$ref": "#"}', "matches no text"),
        ("json_schema", '{"$ref": "https://example.org/a"}', "Default retriever does not fetch"),
        ("json_schema", '{"$ref": "file:///etc/passwd"}', "Default retriever does not fetch"),
        ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 3}', "greater than maximum"),
    ],
)  # fmt: skip
def test_unusable_grammar_is_refused_with_the_reason(kind, text, reason):
    with pytest.raises(UsageError, match=f"(?s)cannot be used: .*{reason}") as caught:
        smollm2(kind, text)
    assert "1(8)" not in str(caught.value)  # a position in a grammar that the user did not write


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ('{"type": "array", "uniqueItems": true}', 'Unimplemented keys: ["uniqueItems"]'),
        (
            '{"oneOf": [{"type": "object"}, {"type": "object"}]}',
            "oneOf with overlapping parts is not supported; use anyOf",
        ),
        (
            '{"type": "string", "pattern": "("}',
            "regex parse error:\n    (\n    ^\nerror: unclosed group",
        ),
    ],
)
def test_reason_for_a_schema_in_a_lark_grammar_does_not_quote_the_grammar(schema, reason):
    """Regression: a function's unusable parameters were called a Lark grammar, which was quoted."""
    with pytest.raises(UsageError) as caught:
        smollm2("lark", f'start: "a" b\nb: %json {schema}')
    assert str(caught.value) == f"the JSON schema cannot be used: {reason}"


def test_schema_cannot_enable_flexible_whitespace():
    text = '{"x-guidance": {"whitespace_flexible": true}, "type": "array", "items": {"const": 1}}'
    matcher = smollm2("json_schema", text)
    for character in "[1,1":
        pieces = [real_tokenizer(SMOLLM2).vocabulary.piece(id) for id in allowed(matcher)]
        assert not any(piece.strip(b" \t\r\n") != piece for piece in pieces)
        spell(matcher, real_tokenizer(SMOLLM2), character)


def test_grammar_that_names_a_special_token_by_id_gives_no_mask():
    """Lark grammars of llguidance can name token ids; ids of special tokens are not text."""
    matcher = smollm2("lark", 'start: "a" <[1]>')
    spell(matcher, real_tokenizer(SMOLLM2), "a")
    with pytest.raises(MatchError, match="no token of the vocabulary"):
        matcher.mask()


@pytest.mark.slow
@pytest.mark.parametrize("name", GRAMMARS)
def test_a_hostile_grammar_is_refused_or_costs_little(name):
    """Measures the CPU time of this process; the process of the check has its own limit."""
    kind, text = GRAMMARS[name]
    started = time.process_time()
    with suppress(UsageError, MatchError):
        draw(smollm2(kind, text), seed=0, most=30)
    assert time.process_time() - started < 10 * grammar_check.CPU_LIMIT_S


@pytest.mark.slow
def test_grammar_that_exceeds_the_time_limit_is_refused():
    with pytest.raises(UsageError, match="takes more than 1 s; simplify it"):
        smollm2(*GRAMMARS["patternProperties"])


@pytest.mark.parametrize(
    ("answer", "limit_s", "reason"),
    [("os.abort()", 30, "256 MiB of memory"), ("time.sleep(60)", 0.5, "takes more than 1 s")],
)
def test_a_grammar_check_that_dies_or_hangs_refuses_the_grammar(
    tmp_path, monkeypatch, answer, limit_s, reason
):
    job = f"class Job:\n    def answer(self, *request):\n        {answer}\n"
    (tmp_path / "grammar_check.py").write_text(f"import os, time\n{job}")
    monkeypatch.setattr(grammar_check, "__file__", str(tmp_path / "grammar_check.py"))
    monkeypatch.setattr(bounded_process, "WALL_BASE_S", limit_s)
    monkeypatch.setattr(bounded_process, "WALL_PER_CPU_S", 0)
    maker = GrammarCompiler(real_tokenizer(SMOLLM2), 49152, frozenset([2]))
    with pytest.raises(UsageError, match=reason):
        maker.matcher(Grammar("regex", "abc"))


def test_many_grammars_are_checked_in_one_process(monkeypatch):
    """Starting a process took a hundred times longer than compiling a grammar."""
    children = []
    start = bounded_process._Child

    def started(command: list[str]) -> object:
        children.append(start(command))
        return children[-1]

    monkeypatch.setattr(bounded_process, "_Child", started)
    maker = GrammarCompiler(real_tokenizer(SMOLLM2), 49152, frozenset([2]))
    for n in range(3):
        maker.matcher(Grammar("regex", f"a{n}b*"))
    assert len(children) == 1
    children[0]._process.kill()
    maker.matcher(Grammar("regex", "cd"))
    assert len(children) == 2


def test_checked_grammar_is_compiled_without_another_check(monkeypatch):
    monkeypatch.setattr(GrammarCompiler, "_check", lambda *_: pytest.fail("checked again"))
    maker = GrammarCompiler(real_tokenizer(SMOLLM2), 49152, frozenset([2]))
    assert maker.matcher(Grammar("regex", "abc"), is_checked=True).mask()


@pytest.mark.xfail(strict=True, reason="llguidance takes the whole exclusive bound for allowed")
def test_an_exclusive_bound_is_never_drawn():
    schema = '{"type": "number", "exclusiveMinimum": 7, "exclusiveMaximum": 7.5}'
    matcher = smollm2("json_schema", schema)
    spell(matcher, real_tokenizer(SMOLLM2), "7")
    assert not allowed(matcher) & real_tokenizer(SMOLLM2).eos_ids
