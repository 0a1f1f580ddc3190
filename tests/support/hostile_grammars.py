"""Grammars with a high cost in states, memory or compile time, each as (kind, text)."""

import json

HOSTILE = {
    "nested repeats": ("regex", "((((a{1,99}){1,99}){1,99}){1,99}){1,99}"),
    "repeats of repeats": ("regex", "(.{0,100000}){0,100000}"),
    "64 KiB of repeats": ("regex", "(" + "(a|b){1,500}c{0,999}" * 2900 + ")"),
    "many parentheses": ("regex", "(" * 32_000 + "a" + ")" * 32_000),
    "memory of the past": ("regex", ".*a.{4000}b"),
    "deep groups": ("lark", "start: " + "(" * 30_000 + '"a"' + ")" * 30_000),
    "ambiguous": ("lark", 's: s s | s s s | "a" | \nstart: s'),
    "deep schema": ("json_schema", '{"items":' * 7000 + "{}" + "}" * 7000),
    "recursive": ("json_schema", '{"anyOf":[{"$ref":"#"},{"type":"array","items":{"$ref":"#"}}]}'),
    "doubling": ("json_schema", json.dumps({
        "$defs": {**{f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(60)},
                  "d60": {"type": "string"}}, "$ref": "#/$defs/d0"})),
    "huge enum": ("json_schema", json.dumps({"enum": [f"v{n}" for n in range(6500)]})),
    "huge array": ("json_schema", json.dumps({"type": "array", "minItems": 10**9, "items": {}})),
    "huge divisor": ("json_schema", '{"type":"integer","multipleOf":999999937}'),
    "patternProperties": ("json_schema", json.dumps(
        {"type": "object", "patternProperties": {f"^{n}(a|b)*$": {} for n in range(2500)}})),
    "all of 30 patterns": ("json_schema", json.dumps(
        {"allOf": [{"type": "string", "pattern": f".*a.{{{n}}}b.*"} for n in range(10, 40)]})),
}  # fmt: skip
