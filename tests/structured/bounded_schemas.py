"""Random JSON schemas that bound the length of their texts, and a check of completions.

`check_completions` takes any function that completes a grammar. Tests use random logits and a few
schemas; manual runs use a real model and a few hundred schemas.
"""

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import jsonschema

from parallel_llama.request import Grammar
from parallel_llama.tokenizer import Tokenizer

Schema = dict[str, Any]
# The completion of a grammar under a seed: its token ids, and whether it stopped by itself.
Complete = Callable[[Grammar, int], tuple[Sequence[int], bool]]

WORDS = ("id", "name", "größe", "a b", 'quo"te', "back\\slash", "日本", "x" * 20, "😀", "_")
PATTERNS = ("^[a-z]{1,6}$", "^(yes|no|maybe)$", "^[A-Z][0-9]{2,4}$", r"^\d{3}-\d{4}$", "^[äöü]{2}$")
FORMATS = ("date", "time", "uuid", "ipv4")


def bounded_schema(seed: int, depth: int = 3) -> Schema:
    """A schema of objects, arrays and scalars, `depth` levels deep, some under $defs."""
    draw = random.Random(seed)
    definitions = {f"d{n}": _schema(draw, 1, ()) for n in range(draw.randrange(3))}
    schema = _object(draw, depth, tuple(definitions))
    return {**schema, "$defs": definitions} if definitions else schema


def check_completions(
    complete: Complete, tokenizer: Tokenizer, seeds: Sequence[int]
) -> tuple[int, list[str]]:
    """Returns: the number of completions that stopped, and one line for each bad text."""
    n_stopped, problems = 0, []
    for seed in seeds:
        schema = bounded_schema(seed)
        text = json.dumps(schema, ensure_ascii=seed % 2 == 0)
        tokens, is_stopped = complete(Grammar("json_schema", text), seed)
        if not is_stopped:
            continue
        n_stopped += 1
        completion = tokenizer.decode(tokens)
        try:
            jsonschema.Draft202012Validator(schema).validate(json.loads(completion))
        except (ValueError, jsonschema.ValidationError) as error:
            problems.append(f"seed {seed}: {completion!r:.200} does not fit {text:.300}: {error}")
    return n_stopped, problems


def _schema(draw: random.Random, depth: int, definitions: Sequence[str]) -> Schema:
    scalars = (_string, _pattern, _format, _enum, _integer, _number, _boolean, _null, _const)
    if definitions and draw.random() < 0.2:
        return {"$ref": f"#/$defs/{draw.choice(definitions)}"}
    if depth <= 0 or draw.random() < 0.45:
        return draw.choice(scalars)(draw)
    nested = draw.choice((_object, _array, _any_of))
    return nested(draw, depth - 1, definitions)


def _object(draw: random.Random, depth: int, definitions: Sequence[str]) -> Schema:
    names = draw.sample(WORDS, draw.randrange(1, 5))
    return {
        "type": "object",
        "properties": {name: _schema(draw, depth - 1, definitions) for name in names},
        "required": [name for name in names if draw.random() < 0.6],
        "additionalProperties": False,
    }


def _array(draw: random.Random, depth: int, definitions: Sequence[str]) -> Schema:
    least = draw.randrange(3)
    return {
        "type": "array",
        "items": _schema(draw, depth - 1, definitions),
        "minItems": least,
        "maxItems": least + draw.randrange(3),
    }


def _any_of(draw: random.Random, depth: int, definitions: Sequence[str]) -> Schema:
    return {"anyOf": [_schema(draw, depth, definitions) for _ in range(draw.randrange(1, 4))]}


def _string(draw: random.Random) -> Schema:
    least = draw.randrange(4)
    return {"type": "string", "minLength": least, "maxLength": least + draw.randrange(12)}


def _pattern(draw: random.Random) -> Schema:
    return {"type": "string", "pattern": draw.choice(PATTERNS)}


def _format(draw: random.Random) -> Schema:
    return {"type": "string", "format": draw.choice(FORMATS)}


def _enum(draw: random.Random) -> Schema:
    return {"enum": draw.sample([*WORDS, 1, -2.5, True, None, [1, "a"], {"k": []}], 4)}


def _const(draw: random.Random) -> Schema:
    return {"const": draw.choice([*WORDS, 7, None, {"a": [1]}])}


def _integer(draw: random.Random) -> Schema:
    least = draw.randrange(-2000, 2000)
    bounds = {"minimum": least, "maximum": least + draw.randrange(5000)}
    return {"type": "integer", **bounds}


def _number(draw: random.Random) -> Schema:
    least = round(draw.uniform(-50, 50), 2)
    return {"type": "number", "minimum": least, "exclusiveMaximum": least + 100}


def _boolean(_draw: random.Random) -> Schema:
    return {"type": "boolean"}


def _null(_draw: random.Random) -> Schema:
    return {"type": "null"}
