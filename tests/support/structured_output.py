"""An engine with an untrained network and a small byte-level vocabulary, and schemas with what they must refuse."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from flambeau.llm.engine import Engine
from flambeau.llm.text.tokenizer import Tokenizer, load_tokenizer
from support.async_backend import AsyncEagerBackend
from support.tiny_heads import tiny_head
from support.tiny_models import ARCH, tiny_draft, tiny_engine, tiny_model
from support.tokenizer_files import byte_level_json, write_json_tokenizer

PROMPT = "To be, or not to be"
SPECULATIONS: dict[str, dict[str, Any]] = {  # options of an engine, by how it proposes tokens
    "plain": {},
    "ahead": {"kind": AsyncEagerBackend},
    "draft": {"with_draft": True, "speculate_k": 3},
    "ngram": {"speculation": "ngram"},
    "head": {"with_head": True, "speculate_k": 3},
}


@cache
def tokenizer() -> Tokenizer:
    with tempfile.TemporaryDirectory() as folder:
        return load_tokenizer(write_json_tokenizer(Path(folder), byte_level_json(), eos_token="<|end|>"))


@cache
def model() -> Any:
    # More tokens than the tokenizer has, as in real models: they are never chosen.
    return tiny_model(replace(ARCH, vocab_size=tokenizer().vocab_size + 7, max_length=4096))


@cache
def draft() -> Any:
    return tiny_draft(model())


@cache
def head() -> Any:
    return tiny_head("eagle3", model(), draft_vocab_size=64)


def structured_engine(*, with_draft: bool = False, with_head: bool = False, **options: Any) -> Engine:
    return tiny_engine(
        model(),
        tokenizer=tokenizer(),
        draft=draft() if with_draft else None,
        num_blocks=4000,
        head=head() if with_head else None,
        **options,
    )


def obj(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": [*required] or [*properties],
        "additionalProperties": False,
    }


WORD = {"type": "string", "maxLength": 6}
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}

# Written from the specification (2020-12; a few in the form of earlier drafts): each keyword that is enforced.
SCHEMAS: dict[str, Any] = {
    "null": {"type": "null"},
    "boolean": {"type": "boolean"},
    "integer": {"type": "integer", "minimum": -1000, "maximum": 1000},
    "number": {"type": "number", "minimum": -1.5, "maximum": 2.25},
    "exclusive": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "exclusive integer": {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 5},
    "draft-4 exclusive": {
        "$schema": "http://json-schema.org/draft-04/schema#",
        "type": "integer",
        "minimum": 5,
        "exclusiveMinimum": True,
        "maximum": 7,
    },
    "multiple of an integer": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 500},
    "multiple of a fraction": {"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 50},
    "short string": {"type": "string", "minLength": 2, "maxLength": 5},
    "empty string": {"type": "string", "maxLength": 0},
    "pattern": {"type": "string", "pattern": "^[a-z]{2,4}-[0-9]{2}$"},
    "pattern without anchors": {"type": "string", "pattern": "b[0-9]", "maxLength": 8},
    "date": {"type": "string", "format": "date"},
    "time": {"type": "string", "format": "time"},
    "date-time": {"type": "string", "format": "date-time"},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "const text": {"const": 'a"b\\c\n'},
    "const number": {"const": 1.5},
    "const object": {"const": {"a": [1, None, {"b": "c"}]}},
    "enum of all types": {"enum": [1, "two", None, True, [3], {"four": 4}]},
    "enum and type": {"type": "string", "enum": ["a", "b"]},
    "several types": {"type": ["null", "boolean"]},
    "array": {"type": "array", "items": DIGIT, "maxItems": 4},
    "array of at least": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3},
    "empty array": {"type": "array", "maxItems": 0},
    "tuple": {"type": "array", "prefixItems": [WORD, DIGIT], "items": False, "minItems": 2},
    "tuple with rest": {"type": "array", "prefixItems": [WORD], "items": DIGIT, "minItems": 1, "maxItems": 3},
    "draft-7 tuple": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "array",
        "items": [WORD, DIGIT],
        "additionalItems": False,
        "minItems": 2,
    },
    "object": obj(name=WORD, age=DIGIT),
    "optional property": obj(("a",), a=DIGIT, b=DIGIT),
    "required without properties": {
        "type": "object",
        "required": ["x"],
        "additionalProperties": DIGIT,
        "maxProperties": 2,
    },
    "additional properties": {
        "type": "object",
        "properties": {"a": DIGIT},
        "required": ["a"],
        "additionalProperties": {"type": "boolean"},
        "maxProperties": 3,
    },
    "min properties": {"type": "object", "minProperties": 1, "maxProperties": 2, "additionalProperties": DIGIT},
    "pattern properties": {
        "type": "object",
        "patternProperties": {"^n[0-9]$": DIGIT, "^s[0-9]$": WORD},
        "additionalProperties": False,
        "maxProperties": 3,
    },
    "names that need escapes": obj(**{'q"uote': DIGIT, "back\\slash": DIGIT, "ünï ☃": DIGIT}),
    "nested": obj(a=obj(b=obj(c={"type": "array", "items": obj(d=DIGIT), "maxItems": 2}))),
    "anyOf": {"anyOf": [DIGIT, {"type": "null"}]},
    "anyOf of objects": {"anyOf": [obj(a=DIGIT), obj(b=WORD)]},
    "oneOf that cannot overlap": {"oneOf": [DIGIT, WORD]},
    "oneOf by a constant": {"oneOf": [obj(kind={"const": "a"}, x=DIGIT), obj(kind={"const": "b"}, y=WORD)]},
    "allOf": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]},
    "allOf of objects": {
        "allOf": [
            {"type": "object", "properties": {"a": DIGIT}, "required": ["a"]},
            {"properties": {"b": DIGIT}, "required": ["b"]},
        ],
        "maxProperties": 2,
    },
    "ref": {"$ref": "#/$defs/digit", "$defs": {"digit": DIGIT}},
    "ref and siblings": {"$ref": "#/$defs/n", "maximum": 4, "$defs": {"n": {"type": "integer", "minimum": 2}}},
    "definitions": obj(a={"$ref": "#/definitions/w"}) | {"definitions": {"w": WORD}},
    "ref to a property": obj(a=DIGIT, b={"$ref": "#/properties/a"}),
    "list that contains itself": {
        "$ref": "#/$defs/node",
        "$defs": {"node": obj(v=DIGIT, next={"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]})},
    },
    "annotations": DIGIT
    | {"title": "t", "description": "d", "default": 1, "examples": [2], "deprecated": True, "x-order": 3},
    "as Pydantic writes it": {
        "$defs": {"Color": {"enum": ["red", "green"], "title": "Color", "type": "string"}},
        "properties": {
            "color": {"$ref": "#/$defs/Color"},
            "size": {"anyOf": [DIGIT, {"type": "null"}], "default": None, "title": "Size"},
        },
        "required": ["color", "size"],
        "additionalProperties": False,
        "title": "Thing",
        "type": "object",
    },
}

# schema → the JSON pointer of the part that cannot be enforced
REFUSED: list[tuple[Any, str]] = [
    ({"not": {"type": "null"}}, "/not"),
    ({"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}, "/properties/a/uniqueItems"),
    ({"if": {"type": "null"}, "then": False}, "/if"),
    (obj(a={"type": "array", "contains": DIGIT}), "/properties/a/contains"),
    ({"anyOf": [{"type": "null"}, {"type": "object", "propertyNames": WORD}]}, "/anyOf/1/propertyNames"),
    ({"type": "object", "dependentRequired": {"a": ["b"]}}, "/dependentRequired"),
    ({"type": "object", "unevaluatedProperties": False}, "/unevaluatedProperties"),
    ({"$ref": "#/$defs/a", "$defs": {"a": obj(b={"type": "string", "format": "zip"})}}, "/$defs/a/properties/b/format"),
    (obj(**{"a/b~c": {"type": "string", "pattern": "(?=a)b"}}), "/properties/a~1b~0c/pattern"),
    (obj(a={"oneOf": [WORD, {"type": "string", "minLength": 2}]}), "/properties/a/oneOf"),
    ({"items": {"type": "fish"}}, "/items/type"),
    (obj(a={"$ref": "#/$defs/none"}), "/properties/a/$ref"),
    ({"$ref": "https://example.org/schema"}, "/$ref"),
    (obj(a={"type": "string", "maxlength": 3}), "/properties/a/maxlength"),
    (obj(a={"type": "string", "nullable": True}), "/properties/a/nullable"),
    ({"x-guidance": {"lenient": True}, "not": {}}, "/x-guidance"),
    (obj(a={"type": "integer", "multipleOf": 999983}), "/properties/a/multipleOf"),
    (obj(a={"type": "string", "minLength": 5, "maxLength": 3}), "/properties/a"),
    ({"prefixItems": [True, 5]}, "/prefixItems/1"),
    ({"type": "object", "properties": {"a": DIGIT}, "maxProperties": 1}, "its root"),
    (False, "its root"),
    ({"$ref": "#"}, "its root"),
]
