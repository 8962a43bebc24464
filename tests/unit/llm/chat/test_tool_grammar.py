"""Calls that are forced: an untrained network at temperature 1 writes them in the notation of every family."""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import jsonschema
import pytest
import torch

from flambeau.llm.backends.eager import WholeAttention
from flambeau.llm.chat.chat_format import ChatFormat
from flambeau.llm.chat.deltas import ChatDelta, whole_calls
from flambeau.llm.chat.formats import TOOL_FORMATS
from flambeau.llm.errors import InvalidRequest
from flambeau.llm.grammar.compiler import GrammarCompiler
from flambeau.llm.sampling_params import SamplingParams
from flambeau.llm.text.tokenizer import load_tokenizer
from support.statistics import chi_square_p
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
    model = tiny_model(replace(ARCH, vocab_size=known.vocab_size + 7, num_layers=1, max_length=4096))
    options = {"draft": tiny_draft(model), "speculate_k": 3} if with_draft else {}
    return tiny_engine(model, tokenizer=known, num_blocks=4000, **options)


def special_of(name):
    return tuple(dict.fromkeys((*TOOL_FORMATS[name].markers, "<think>", "</think>")))


def replies(engine, turn, count, **params):
    """What choices of one request say: reasoning, text and calls, with their finish reasons."""
    [found] = replies_of(engine, [(turn, count, params)])
    return found


def replies_of(engine, requests):
    """The same of several requests, which run together."""
    ids = engine.tokenizer.encode(PROMPT)
    parsers, found, reasons = {}, {}, {}
    for number, (turn, count, params) in enumerate(requests):
        params = SamplingParams(n=count, **{"max_tokens": 2000, **params})
        engine.add(f"{number}", ids, params, turn=turn)
        for index in range(count):
            key = f"{number}", index
            parsers[key], found[key], reasons[key] = turn.parser(), ChatDelta(), ""
    while engine.has_work:
        for output in engine.step():
            assert not output.error
            key = output.request_id, output.index
            found[key].add(parsers[key].take(output.text))
            if output.finish_reason:
                reasons[key] = output.finish_reason
                found[key].add(parsers[key].finish())
    said: list[list] = [[] for _ in requests]
    for key, delta in found.items():
        said[int(key[0])].append((delta.reasoning, delta.text, whole_calls(delta.calls), reasons[key]))
    return said


def check_calls(calls):
    for call in calls:
        jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])


def turn_of(engine, name, reasoning="none", **options):
    return ChatFormat.of(engine.tokenizer, name, reasoning).turn(
        engine.tokenizer, [1], **{"tools": TOOLS, "must_call": True, **options}
    )


SEEDS = {"minimax_m2": 6, "deepseek_v32": 2, "deepseek_v4": 6}  # others make more calls than fit into 2,000 tokens
PLAIN = ("hermes", "qwen3_coder", "pythonic", "json")  # their markers are text in the vocabularies of real models


@pytest.mark.parametrize("name", [*TOOL_FORMATS])
def test_forced_call_always_holds_its_schema(name):
    made = engine(() if name in PLAIN else special_of(name))
    requests = [
        (turn_of(made, name), 5, {"seed": SEEDS.get(name, 1)}),
        (turn_of(made, name, is_parallel=False), 3, {"seed": 2}),
    ]
    several, single = replies_of(made, requests)
    for _, text, calls, reason in several:
        assert (text, reason) == ("", "stop")
        assert calls
        check_calls(calls)
    for _, text, calls, reason in single:
        assert (text, len(calls), reason) == ("", 1, "stop")
        check_calls(calls)


NOTE = [
    {
        "type": "function",
        "function": {"name": "note", "parameters": obj(text={"type": "string"}, day=DIGIT), "strict": True},
    }
]
WRITTEN = {
    "harmony": '<|channel|>commentary to=functions.note <|constrain|>json<|message|>{"text": "a<b", "day": 3}',
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>note\n```json\n"
    '{"text": "a<b", "day": 3}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>note<｜tool▁sep｜>"
    '{"text": "a<b", "day": 3}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "mistral_args": '[TOOL_CALLS]note[ARGS]{"text": "a<b", "day": 3}',
    "mistral": '[TOOL_CALLS][{"name": "note", "arguments": {"text": "a<b", "day": 3}}]',
    "qwen3_coder": "<tool_call>\n<function=note>\n<parameter=text>\na<b\n</parameter>\n<parameter=day>\n3\n"
    "</parameter>\n</function>\n</tool_call>",
    "glm": "<tool_call>note\n<arg_key>text</arg_key>\n<arg_value>a<b</arg_value>\n<arg_key>day</arg_key>\n"
    "<arg_value>3</arg_value>\n</tool_call>",
    "hy_v4": "<tool_calls:opensource>\n<tool_call:opensource>note<arg_key:opensource>text</arg_key:opensource>"
    "<arg_value:opensource>a<b</arg_value:opensource><arg_key:opensource>day</arg_key:opensource>"
    "<arg_value:opensource>3</arg_value:opensource></tool_call:opensource>\n</tool_calls:opensource>",
    "hy_v3_preview": "<tool_calls>\n<tool_call>note<tool_sep>\n<arg_key>text</arg_key>\n<arg_value>a<b</arg_value>\n"
    "<arg_key>day</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n</tool_calls>",
    "gemma4": '<|tool_call>call:note{text:<|"|>a<b<|"|>,day:3}<tool_call|>',
    "functiongemma": "<start_function_call>call:note{text:<escape>a<b<escape>,day:3}<end_function_call>",
    "hermes": '<tool_call>\n{"name": "note", "arguments": {"text": "a<b", "day": 3}}\n</tool_call>',
    "pythonic": '[note(text="a<b", day=3)]',
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.note:0<|tool_call_argument_begin|>"
    '{"text": "a<b", "day": 3}<|tool_call_end|><|tool_calls_section_end|>',
    "minimax_m2": '<minimax:tool_call>\n<invoke name="note">\n<parameter name="text">a<b</parameter>\n'
    '<parameter name="day">3</parameter>\n</invoke>\n</minimax:tool_call>',
    "seed_oss": "<seed:tool_call>\n<function=note>\n<parameter=text>a<b</parameter>\n<parameter=day>3</parameter>\n"
    "</function>\n</seed:tool_call>",
    "deepseek_v32": (
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="note">\n'
        '<｜DSML｜parameter name="text" string="true">a<b</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="day" string="false">3</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>"
    ),
    "command_r": 'Action: ```json\n[{"tool_name": "note", "parameters": {"text": "a<b", "day": 3}}]\n```',
    "command": '<|START_ACTION|>[{"tool_name": "note", "parameters": {"text": "a<b", "day": 3}}]<|END_ACTION|>',
    "nemotron": '<TOOLCALL>[{"name": "note", "arguments": {"text": "a<b", "day": 3}}]</TOOLCALL>',
    "longcat": '<longcat_tool_call>\n{"name": "note", "arguments": {"text": "a<b", "day": 3}}\n</longcat_tool_call>',
    "tool_calls": '<tool_calls>[{"name": "note", "arguments": {"text": "a<b", "day": 3}}]</tool_calls>',
    "granite": '<|tool_call|>[{"name": "note", "arguments": {"text": "a<b", "day": 3}}]',
    "phi4_mini": 'functools[{"name": "note", "arguments": {"text": "a<b", "day": 3}}]',
    "internlm": '<|action_start|><|plugin|>{"name": "note", "parameters": {"text": "a<b", "day": 3}}<|action_end|>',
    "lfm2": '<|tool_call_start|>[note(text="a<b", day=3)]<|tool_call_end|>',
    "olmo3": '<function_calls>\nnote(text="a<b", day=3)\n</function_calls>',
    "apertus": '<|tools_prefix|>[{"note": {"text": "a<b", "day": 3}}]<|tools_suffix|>',
    "glm4": 'note\n{"text": "a<b", "day": 3}',
    "llama3_json": '{"name": "note", "parameters": {"text": "a<b", "day": 3}}',
}


@pytest.mark.parametrize("has_special", [False, True], ids=["text", "special"])
@pytest.mark.parametrize("must_call", [True, False], ids=["required", "auto"])
@pytest.mark.parametrize("name", [*WRITTEN])
def test_grammar_accepts_what_the_family_writes_and_nothing_else(name, must_call, has_special):
    known = tokenizer(special_of(name) if has_special else ())
    compiler = GrammarCompiler(known, known.vocab_size, known.eos_ids)
    turn = ChatFormat.of(known, name, "auto" if name == "harmony" else "think").turn(
        known, [], tools=NOTE, must_call=must_call
    )
    start = (
        "<|channel|>analysis<|message|>Hm: {<|end|><|start|>assistant"
        if name == "harmony"
        else "<think>Hm: {</think>\n"
    )
    for thought in ("", start):
        text = thought + WRITTEN[name]
        assert accepts(compiler, turn, known, text)
        assert not accepts(compiler, turn, known, text.replace("3", "x")), text
        parser, found = turn.parser(), ChatDelta()
        detokenizer = known.detokenizer([], marker_texts=turn.format.marker_texts)
        found.add(parser.take(detokenizer.push(known.encode_with_special(text))))
        found.add(parser.finish())
        [call] = whole_calls(found.calls)
        assert (call.name, json.loads(call.arguments)) == ("note", {"text": "a<b", "day": 3})
        assert (found.reasoning, found.text) == ("Hm: {" if thought else "", "")


def accepts(compiler, turn, known, text):
    matcher = compiler.compile_reply(turn, None).matcher(ignore_eos=False)
    ids = known.encode_with_special(text)
    matcher.read_to_end(ids)
    return not matcher.error


def thinking_turn(made, name="hermes", **options):
    """A model that thinks, by its chat template."""
    reasoning = "auto" if name == "harmony" else "think"
    return turn_of(made, name, reasoning, **options)


@pytest.mark.parametrize("name", ["hermes", "harmony", "deepseek_v31"])
def test_reasoning_is_free_and_within_its_budget_before_a_forced_call(name):
    made = engine(special_of(name))
    turn = replace(
        thinking_turn(made, name, max_reasoning_tokens=20, is_parallel=False), starts_in_thought=name != "harmony"
    )
    thoughts = []
    for reasoning, text, calls, reason in replies(made, turn, 8, seed=3):
        assert (text, reason) == ("", "stop")
        assert calls
        check_calls(calls)
        thoughts.append(reasoning)
    assert any(thoughts)


@pytest.mark.parametrize("with_draft", [False, True])
@pytest.mark.parametrize("limit", [0, 1, 7])
def test_budget_ends_a_thought_and_the_answer_keeps_its_form(limit, with_draft):
    made = engine(("<think>", "</think>"), with_draft)
    turn = replace(thinking_turn(made, tools=(), must_call=False, max_reasoning_tokens=limit), starts_in_thought=True)
    form = {"json": json.dumps(obj(a=DIGIT))}
    for reasoning, text, _, reason in replies(made, turn, 12, seed=4, structured_outputs=form):
        assert reason == "stop"
        assert json.loads(text)["a"] in range(10)
        assert len(made.tokenizer.encode(reasoning, add_special=False)) <= limit * 8  # the text is cut otherwise there
    free = replies(made, turn, 4, seed=4, max_tokens=limit + 20)
    assert all(text for _, text, _, _ in free)
    if limit == 0:
        assert not any(reasoning for reasoning, *_ in free)


def test_model_that_does_not_think_yet_is_not_cut_short():
    made = engine(("<think>", "</think>"))
    turn = thinking_turn(made, tools=(), must_call=False, max_reasoning_tokens=2)
    bias = {made.tokenizer.special_id("<think>"): -100}
    for reasoning, text, _, reason in replies(made, turn, 3, seed=4, max_tokens=30, ignore_eos=True, logit_bias=bias):
        assert (reasoning, reason) == ("", "length")
        assert "</think>" not in text


@pytest.mark.parametrize("name", ["hermes", "mistral", "llama3_json", "harmony"])
def test_strict_call_by_choice_holds_its_schema(name):
    special = special_of(name)
    made = engine(special)
    turn = turn_of(made, name, must_call=False)
    bias = {made.tokenizer.special_id(marker): 5 for marker in TOOL_FORMATS[name].markers[:2]}
    found = replies(made, turn, 12, seed=5, max_tokens=300, logit_bias=bias)
    for *_, calls, reason in found:
        if reason == "stop":
            check_calls(calls)
    assert any(calls for *_, calls, _ in found) or name == "llama3_json"


def test_one_call_alone_by_choice():
    made = engine(special_of("mistral_args"))
    bias = {made.tokenizer.special_id("[TOOL_CALLS]"): 6}
    turn = turn_of(made, "mistral_args", must_call=False, is_parallel=False)
    found = replies(made, turn, 10, seed=6, max_tokens=300, logit_bias=bias)
    assert {len(calls) for *_, calls, reason in found if reason == "stop"} <= {0, 1}
    assert any(calls for *_, calls, _ in found)


def test_answer_has_its_form_or_is_a_call():
    made = engine(special_of("mistral"))
    turn = turn_of(made, "mistral", must_call=False)
    form = {"choice": ["yes", "no"]}
    bias = {made.tokenizer.special_id("[TOOL_CALLS]"): 4}
    kinds = set()
    for _, text, calls, _ in replies(made, turn, 16, seed=7, structured_outputs=form, logit_bias=bias):
        check_calls(calls)
        assert text in (("",) if calls else ("yes", "no"))
        kinds.add(bool(calls))
    assert kinds == {True, False}


def test_speculation_changes_no_greedy_call():
    plain, drafted = engine(special_of("mistral")), engine(special_of("mistral"), with_draft=True)
    options = {"temperature": 0, "max_tokens": 400}
    [expected] = replies(plain, turn_of(plain, "mistral", is_parallel=False), 1, **options)
    [found] = replies(drafted, turn_of(drafted, "mistral", is_parallel=False), 1, **options)
    assert found == expected
    for _, text, calls, reason in replies(drafted, turn_of(drafted, "mistral", is_parallel=False), 12, seed=8):
        assert (text, len(calls), reason) == ("", 1, "stop")
        check_calls(calls)


@pytest.mark.parametrize(
    ("name", "schema", "told"),
    [
        ("hermes", {"type": "object", "properties": {"a": {"not": {}}}}, "/properties/a/not"),
        ("glm", obj(a={"type": "string", "pattern": "^a$"}), "/properties/a/pattern"),
        ("pythonic", {"type": "object", "anyOf": [obj(a=DIGIT)]}, "/anyOf"),
    ],
)
def test_strict_tool_that_cannot_be_enforced_is_refused_by_name(name, schema, told):
    made = engine()
    tool = {"type": "function", "function": {"name": "odd", "strict": True, "parameters": schema}}
    with pytest.raises(InvalidRequest, match="'odd'") as refused:
        replies(made, turn_of(made, name, tools=[tool]), 1)
    assert told in str(refused.value)
    del tool["function"]["strict"]
    [(_, _, [call], _)] = replies(made, turn_of(made, name, tools=[tool], is_parallel=False), 1, seed=1, max_tokens=60)
    assert call.name == "odd"


@pytest.mark.parametrize("with_draft", [False, True])
def test_forced_arguments_have_the_networks_own_distribution(with_draft):
    """Among draws with the same text before it, a digit has the network's probability among all digits."""
    made = engine(special_of("mistral_args"), with_draft)
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": obj(a={"enum": [*range(10)]})}}
    turn = turn_of(made, "mistral_args", tools=[tool], is_parallel=False)
    ids = made.tokenizer.encode(PROMPT)
    *start, colon = made.tokenizer.encode_with_special('[TOOL_CALLS]f[ARGS]{"a":')
    digits = [made.tokenizer.encode(str(digit), add_special=False)[0] for digit in range(10)]
    spaces = [i for i in range(made.tokenizer.vocab_size) if made.tokenizer.visible_bytes(i).isspace()]
    drawn: dict[str, list[int]] = {}
    for number in range(600):
        drawn[str(number)] = []
        params = SamplingParams(max_tokens=len(start) + 2, logit_bias=dict.fromkeys(spaces, -100))
        made.add(str(number), ids, params, generated=[start], turn=turn, seed=number)
    while made.has_work:
        for output in made.step():
            drawn[output.request_id] += output.token_ids
    found = [digits.index(tokens[1]) for tokens in drawn.values() if tokens[0] == colon and tokens[1] in digits]
    tokens = torch.tensor([*ids, *start, colon])
    with torch.inference_mode():
        network = made.model
        logits = network.logits(network(tokens, torch.arange(len(tokens)), WholeAttention())[-1])
    shares = logits[digits].double().softmax(-1).tolist()
    assert len(found) > 500
    expected = [share * len(found) for share in shares]
    assert chi_square_p([found.count(digit) for digit in range(10)], expected) > 1e-4
