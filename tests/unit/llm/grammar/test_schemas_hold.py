"""No text that a schema excludes can be written, also where the compiler alone would allow it; else it is refused."""

from __future__ import annotations

import json
import random
import re
from decimal import Decimal

import pytest

from flambeau.llm.errors import InvalidRequest
from flambeau.llm.grammar.compiler import Grammar, GrammarCompiler
from flambeau.llm.grammar.exact_numbers import is_exact, lower_limit, upper_limit
from flambeau.llm.grammar.patterns import to_rust
from support.structured_output import obj, tokenizer

DRAFT_4 = {"$schema": "http://json-schema.org/draft-04/schema#"}
DRAFT_7 = {"$schema": "http://json-schema.org/draft-07/schema#"}
INTEGER = {"type": "integer"}


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tokenizer(), tokenizer().vocab_size, [tokenizer().eos_id])


@pytest.fixture(scope="module")
def byte_tokens() -> dict[bytes, int]:
    return {tokenizer().visible_bytes(i): i for i in reversed(range(tokenizer().vocab_size))}


@pytest.fixture
def allows(compiler, byte_tokens):
    def allows(form: Grammar | dict, text: str) -> bool:
        matcher = (form if isinstance(form, Grammar) else compiler.compile({"json": form})).start.deep_copy()
        tokens = [byte_tokens[bytes([byte])] for byte in text.encode()]
        return all(not matcher.is_stopped() and matcher.consume_token(token) for token in tokens) and bool(
            matcher.is_accepting()
        )

    return allows


def digits(**limits) -> dict:
    return {"type": "number", **limits}


# schema → a text that is valid, and texts that are not
HELD = [
    # A name may not be written a second time with escapes.
    ({"properties": {"a": INTEGER}, "type": "object"}, '{"a":1,"b":"x"}', ['{"a":1,"\\u0061":"x"}', '{"\\u0061":"x"}']),
    ({"type": "object", "patternProperties": {"^n": INTEGER}}, '{"m":"x"}', ['{"\\u006e":"x"}', '{"n":"x"}']),
    ({"properties": {"a": False}, "type": "object"}, '{"b":1}', ['{"\\u0061":1}']),
    ({"type": "object", "patternProperties": {"^🐲$": INTEGER}}, '{"🐲":1}', ['{"\\ud83d\\udc32":"x"}']),
    # Keywords that belong together, with others between them.
    ({**DRAFT_7, "items": [INTEGER], "allOf": [{}], "additionalItems": False}, "[1]", ["[1,2]", '["a"]']),
    ({**DRAFT_7, "additionalItems": False, "allOf": [{}], "items": [INTEGER]}, "[1]", ["[1,2]", '["a"]']),
    ({**DRAFT_4, "minimum": 5, "allOf": [{}], "exclusiveMinimum": True}, "6", ["5", "4"]),
    ({**DRAFT_4, "exclusiveMaximum": True, "allOf": [{}], "maximum": 5}, "4", ["5", "6"]),
    ({**DRAFT_4, "maximum": 5, "exclusiveMaximum": False}, "5", ["6"]),
    # Numbers to the last digit.
    ({"type": "integer", "minimum": 2**53 + 1}, str(2**53 + 10**5), [str(2**53)]),
    (
        digits(exclusiveMaximum=2083937098282161696),
        "2083937098282100000",
        ["2083937098282161696", "2083937098282161700"],
    ),
    (digits(exclusiveMaximum=939.5813263699567), "939.57", ["939.5813263699567", "939.58132636995671"]),
    (digits(exclusiveMinimum=0, maximum=0.5), "0.25", ["0", "0.0", "-0"]),
    (digits(exclusiveMaximum=0, minimum=-0.5), "-0.25", ["0", "-0", "-0.0"]),
    ({"allOf": [digits(exclusiveMinimum=3), {"maximum": 3.5}]}, "3.25", ["3", "3.0"]),
    ({"type": "integer", "exclusiveMaximum": 1e16}, "9999999999999000", ["10000000000000000"]),
    ({"type": "integer", "maximum": 2**63 - 1}, "9223372036854774784", [str(2**63)]),
    ({"type": "integer", "minimum": -(2**63)}, "-9223372036854774784", [str(-(2**63) - 1)]),
    ({"type": "integer", "format": "int32"}, "-2147483648", ["2147483648", "-2147483649"]),
    ({"type": "integer", "format": "int64"}, "9223372036854774784", [str(2**63), str(-(2**63) - 1)]),
    # Formats.
    (
        {"format": "date", "type": "string"},
        '"2024-02-29"',
        ['"2023-02-29"', '"1900-02-29"', '"2024-02-30"', '"0000-01-01"'],
    ),
    ({"format": "date", "type": "string"}, '"2000-02-29"', ['"2000-13-01"', '"2000-00-10"', '"2000-04-31"']),
    ({"format": "time", "type": "string"}, '"23:59:59Z"', ['"22:59:60Z"', '"24:00:00Z"']),
    (
        {"format": "date-time", "type": "string"},
        '"2024-02-29T23:59:59.5+01:00"',
        ['"2023-02-29T00:00:00Z"', '"1998-12-31T23:58:60Z"'],
    ),
    ({"format": "hostname", "type": "string"}, '"a-b.example"', ['"' + ".".join(["a" * 60] * 5) + '"', '"xn--X"']),
    ({"format": "email", "type": "string"}, '"a@b.example"', ['"' + "a" * 65 + '@b"']),
    ({"format": "email", "type": "string"}, '"a.b@c.d.example"', ['"a@b"', '"a@[127.0.0.1]"']),
    ({"format": "uri", "type": "string"}, '"a:b"', ['"a:"', '"a:?b"']),
    # Patterns mean what they mean in ECMAScript.
    ({"type": "string", "pattern": "^.{3}$"}, '"a c"', ['"a\\nc"', '"a\\rc"', '"a\u2028c"']),
    ({"type": "string", "pattern": r"^\s$"}, '"\u00a0"', ['"\u0085"', '"a"']),
    ({"type": "string", "pattern": r"^\S$"}, '"a"', ['"\ufeff"', '"\u00a0"', '" "']),
    ({"type": "string", "pattern": r"^[^\s]$"}, '"a"', ['"\ufeff"', '"\u0085"', '" "']),
    ({"type": "string", "pattern": r"^\W$"}, '"-"', ['"a"', '"é"']),
    ({"type": "string", "pattern": r"^[^\w]$"}, '"-"', ['"a"', '"é"']),
    ({"type": "string", "pattern": r"^\D$"}, '"-"', ['"1"', '"٣"']),
    ({"type": "string", "pattern": r"^\w$"}, '"a"', ['"é"']),
    ({"type": "string", "pattern": "^[[a]b]$"}, '"[b]"', ['"a"', '"b"']),
    ({"type": "string", "pattern": "^[a&&b]$"}, '"&"', ['"ab"']),
    ({"type": "object", "patternProperties": {"^.$": INTEGER}}, '{"a":1}', ['{"a":"x"}']),
    # What has no effect is no reason to refuse.
    ({"type": "array", "items": INTEGER, "uniqueItems": False, "maxItems": 2}, "[1,1]", ['["a"]']),
    ({"type": "object", "minProperties": 2, "required": ["a"]}, '{"a":1,"b":1}', ['{"a":1}', '{"a":1,"\\u0061":1}']),
    ({"$id": "https://example.org/a", "$defs": {"b": INTEGER}, "$ref": "a#/$defs/b"}, "1", ['"a"']),
]


@pytest.mark.parametrize(("schema", "valid", "invalid"), HELD)
def test_what_a_schema_excludes_cannot_be_written(allows, schema, valid, invalid):
    assert allows(schema, valid)
    assert [text for text in invalid if allows(schema, text)] == []


# schema → the JSON pointer of the part
REFUSED = [
    ({"type": "object", "minProperties": 2, "additionalProperties": INTEGER}, "/minProperties"),
    ({"minProperties": 3, "required": ["a"]}, "/minProperties"),
    ({"prefixItems": [INTEGER], "additionalItems": False}, "/additionalItems"),
    ({**DRAFT_7, "prefixItems": [INTEGER]}, "/prefixItems"),
    ({**DRAFT_7, "dependentRequired": {"a": ["b"]}}, "/dependentRequired"),
    ({**DRAFT_7, "unevaluatedProperties": False}, "/unevaluatedProperties"),
    ({**DRAFT_4, "const": 1}, "/const"),
    ({**DRAFT_4, "if": {"type": "null"}, "then": False}, "/if"),
    (obj(a={**DRAFT_4, "items": {"contains": INTEGER}}), "/properties/a/items/contains"),
    ({"const": 2**53 + 1}, "/const"),
    ({"enum": [{"a": [1e21]}]}, "/enum"),
    ({"const": 989.4135772203481}, "/const"),
    ({"const": "\u0001"}, "/const"),
    ({"$ref": "#/x-a", "x-a": {"type": "string", "maxlength": 2}}, "/$ref"),
    ({"$ref": "#/default", "default": {"multipleOf": 999983}}, "/$ref"),
    ({"type": "string", "format": "unknown"}, "/format"),
    ({"type": "integer", "format": "uint8"}, "/format"),
    ({"type": "string", "pattern": "^[+--]$"}, "/pattern"),
    ({"type": "object", "patternProperties": {".": {}, r"[^\n\r\u2028\u2029]": {}}}, "/patternProperties"),
    (obj(a={"type": "string", "maxLength": "3"}), "/properties/a/maxLength"),
]


@pytest.mark.parametrize(("schema", "pointer"), REFUSED)
def test_what_would_not_hold_is_refused_by_its_pointer(compiler, schema, pointer):
    with pytest.raises(InvalidRequest) as told:
        compiler.compile({"json": json.dumps(schema)})
    assert f"cannot be enforced at {pointer}: " in str(told.value)


def test_schemas_within_a_grammar_are_held_too(compiler, allows):
    grammar = compiler.compile(
        {"grammar": 'start: "%json " %json {"type": "object", "properties": {"a": false}} // %json'}
    )
    assert allows(grammar, '%json {"b":1}')
    assert not allows(grammar, '%json {"\\u0061":1}')
    for schema, told in (
        ('{"type": "string", "maxlength": 3}', "/maxlength"),
        ('{"multipleOf": 999983}', "/multipleOf"),
        ('{"not": {}, "x-guidance": {"lenient": true}}', "/x-guidance"),
        ("{", "cannot be read"),
    ):
        with pytest.raises(InvalidRequest, match=told):
            compiler.compile({"grammar": f'start: "a" %json {schema}'})


def test_arguments_of_a_call_are_an_object(compiler):
    from flambeau.llm.grammar.compiler import read_tool

    for kind in ("array", ["object", "null"]):
        tool = {"function": {"name": "f", "parameters": {"type": kind}, "strict": True}}
        with pytest.raises(InvalidRequest, match=r"'f': .* at /type: "):
            read_tool(tool)
        tool["function"]["strict"] = False
        assert read_tool(tool).schema == {"type": "object"}


def test_limits_move_only_inwards_and_only_by_the_last_digits():
    choose = random.Random(0)
    for _ in range(2000):
        value = choose.choice(
            [choose.uniform(-1e3, 1e3), choose.randint(-(2**62), 2**62), 10.0 ** choose.randint(-30, 18)]
        )
        low, high = Decimal(repr(lower_limit(value))), Decimal(repr(upper_limit(value)))
        given = Decimal(repr(value))
        assert high <= given <= low
        assert low - high <= max(abs(given) * Decimal("1e-13"), Decimal("1e-21"))
        if is_exact(value):
            assert low == high


def test_patterns_of_rust_are_those_of_python_for_ordinary_texts():
    texts = ["", "a", "ab", "a b", "[b]", "x-y", "1.5", "a.b", "]", "^", "a]", "&", "~", "\t"]
    for pattern in (
        r"^a.b$",
        r"[.]",
        r"\.",
        r"^[^]a]$",
        r"[\]a]",
        r"^[\w.-]+$",
        r"^\s*$",
        r"^(a|b)*$",
        r"\[b",
    ):
        translated = to_rust(pattern)
        assert [bool(re.search(pattern, text)) for text in texts] == [
            bool(re.search(translated, text)) for text in texts
        ]
