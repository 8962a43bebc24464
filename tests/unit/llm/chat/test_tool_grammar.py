"""Calls that are forced: an untrained network at temperature 1 writes them in the notation of every family."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import jsonschema
import pytest

from flambeau.llm.chat.chat_format import ChatFormat
from flambeau.llm.chat.deltas import ChatDelta, whole_calls
from flambeau.llm.chat.formats import TOOL_FORMATS
from flambeau.llm.sampling_params import SamplingParams
from flambeau.llm.text.tokenizer import load_tokenizer
from support.structured_output import DIGIT, obj
from support.tiny_models import ARCH, tiny_draft, tiny_engine, tiny_model
from support.tokenizer_files import byte_level_json, write_json_tokenizer

WEATHER = obj(
    ("city", "days"),
    city={"type": "string", "enum": ["Ulm", "Bonn"]},
    note={"type": "string", "maxLength": 4},
    days=DIGIT,
    wet={"type": "boolean"},
    more=obj(a={"type": "array", "items": {"type": ["boolean", "null"]}, "maxItems": 2}),
)
TOOLS = [
    {"type": "function", "function": {"name": "weather", "strict": True, "parameters": WEATHER}},
    {"type": "function", "function": {"name": "time", "strict": True, "parameters": obj(zone=DIGIT)}},
    {"type": "function", "function": {"name": "stop"}},
]
SCHEMAS = {"weather": WEATHER, "time": obj(zone=DIGIT), "stop": {"type": "object", "maxProperties": 0}}
PROMPT = "To be, or not to be"


@cache
def tokenizer(special=()):
    with tempfile.TemporaryDirectory() as folder:
        names = ("<|begin|>", "<|end of text|>", *special)
        return load_tokenizer(
            write_json_tokenizer(
                Path(folder), byte_level_json(names), eos_token="<|end of text|>", bos_token="<|begin|>"
            )
        )


@cache
def engine(special=(), with_draft=False):
    known = tokenizer(special)
    model = tiny_model(replace(ARCH, vocab_size=known.vocab_size + 7, max_length=4096))
    options = {"draft": tiny_draft(model), "speculate_k": 3} if with_draft else {}
    return tiny_engine(model, tokenizer=known, num_blocks=4000, **options)


def special_of(name):
    return tuple(dict.fromkeys((*TOOL_FORMATS[name].markers, "<think>", "</think>")))


def replies(engine, turn, count, **params):
    """What choices of one request say: reasoning, text and calls, with their finish reasons."""
    ids = engine.tokenizer.encode(PROMPT)
    engine.add("r", ids, SamplingParams(n=count, **{"max_tokens": 2000, **params}), turn=turn)
    parsers, found, reasons = [turn.parser() for _ in range(count)], [ChatDelta() for _ in range(count)], [""] * count
    while engine.has_work:
        for output in engine.step():
            assert not output.error
            found[output.index].add(parsers[output.index].take(output.text))
            if output.finish_reason:
                reasons[output.index] = output.finish_reason
                found[output.index].add(parsers[output.index].finish())
    return [
        (delta.reasoning, delta.text, whole_calls(delta.calls), reason)
        for delta, reason in zip(found, reasons, strict=True)
    ]


def check_calls(calls):
    for call in calls:
        jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])


def turn_of(engine, name, **options):
    return ChatFormat.of(engine.tokenizer, name).turn(
        engine.tokenizer, [1], **{"tools": TOOLS, "must_call": True, **options}
    )


PLAIN = ("hermes", "qwen3_coder", "pythonic", "json")  # their markers are text in the vocabularies of real models


@pytest.mark.parametrize("name", [*TOOL_FORMATS])
def test_forced_call_always_holds_its_schema(name):
    made = engine(() if name in PLAIN else special_of(name))
    for _, text, calls, reason in replies(made, turn_of(made, name), 8, seed=1):
        assert (text, reason) == ("", "stop")
        assert calls
        check_calls(calls)
    for _, text, calls, reason in replies(made, turn_of(made, name, is_parallel=False), 8, seed=2):
        assert (text, len(calls), reason) == ("", 1, "stop")
        check_calls(calls)
