"""Hostile chat templates and grammars: endless work, large values, escapes from the sandbox."""

import json

ENDLESS = {
    "nested ranges": "{% for a in range(99999) %}{% for b in range(99999) %}"
    "{% endfor %}{% endfor %}",
    "nested ranges behind filters": "{{ range(99999)|map('string')|map('length')|list|length }}"
    "{% for a in range(99999) %}{{ range(99999)|list|length and '' }}{% endfor %}",
    "nested lists": "{% set l = [1]*999 %}"
    "{% for a in l %}{% for b in l %}{% for c in l %}{% for d in l %}{% endfor %}{% endfor %}"
    "{% endfor %}{% endfor %}",
    "nested strings": "{% set s = 'a'*999999 %}{% for a in s %}{% for b in s %}"
    "{% endfor %}{% endfor %}",
    "macro that branches": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}"
    "{% endmacro %}{{ f(60) }}",
    "recursive loop": "{% for a in range(300) recursive %}{{ loop(range(300)) }}{% endfor %}",
    "equality of trees": "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(60) %}"
    "{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% endfor %}{{ ns.a == ns.b }}",
    "order of trees": "{% set ns = namespace(a=[1], b=[1]) %}{% for i in range(60) %}"
    "{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% endfor %}{{ ns.a < ns.b }}",
    "search in text": "{% set s = 'a'*1000000 %}{% for i in range(99999) %}"
    "{{ 'b' in s and '' }}{% endfor %}",
    "sort again and again": "{% for i in range(99999) %}"
    "{{ (range(99999)|sort|length) and '' }}{% endfor %}",
    "sum of lists": "{{ ([[1]*999]*99999)|sum(start=[])|length }}",
    "urlize": "{% for i in range(99999) %}{{ ('http://a.b '*90000)|urlize and '' }}{% endfor %}",
}
LARGE = {
    "power": "{{ 10**(10**7) > 1 }}",
    "power of power": "{{ 9**(9**9) }}",
    "long text": "{{ 'a'*10**10 }}",
    "long text from the right": "{{ 10**10*'a' }}",
    "long list": "{{ ([0]*10**10)|length }}",
    "long format": "{{ '%10000000000d' % 1 }}",
    "long format by argument": "{{ '%*d' % (1000000000, 1) }}",
    "long precision": "{{ '%.1000000000f' % 1.0 }}",
    "format method": "{{ '{:>10000000000}'.format('a') }}",
    "format filter": "{{ '%2000000000d'|format(1) }}",
    "center": "{{ 'a'|center(10**10) }}",
    "center method": "{{ 'a'.center(10000000000) }}",
    "ljust": "{{ 'a'.ljust(10000000000) }}",
    "zfill": "{{ 'a'.zfill(10000000000) }}",
    "expandtabs": "{{ '\t'.expandtabs(2000000000) }}",
    "indent": "{{ ('a\n'*9999)|indent(1000000) }}",
    "doubling by ~": "{% set ns = namespace(s='a') %}{% for i in range(99) %}"
    "{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s|length }}",
    "doubling by +": "{% set ns = namespace(s='a') %}{% for i in range(99) %}"
    "{% set ns.s = ns.s + ns.s %}{% endfor %}{{ ns.s|length }}",
    "doubling by join": "{% set ns = namespace(s='a') %}{% for i in range(99) %}"
    "{% set ns.s = [ns.s, ns.s]|join %}{% endfor %}{{ ns.s|length }}",
    "doubling by replace": "{% set ns = namespace(s='a') %}{% for i in range(99) %}"
    "{% set ns.s = ns.s.replace('a', 'aa') %}{% endfor %}{{ ns.s|length }}",
    "text of a tree": "{% set ns = namespace(a=[1]) %}{% for i in range(60) %}"
    "{% set ns.a = [ns.a, ns.a] %}{% endfor %}{{ ns.a|string|length }}",
    "JSON of a tree": "{% set ns = namespace(a=[1]) %}{% for i in range(60) %}"
    "{% set ns.a = [ns.a, ns.a] %}{% endfor %}{{ ns.a|tojson|length }}",
    "indented JSON": "{{ [[[1]]]|tojson(indent=10000000000) }}",
    "range too long": "{{ range(10**9)|list|length }}",
    "batch": "{{ [1]|batch(10**10, 0)|list|length }}",
    "lipsum": "{{ lipsum(n=1000000)|length }}",
    "much output": "{% for i in range(99999) %}{{ 'abcdefghij'*10 }}{% endfor %}",
    "long date": "{{ strftime_now('%Y'*100000) }}",
    "wide date": "{{ strftime_now('%1000000000Y') }}",
    "endless recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "deep brackets": "{{ " + "(" * 50_000 + ")" * 50_000 + " }}",
    "deep blocks": "{% if 1 %}" * 5000 + "{% endif %}" * 5000,
    "deep list": "{{ " + "[" * 3000 + "]" * 3000 + " }}",
}
ESCAPES = {
    "class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__['sys'] }}",
    "init": "{{ cycler.__init__.__globals__ }}",
    "attribute filter": "{{ (''|attr('__class__')).mro() }}",
    "format": "{{ '{0.__class__.__mro__}'.format('') }}{{ ''.__class__() }}",
    "import of a file": "{% include '/etc/passwd' %}",
    "change of the messages": "{{ messages.append(1) }}",
    "change of a message": "{{ messages[0].update({'role': 'system'}) }}",
}

# Grammars with a high cost in states, memory or compile time, each as (kind, text).
GRAMMARS = {
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
