"""Words of comments, docstrings, messages and documents that CONTRIBUTING.md asks not to use.

The table is short on purpose: it has phrases that made readers stop, and names that have been
replaced. A phrase is searched for in prose alone, a retired name in code alone.
"""

import io
import re
import subprocess
import sys
import tokenize
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# A phrase, as a regular expression in which a space is any white space, and what to write instead.
PHRASES = {
    r"told": "reported, passed, or the message itself",
    r"lies?": "is, is stored, starts",
    r"as (they|it) (comes?|lies?)": "in order, or unchanged",
    r"(?<!there\s)(is|are|was|were) no (?!longer|more|less|such|worse|better)[a-z]+": "is not a",
    r"(is|are) (?-i:none)": "is not",  # but "is None" is Python
    r"none that": "not one that",
    r"wh(o|om)ever": "the caller, the client, the rank",
    r"hangs? on( each other)?": "depends on",
    r"of (which|whom)": "a sentence of its own, with the noun",
    r"of them": "the noun",
    r"for who": "for the caller, for the rank",
    r"who (ends|fails|asks|waits|takes|holds|joins|comes|needs|reads)": "the rank that ends",
    r"company": "batch",
    r"hearts?(?!\sof)": "heartbeat",
    r"in the place of": "instead of",
    r"(can )?comes? of": "result of",
    r"(hears?|heard|tells?) of": "receives, reports",
    r"nobody's": "free",
    r"(share|shares|shared) out": "shard, split",
    r"what of": "which part of",
    r"but for": "except",
}

# A name that was replaced, and its successor.
RETIRED = {
    "BlockGroup": "KVGroupBlocks",
    "GGUF_GROUPS": "GGUF_QUANTS",
    "GROUP_SIZE": "QUANT_GROUP_SIZE",
    "GroupBatch": "KVGroupBatch",
    "GroupFormat": "QuantFormat",
    "GroupWeight": "QuantWeight",
    "HF_GROUPS": "HF_QUANTS",
    "LayerGroup": "KVGroup",
    "NATIVE_GROUPS": "NATIVE_QUANTS",
    "RankGroup": "Ranks",
    "Routes": "Dispatch",
    "RowNoise": "SamplingKey",
    "Share": "Shard",
    "_decide": "commit_outputs",
    "_find_places": "allocate",
    "_make_room": "allocate_running",
    "_meet": "barrier",
    "_offer_core": "yield_core",
    "apply_routed": "grouped_linear",
    "end_to_end": "concat_outputs",
    "fairscale_groups": "fs_init",
    "group_linear": "quant_gemm",
    "layer_groups": "kv_groups",
    "look_ahead": "prepare_next",
    "n_group": "heads_per_kv",
    "place_in_environment": "rank_env",
    "rank_calls": "rank_rpc",
    "routes_of": "expert_dispatch",
    "row_noise": "row_sampling_key",
    "schedule_again": "schedule_in_flight",
    "spread_attention": "sharded_attention",
    "spread_cache": "kv_layout",
    "told": "emitted",
    "unfilled": "empty_weight",
}

READ = ("parallel_llama/*.py", "launch/*.py", "launch/*.sh", "tests/support/*.py", "*.md")
VENDORED = "parallel_llama/serve/page/vendor/*"

_FLAT = {phrase: rf"\b{phrase}\b".replace(" ", r"[\s#]+") for phrase in PHRASES}
_ANY_PHRASE = re.compile("|".join(f"(?:{each})" for each in _FLAT.values()), re.IGNORECASE)
_ANY_NAME = re.compile(rf"\b(?:{'|'.join(map(re.escape, RETIRED))})\b")
# From Python 3.12 on, the text of an f-string is a token of its own.
_PROSE = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
_CODE_IN_PROSE = re.compile(r"`+[^`\n]*`+|^```.*?^```", re.MULTILINE | re.DOTALL)


def prose(text: str, is_python: bool) -> str:
    """The file with everything but prose blanked out; line numbers stay the same."""
    if is_python:
        kept = [
            (token.start, token.end)
            for token in tokenize.generate_tokens(io.StringIO(text).readline)
            if token.type in _PROSE
        ]
        lines = [0, *(match.end() for match in re.finditer("\n", text))]
        spans = [(lines[a - 1] + b, lines[c - 1] + d) for (a, b), (c, d) in kept]
        text = "".join(_parts(text, spans))
    return _CODE_IN_PROSE.sub(lambda match: _blank(match[0]), text)


def _parts(text: str, spans: Iterable[tuple[int, int]]) -> Iterator[str]:
    at = 0
    for start, stop in spans:
        yield _blank(text[at:start])
        yield text[start:stop]
        at = stop
    yield _blank(text[at:])


def _blank(text: str) -> str:
    return re.sub(r"\S", ".", text)


def names(text: str) -> Iterator[tuple[int, str]]:
    """Retired names in Python code, by line."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NAME and token.string in RETIRED:
            yield token.start[0], token.string


def faults(name: str, text: str) -> Iterator[str]:
    """The phrases and retired names in a file, as `file:line: words; write ...`."""
    is_python = name.endswith(".py")
    line_ends = [match.start() for match in re.finditer("\n", text)]
    for match in _ANY_PHRASE.finditer(prose(text, is_python)):
        words = " ".join(re.sub(r"[\s#]+", " ", match[0]).split())
        instead = next(
            PHRASES[phrase]
            for phrase, flat in _FLAT.items()
            if re.fullmatch(flat, match[0], re.IGNORECASE)
        )
        line = bisect_right(line_ends, match.start()) + 1
        yield f"{name}:{line}: {words!r}; write {instead}"
    if is_python and _ANY_NAME.search(text):
        for line, word in names(text):
            yield f"{name}:{line}: the name {word}; now {RETIRED[word]}"


def tracked() -> list[str]:
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    found = [name for name in listed.stdout.split("\0") if any(fnmatch(name, p) for p in READ)]
    return [name for name in found if not fnmatch(name, VENDORED) and (ROOT / name).is_file()]


def all_faults() -> dict[str, list[str]]:
    texts = ((name, (ROOT / name).read_text()) for name in tracked())
    found = {name: list(faults(name, text)) for name, text in texts}
    return {name: each for name, each in found.items() if each}


def test_prose_and_names_are_those_of_the_field():
    if not (ROOT / ".git").exists():
        pytest.skip("git knows which files are the project's")
    lines = [line for each in all_faults().values() for line in each]
    assert not lines, "\n".join(["CONTRIBUTING.md, Style:", *lines])


BAD = {
    "a.py": (
        'def f(told):\n    """Whoever hears\n    it. One of them."""\n\n    x = "is no text"\n',
        {"a.py:1": "told", "a.py:2": "Whoever", "a.py:3": "of them", "a.py:5": "is no text"},
    ),
    "b.py": (
        "# It hangs\n# on the rest.\nGroupFormat = 1\n",
        {"b.py:1": "hangs on", "b.py:3": "Quant"},
    ),
    "c.md": ("Values\nas they come, and `told` is a field.\n", {"c.md:2": "as they come"}),
}
GOOD = """
# There is no file, a rank hangs, and `of them` is a name.
lie = "it depends on the batch and is no longer needed; the result is None"
"""


@pytest.mark.parametrize("name", BAD)
def test_a_planted_phrase_is_found_on_its_line(name):
    text, expected = BAD[name]
    lines = list(faults(name, text))
    assert {line.split(": ")[0] for line in lines} == set(expected)
    for where, words in expected.items():
        assert any(line.startswith(f"{where}: ") and words in line for line in lines)


def test_good_prose_and_similar_names_are_not_reported():
    assert not list(faults("good.py", GOOD))


def test_a_whole_file_that_is_planted_makes_the_test_fail(tmp_path, monkeypatch):
    (tmp_path / "parallel_llama").mkdir()
    (tmp_path / "parallel_llama" / "new.py").write_text("x = 1  # for whoever reads it\n")
    (tmp_path / "README.md").write_text("Plain words.\n")
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    assert list(all_faults()) == ["parallel_llama/new.py"]
    with pytest.raises(AssertionError, match=r"parallel_llama/new.py:1: 'whoever'"):
        test_prose_and_names_are_those_of_the_field()


if __name__ == "__main__":  # prints every fault, and their number
    left = all_faults()
    print("\n".join(line for each in left.values() for line in each))
    print(f"{sum(map(len, left.values()))} in {len(left)} files")
