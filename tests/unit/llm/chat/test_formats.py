"""Every family: reasoning, answer and calls, whole and however the text is divided."""

from __future__ import annotations

import json
import random
import time
from itertools import pairwise

import pytest

from flambeau.llm.chat.call_notations import NOTATIONS
from flambeau.llm.chat.chat_format import ChatFormat
from flambeau.llm.chat.deltas import CallDelta, ChatDelta, whole_calls
from flambeau.llm.chat.formats import REASONING_FORMATS, TOOL_FORMATS, find_reasoning_format, find_tool_format
from flambeau.llm.chat.stream_parser import MARK, ParserOptions, StreamParser, is_json

TOOLS = {
    "weather": {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "more": {"type": "object"}},
    },
    "time": {"type": "object", "properties": {}},
    "brave_search": {},
}
ULM = ("weather", {"city": "Ulm"})
TIME = ("time", {})
THINK = REASONING_FORMATS["think"].markers


def parse(name, text, cuts=(), **options):
    """The reasoning, text and calls of a text that comes in pieces."""
    parser = TOOL_FORMATS[name].parser(ParserOptions(tools=TOOLS, **{"thought": THINK, **options}))
    whole = ChatDelta()
    places = [0, *sorted(cuts), len(text)]
    for start, end in pairwise(places):
        whole.add(parser.take(text[start:end]))
    whole.add(parser.finish())
    assert parser.has_called == bool(whole.calls)
    assert parser.ends_in_call == bool(whole.calls and not is_json(whole_calls(whole.calls)[-1].arguments))
    return whole.reasoning, whole.text, [(call.name, call.arguments) for call in whole_calls(whole.calls)]


HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
LLAMA = '{"name": "weather", "parameters": {"city": "Ulm"}}'
CODER = "<tool_call>\n<function=weather>\n<parameter=city>\nUlm\n</parameter>\n</function>\n</tool_call>"
GLM = "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Ulm</arg_value>\n</tool_call>"
HY_3 = (
    "<tool_calls>\n<tool_call>weather<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>Ulm</arg_value>\n</tool_call>\n"
    "<tool_call>time<tool_sep>\n</tool_call>\n</tool_calls>"
)
HY_4 = (
    "<tool_calls:opensource>\n<tool_call:opensource>weather<arg_key:opensource>city</arg_key:opensource>"
    "<arg_value:opensource>Ulm</arg_value:opensource></tool_call:opensource>\n"
    "<tool_call:opensource>time</tool_call:opensource>\n</tool_calls:opensource>"
)
V3 = (
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{"city": "Ulm"}\n```'
    "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>time\n```json\n{}\n```<｜tool▁call▁end｜>"
    "<｜tool▁calls▁end｜>"
)
V31 = (
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "Ulm"}<｜tool▁call▁end｜>'
    "<｜tool▁call▁begin｜>time<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
)
GEMMA = "<start_function_call>call:weather{city:<escape>Ulm<escape>}<end_function_call>"
GEMMA4 = '<|tool_call>call:weather{city:<|"|>Ulm<|"|>}<tool_call|>'
ANALYSIS = "<|channel|>analysis<|message|>Hm, Ulm.<|end|><|start|>assistant"
HARMONY = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Ulm"}<|call|>'

LINES = 'weather(city="Ulm")\ntime()'
LONGCAT = HERMES.replace("tool_call>", "longcat_tool_call>")
CALL = '{"name": "weather", "arguments": {"city": "Ulm"}}'
KIMI = (
    '<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{"city": "Ulm"}'
    "<|tool_call_end|><|tool_call_begin|>functions.time:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
    "<|tool_calls_section_end|>"
)
MINIMAX = (
    '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Ulm</parameter>\n</invoke>\n'
    '<invoke name="time">\n</invoke>\n</minimax:tool_call>'
)
SEED = "<seed:tool_call>\n<function=weather>\n<parameter=city>Ulm</parameter>\n</function>\n</seed:tool_call>"
COMMAND = (
    '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "weather", "parameters": {"city": "Ulm"}},\n'
    '    {"tool_call_id": "1", "tool_name": "time", "parameters": {}}\n]<|END_ACTION|>'
)
D = "｜DSML｜"
DSML = (
    f'<{D}function_calls>\n<{D}invoke name="weather">\n<{D}parameter name="city" string="true">Ulm</{D}parameter>\n'
    f'</{D}invoke>\n<{D}invoke name="time">\n</{D}invoke>\n</{D}function_calls>'
)
TYPES = (
    f'<{D}parameter name="x" string="true">3\n</{D}parameter>'
    f'<{D}parameter name="y" string="false">[1, true]</{D}parameter>'
)
ACTION = (
    'Action: ```json\n[\n    {\n        "tool_name": "weather",\n        "parameters": {\n            "city": "Ulm"\n'
    '        }\n    },\n    {\n        "tool_name": "time",\n        "parameters": {}\n    }\n]\n```'
)

# family, text, reasoning, answer, calls
CASES = [
    ("hermes", "Hello.", "", "Hello.", []),
    ("hermes", "", "", "", []),
    ("hermes", "  \n", "", "  \n", []),
    ("hermes", HERMES, "", "", [ULM]),
    ("hermes", f"Let me see.\n{HERMES}", "", "Let me see.", [ULM]),
    ("hermes", f"{HERMES}\n{HERMES}\n", "", "", [ULM, ULM]),
    ("hermes", f"a {HERMES} b", "", "a b", [ULM]),
    ("hermes", HERMES.removesuffix("\n</tool_call>"), "", "", [ULM]),
    ("hermes", '<tool_call>{"name": "time"}</tool_call>', "", "", [TIME]),
    ("hermes", '<tool_call>{"name": "other", "arguments": {}}</tool_call>', "", "", [("other", {})]),
    ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "time"}</tool_call>', "", "", [("time", {"a": 1})]),
    ("hermes", '<tool_call>{"name": "time", "arguments": "{\\"a\\": 1}"}</tool_call>', "", "", [("time", {"a": 1})]),
    ("hermes", '<tool_call>{"name": "time", "arguments": ""}</tool_call>', "", "", [TIME]),
    ("hermes", '<tool_call>{"name": "time", "arguments": null}</tool_call>', "", "", [TIME]),
    (
        "hermes",
        '<tool_call>{"name": "time", "arguments": {"a": "x\ny"}}</tool_call>',
        "",
        "",
        [("time", {"a": "x\ny"})],
    ),
    (
        "hermes",
        '<tool_call>{"name": "time", "arguments": {"a": "</tool_call>", "b": "\\"}{"}}</tool_call>.',
        "",
        ".",
        [("time", {"a": "</tool_call>", "b": '"}{'})],
    ),
    ("hermes", f"<tool_call>[{LLAMA}, {LLAMA}]</tool_call>.", "", ".", [ULM, ULM]),
    ("hermes", f"<tool_call>\n{LLAMA}\n{LLAMA}\n</tool_call>", "", "", [ULM, ULM]),
    ("hermes", f"<tool_call>oops {HERMES} b", "", "<tool_call>oops b", [ULM]),
    ("hermes", "x <tool_call>{no}</tool_call> y", "", "x <tool_call>{no}</tool_call> y", []),
    ("hermes", "<tool_call>[1]</tool_call>", "", "<tool_call>[1]</tool_call>", []),
    ("hermes", '<tool_call>{"name": "a b"}</tool_call>', "", '<tool_call>{"name": "a b"}</tool_call>', []),
    ("hermes", "a < b, <tool", "", "a < b, <tool", []),
    ("hermes", LLAMA, "", LLAMA, []),  # only tags make a call
    ("json", LLAMA, "", "", [ULM]),
    ("json", HERMES, "", "", [ULM]),
    ("json", '{"name": "Ann", "age": 7}', "", '{"name": "Ann", "age": 7}', []),
    ("json", f"Try {LLAMA}", "", f"Try {LLAMA}", []),
    ("json", '{"na', "", '{"na', []),
    ("json", "[1, 2]", "", "[1, 2]", []),
    # reasoning
    ("hermes", f"<think>\nMaybe {HERMES}?\n</think>\n\nNo.", f"Maybe {HERMES}?", "No.", []),
    ("hermes", f"<think>Hm.</think>\n{HERMES}", "Hm.", "", [ULM]),
    ("hermes", f"<think>{HERMES}", HERMES, "", []),
    ("hermes", f"{HERMES}<think>again?</think>", "again?", "", [ULM]),
    ("hermes", "Write <think> first.", "", "Write <think> first.", []),
    ("hermes", "<think></think>Yes.", "", "Yes.", []),
    # between markers
    ("kimi_k2", f"Let me see.{KIMI}", "", "Let me see.", [ULM, TIME]),
    ("kimi_k2", KIMI.removesuffix("<|tool_calls_section_end|>"), "", "", [ULM, TIME]),
    ("kimi_k2", KIMI.replace("functions.", "").replace(":0", ""), "", "", [ULM, TIME]),
    ("minimax_m2", f"<think>Hm.</think>\n\nSo.\n{MINIMAX}", "Hm.", "So.", [ULM, TIME]),
    ("minimax_m2", MINIMAX.replace("Ulm", '{"a": "<b>"}\n'), "", "", [("weather", {"city": '{"a": "<b>"}'}), TIME]),
    ("minimax_m2", MINIMAX.partition(' name="time"')[0], "", "", [ULM]),
    ("minimax_m2", "<minimax:tool_call> is a marker", "", "<minimax:tool_call> is a marker", []),
    ("seed_oss", f"So. {SEED}", "", "So.", [ULM]),
    ("deepseek_v32", f"<think>Hm.</think>So.\n\n{DSML}", "Hm.", "So.", [ULM, TIME]),
    ("deepseek_v32", DSML.replace("function_calls", "tool_calls"), "", "", [ULM, TIME]),
    ("deepseek_v4", DSML.replace("function_calls", "tool_calls"), "", "", [ULM, TIME]),
    (
        "deepseek_v32",
        f'<{D}function_calls><{D}invoke name="time">{TYPES}</{D}invoke></{D}function_calls>',
        "",
        "",
        [("time", {"x": "3\n", "y": [1, True]})],
    ),
    ("deepseek_v32", f"<{D}function_calls> are tags", "", f"<{D}function_calls> are tags", []),
    ("deepseek_v32", f"Tags have <{D}", "", f"Tags have <{D}", []),
    ("command_r", f"{ACTION}\n", "", "", [ULM, TIME]),
    ("command_r", f"Plan: I ask.\n{ACTION}", "", "Plan: I ask.", [ULM, TIME]),
    ("command_r", ACTION.replace("weather", "directly_answer"), "", ACTION.replace("weather", "directly_answer"), []),
    ("command_r", "Action: none.", "", "Action: none.", []),
    ("command", f"{COMMAND}\n", "", "", [ULM, TIME]),
    ("command", "Yes.", "", "Yes.", []),
    ("nemotron", f"So.\n<TOOLCALL>[{CALL}, {CALL}]</TOOLCALL>\n", "", "So.", [ULM, ULM]),
    ("nemotron", f"<TOOLCALL>{CALL}", "", "", [ULM]),
    ("tool_calls", f"<think>Hm.</think><tool_calls>[{CALL}]</tool_calls>", "Hm.", "", [ULM]),
    ("longcat", f"So.\n{LONGCAT}\n{LONGCAT}\n", "", "So.", [ULM, ULM]),
    ("granite", f"<|tool_call|>[{CALL}]", "", "", [ULM]),
    ("phi4_mini", f"functools[{CALL}, {CALL}]", "", "", [ULM, ULM]),
    ("internlm", f"So.<|action_start|><|plugin|>{LLAMA}<|action_end|>\n", "", "So.", [ULM]),
    ("lfm2", '<|tool_call_start|>[weather(city="Ulm"), time()]<|tool_call_end|>So.', "", "So.", [ULM, TIME]),
    ("lfm2", f"<|tool_call_start|>[{CALL}]<|tool_call_end|>", "", "", [ULM]),
    ("lfm2", f"<|tool_call_start|>\n```python\n{LINES}\n```\n<|tool_call_end|>", "", "", [ULM, TIME]),  # MiniCPM 3
    ("lfm2", "<|tool_call_start|>```python\nno", "", "<|tool_call_start|>```python\nno", []),
    ("lfm2", '[weather(city="Ulm")]', "", '[weather(city="Ulm")]', []),
    ("olmo3", '<function_calls>\nweather(city="Ulm")\ntime()\n</function_calls>', "", "", [ULM, TIME]),
    ("olmo3", "<function_calls>\nnone\n</function_calls>", "", "<function_calls>\nnone\n</function_calls>", []),
    ("apertus", '<|tools_prefix|>[{"weather": {"city": "Ulm"}}, {"time": {}}]<|tools_suffix|>', "", "", [ULM, TIME]),
    ("apertus", "<|tools_prefix|>[1]", "", "<|tools_prefix|>[1]", []),
    ("glm4", '\nweather\n{"city": "Ulm"}', "", "", [ULM]),
    ("glm4", "weather\nis fine", "", "weather\nis fine", []),
    ("glm4", 'The weather\n{"a": 1}', "", 'The weather\n{"a": 1}', []),
    # Llama
    ("llama3_json", LLAMA, "", "", [ULM]),
    ("llama3_json", f'\n{LLAMA}; {{"type": "function", "name": "time", "parameters": {{}}}}', "", "", [ULM, TIME]),
    ("llama3_json", f"<|python_tag|>{LLAMA}", "", "", [ULM]),
    ("llama3_json", '<|python_tag|>brave_search.call(query="Ulm")', "", "", [("brave_search", {"query": "Ulm"})]),
    ("llama3_json", "<|python_tag|>import os", "", "<|python_tag|>import os", []),
    ("llama3_json", '{"name": "Ann"}', "", '{"name": "Ann"}', []),
    ("llama4_json", f"<|python_start|>{LLAMA}<|python_end|>", "", "", [ULM]),
    ("llama4_pythonic", '[weather(city="Ulm"), time()]', "", "", [ULM, TIME]),
    # Python
    ("pythonic", "[weather(city='Ulm'), time()]", "", "", [ULM, TIME]),
    (
        "pythonic",
        "[weather(city='a, (b\\'', days=-3, more={'x': [1, True, None, 'y']})]",
        "",
        "",
        [("weather", {"city": "a, (b'", "days": -3, "more": {"x": [1, True, None, "y"]}})],
    ),
    ("pythonic", "[weather(city=true, days=1.5)]", "", "", [("weather", {"city": True, "days": 1.5})]),
    ("pythonic", "```tool_code\nweather(city='Ulm')\n```", "", "", [ULM]),
    ("pythonic", "[1, 2]", "", "[1, 2]", []),
    ("pythonic", "[other(a=1)]", "", "[other(a=1)]", []),
    ("pythonic", "Call [weather(city='Ulm')]", "", "Call [weather(city='Ulm')]", []),
    # Mistral
    ("mistral", '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Ulm"}, "id": "abcdefghi"}]', "", "", [ULM]),
    (
        "mistral",
        'So. [TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Ulm"}}, {"name": "time", "arguments": {}}]',
        "",
        "So.",
        [ULM, TIME],
    ),
    ("mistral_args", '[TOOL_CALLS]weather[ARGS]{"city": "Ulm"}[TOOL_CALLS]time[ARGS]{}', "", "", [ULM, TIME]),
    ("mistral_args", '[TOOL_CALLS]weather[CALL_ID]abcdefghi[ARGS]{"city": "Ulm"}', "", "", [ULM]),
    ("mistral_args", '[TOOL_CALLS]weather{"city": "Ulm"}', "", "", [ULM]),
    ("mistral", "a [TOOL_CALLS] b", "", "a [TOOL_CALLS] b", []),
    # DeepSeek
    ("deepseek_v3", V3, "", "", [ULM, TIME]),
    ("deepseek_v31", f"So.{V31}", "", "So.", [ULM, TIME]),
    ("deepseek_v31", f"<think>Hm.</think>{V31}", "Hm.", "", [ULM, TIME]),
    # arguments between markers
    ("qwen3_coder", CODER, "", "", [ULM]),
    ("qwen3_coder", f"So.\n{CODER}\n{CODER}", "", "So.", [ULM, ULM]),
    ("qwen3_coder", CODER.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"), "", "", [ULM]),
    ("qwen3_coder", "<tool_call>\n<function=time>\n</function>\n</tool_call>", "", "", [TIME]),
    (
        "qwen3_coder",
        '<tool_call><function=weather><parameter=city>\n3\n\n"\n</parameter>\n<parameter=days>\n3\n</parameter>'
        '<parameter=more>{"a": [1]}</parameter></function></tool_call>',
        "",
        "",
        [("weather", {"city": '3\n\n"', "days": 3, "more": {"a": [1]}})],
    ),
    ("qwen3_coder", "<tool_call>no", "", "<tool_call>no", []),
    ("glm", GLM, "", "", [ULM]),
    ("glm", f"<think>Hm.</think>\n{GLM}\n{GLM}", "Hm.", "", [ULM, ULM]),
    ("glm", "<tool_call>time</tool_call>", "", "", [TIME]),
    ("hy_v3_preview", f"<think>Hm.</think>So.{HY_3}", "Hm.", "So.", [ULM, TIME]),
    ("hy_v3_preview", HY_3.partition("<tool_call>time")[0], "", "", [ULM]),
    ("hy_v3_preview", "<tool_calls> is a tag", "", "<tool_calls> is a tag", []),
    ("hy_v3", HY_4.replace("weather<", "weather<tool_sep:opensource>\n<"), "", "", [ULM, TIME]),
    ("hy_v4", HY_4, "", "", [ULM, TIME]),
    ("hy_v4", HY_4.replace("Ulm", "a <b> c"), "", "", [("weather", {"city": "a <b> c"}), TIME]),
    (
        "glm",
        "<tool_call>weather<arg_key>days</arg_key><arg_value>3</arg_value><arg_key>x</arg_key><arg_value>y</arg_value>"
        "</tool_call>",
        "",
        "",
        [("weather", {"days": 3, "x": "y"})],
    ),
    ("functiongemma", GEMMA, "", "", [ULM]),
    ("functiongemma", f"{GEMMA}{GEMMA}", "", "", [ULM, ULM]),
    ("gemma4", GEMMA4, "", "", [ULM]),
    (
        "gemma4",
        '<|tool_call>call:weather{days:3,more:{a:[1,<|"|>x, }<|"|>,{}],"b: c":null},city:<|"|>"\n<|"|>}<tool_call|>',
        "",
        "",
        [("weather", {"days": 3, "more": {"a": [1, "x, }", {}], "b: c": None}, "city": '"\n'})],
    ),
    ("gemma4", "<|tool_call>call:time{}<tool_call|>", "", "", [TIME]),
    # gpt-oss
    ("harmony", f"{ANALYSIS}<|channel|>final<|message|>Hello.<|return|>", "Hm, Ulm.", "Hello.", []),
    ("harmony", f"{ANALYSIS}{HARMONY}", "Hm, Ulm.", "", [ULM]),
    (
        "harmony",
        f"{ANALYSIS} to=functions.time<|channel|>commentary json<|message|>{{}}<|call|>",
        "Hm, Ulm.",
        "",
        [TIME],
    ),
    (
        "harmony",
        "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant" + HARMONY,
        "",
        "Let me see.",
        [ULM],
    ),
    ("harmony", "<|channel|>analysis<|message|>to=functions.time {", "to=functions.time {", "", []),
    ("harmony", "Hello.", "", "Hello.", []),
]


def decoded(found):
    reasoning, text, calls = found
    return reasoning, text, [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize(("name", "text", "reasoning", "answer", "calls"), CASES)
def test_reasoning_answer_and_calls_are_separated(name, text, reasoning, answer, calls):
    assert decoded(parse(name, text)) == (reasoning, answer, calls)


@pytest.mark.parametrize(("name", "text"), [case[:2] for case in CASES])
def test_result_does_not_depend_on_how_the_text_is_divided(name, text):
    whole = parse(name, text)
    assert parse(name, text, range(len(text))) == whole
    draw = random.Random(text)
    for _ in range(20):
        assert parse(name, text, draw.sample(range(len(text) + 1), draw.randint(0, min(6, len(text))))) == whole
    for at in range(len(text)):  # and a text that is cut short
        assert parse(name, text[:at], range(at)) == parse(name, text[:at])


def test_text_and_arguments_are_emitted_as_they_come():
    parser = TOOL_FORMATS["hermes"].parser(ParserOptions(tools=TOOLS, thought=THINK))
    assert parser.take("<think>Hm").reasoning == "Hm"
    assert parser.is_reasoning
    assert parser.take(", so</th").reasoning == ", so"
    assert parser.take("ink>Let me ").text == "Let me"
    assert not parser.is_reasoning
    assert parser.take("see <b>").text == " see <b>"
    assert not parser.take(' <tool_call>{"name": "weather", "argu')
    assert parser.take('ments": {"ci').calls == [CallDelta(0, "weather", '{"ci')]
    assert parser.take('ty": "Ulm').calls == [CallDelta(0, "", 'ty": "Ulm')]
    assert parser.take('"}}</tool_call>').calls == [CallDelta(0, "", '"}')]
    parser = TOOL_FORMATS["qwen3_coder"].parser(ParserOptions(tools=TOOLS))
    assert parser.take("<function=weather>").calls == [CallDelta(0, "weather")]
    assert parser.take("<parameter=city>\nU").calls == [CallDelta(0, "", '{"city": "U')]
    assert parser.take("lm\n").calls == [CallDelta(0, "", "lm")]


def test_thought_that_the_prompt_opened_begins_at_once():
    found = parse("hermes", f"Maybe {HERMES}.\n</think>\n\nHello.", starts_in_thought=True)
    assert found == (f"Maybe {HERMES}.", "Hello.", [])
    assert parse("hermes", "No end", starts_in_thought=True) == ("No end", "", [])


@pytest.mark.parametrize("name", ["functiongemma", "gemma4"])
@pytest.mark.parametrize("text", ["call:weather{more:{a:[1,2}}", "call:weather{days:[}", "call:weather{days:[[1}]}"])
def test_a_list_that_a_brace_closes_ends_the_call(name, text):
    open_, close = TOOL_FORMATS[name].parser.open, TOOL_FORMATS[name].parser.close
    for cuts in ((), range(1, len(open_ + text))):
        _, _, [(called, arguments)] = parse(name, f"{open_}{text}{close}", cuts)
        assert called == "weather"
        assert len(arguments) < 40


@pytest.mark.parametrize("name", ["mistral", "gemma4", "seed_oss", "apriel", "hy"])
def test_other_marks_of_reasoning(name):
    marks = REASONING_FORMATS[name].markers
    text = f"{marks.open}{marks.label}\nHm.{marks.close}Yes."
    assert parse("json", text, thought=marks) == ("Hm.", "Yes.", [])
    assert parse("json", text, range(len(text)), thought=marks) == ("Hm.", "Yes.", [])


@pytest.mark.parametrize("cuts", [(), range(100)])
def test_marks_around_the_answer_are_no_part_of_it(cuts):
    thought = REASONING_FORMATS["answer"].markers
    text = "<think>\nHm.\n</think>\n<answer>\nYes.\n</answer>\n"
    assert parse("hermes", text, cuts, thought=thought) == ("Hm.", "Yes.", [])
    parser = StreamParser(ParserOptions(thought=thought))  # without tools
    pieces = [parser.take(piece) for piece in (text[:50], text[50:])] + [parser.finish()]
    assert "".join(piece.text for piece in pieces) == "Yes."
    assert parse("hermes", "Write <answer>.", cuts, thought=thought) == ("", "Write <answer>.", [])


def marked(name, text):
    """A text as it is in a vocabulary whose markers are special tokens."""
    special = frozenset(TOOL_FORMATS[name].markers)
    for marker in sorted(special, key=len, reverse=True):
        text = text.replace(marker, MARK + marker)
    return text, special


def spells_a_marker(text, reasoning):
    """Whether an example has the text of a marker where the model would write no special token."""
    return '</tool_call>"' in text or "oops" in text or reasoning.startswith("Maybe")


CALLS_BY_MARKERS = [case for case in CASES if case[4] and not spells_a_marker(*case[1:3])]


@pytest.mark.parametrize(("name", "text", "reasoning", "answer", "calls"), CALLS_BY_MARKERS)
def test_markers_may_be_special_tokens(name, text, reasoning, answer, calls):
    text, special = marked(name, text)
    assert decoded(parse(name, text, special=special)) == (reasoning, answer, calls)
    assert decoded(parse(name, text, range(len(text)), special=special)) == (reasoning, answer, calls)


def test_name_of_a_special_token_is_text_if_the_model_spells_it():
    special = frozenset(TOOL_FORMATS["mistral"].markers)
    text = 'Write [TOOL_CALLS][{"name": "time", "arguments": {}}].'
    assert parse("mistral", text, special=special) == ("", text, [])
    assert parse("mistral", f"a {MARK}[ARGS]b", special=special) == ("", "a b", [])


@pytest.mark.parametrize("name", [*TOOL_FORMATS])
@pytest.mark.parametrize("start", ["[" * 50_000, '{"name": ' * 20_000, "<tool_call>" * 5_000, "<|channel|>" * 5_000])
def test_text_nested_without_end_is_text(name, start):
    _, text, calls = parse(name, start)
    assert not calls
    assert text == start or name == "harmony"


@pytest.mark.parametrize("name", [*TOOL_FORMATS])
def test_any_text_is_parsed_and_divided_the_same(name):
    draw = random.Random(name)
    pool = [
        "{",
        "}",
        "[",
        "]",
        '"',
        "\\",
        "'",
        "(",
        ")",
        ",",
        ":",
        "=",
        " ",
        "\n",
        "a",
        "1",
        "name",
        "arguments",
        "weather",
        "time",
    ]
    pool += ["<tool_call>", "</tool_call>", "<think>", "</think>", "call:", '{"name": "weather", "arguments": {']
    pool += [*TOOL_FORMATS[name].markers, "<function=", "<parameter=", "</parameter>", ">", "to=functions."]
    for _ in range(300):
        text = "".join(draw.choices(pool, k=draw.randint(1, 12)))
        assert parse(name, text, range(len(text))) == parse(name, text), text


@pytest.mark.perf
def test_long_call_is_not_looked_through_again_and_again():
    parser = TOOL_FORMATS["hermes"].parser(ParserOptions(tools=TOOLS))
    began = time.process_time()
    parser.take('<tool_call>{"name": "time", "arguments": {"a": "')
    for _ in range(20_000):
        parser.take("0123456789")
    parser.take('"}}</tool_call>')
    assert time.process_time() - began < 2


# Pieces of chat templates that show the family.
TEMPLATES = {
    "harmony": "<|start|>assistant<|channel|>final<|message|>",
    "deepseek_v3": "<｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + name + '\\n```json",
    "deepseek_v31": "<｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>",
    "mistral_args": "[TOOL_CALLS]' + name + '[ARGS]",
    "mistral": "[TOOL_CALLS] [",
    "kimi_k2": "<|im_system|>tool_declare<|im_middle|>",
    "minimax_m2": '{%- set begin = \'<minimax:tool_call>\' -%}<invoke name="tool"><parameter name="p"><response>',
    "deepseek_v32": "{%- set dsml = '｜DSML｜' -%} 'function_calls>' message.tool_calls",
    "deepseek_v4": "<｜DSML｜tool_calls>",
    "command_r": "Write \\'Action:\\' followed by a json-formatted list of actions {\"tool_name\": title",
    "seed_oss": "<seed:tool_call>\\n<function=example>\\n<parameter=p>",
    "qwen3_coder": "<tool_call>\\n<function=example>\\n<parameter=p>",
    "hy_v3": "{% set HYTK = ':opensource' %}{{ '<tool_call{}>'.format(HYTK) }}name{{ '<tool_sep{}>'.format(HYTK) }}",
    "hy_v4": "<tool_call:opensource>name<arg_key:opensource>",
    "hy_v3_preview": "<tool_call>name<tool_sep>\\n<arg_key>",
    "glm": "<tool_call>{name}\\n<arg_key>",
    "gemma4": "<|tool_call>call:",
    "functiongemma": "<start_function_call>call:",
    "command": "<|START_THINKING|>plan<|END_THINKING|><|START_ACTION|>[",
    "nemotron": "<AVAILABLE_TOOLS>[ <TOOLCALL>[",
    "tool_calls": "<tool_calls>[",
    "longcat": "<longcat_tool_call>{",
    "lfm2": "<|im_start|><|tool_call_start|>[",
    "olmo3": "<|im_start|><function_calls>",
    "apertus": "<|assistant_start|><|tools_prefix|>",
    "internlm": "<|im_start|><|action_start|><|plugin|>",
    "granite": "<|start_of_role|><|tool_call|>",
    "phi4_mini": "<|tool|> functools[",
    "glm4": "<|assistant|><|observation|>",
    "hermes": "<|im_start|><tool_call>",
    "llama4_pythonic": "<|header_start|> [func_name1(params_name1=params_value1",
    "pythonic": "<start_of_turn> [func_name1(params_name1=params_value1",
    "llama3_json": "<|start_header_id|> <|python_tag|>",
    "llama4_json": "<|header_start|>",
    "llama3": "<|start_header_id|>",
    "json": "{{ tools }}",
}


def test_family_is_found_in_the_chat_template():
    assert {name: find_tool_format(text).name for name, text in TEMPLATES.items()} == {name: name for name in TEMPLATES}
    assert TEMPLATES.keys() == TOOL_FORMATS.keys() == NOTATIONS.keys()
    found = {
        name: find_reasoning_format(row.markers.open + row.markers.close + "".join(row.markers.wrappers))
        for name, row in REASONING_FORMATS.items()
    }
    assert {name: row.name for name, row in found.items()} == {name: name for name in REASONING_FORMATS}
    assert find_reasoning_format("{{ messages }}") is None


class FakeTokenizer:
    """A tokenizer without special tokens."""

    def __init__(self, template_text: str, shows_tools: bool) -> None:
        self.template_text, self.shows_tools = template_text, shows_tools

    def special_id(self, text: str) -> int | None:
        return None


@pytest.mark.parametrize(
    ("template", "shows_tools", "words"),
    [
        ("{{ messages }}", False, ""),
        ("{{ tools }}", True, "tool calls are read as json"),
        ("{{ tools }}<tool_call><think></think>", True, "tool calls are read as hermes, reasoning is read as think"),
        (TEMPLATES["harmony"], True, "tool calls are read as harmony, reasoning is read as channels"),
    ],
)
def test_the_log_names_only_what_the_template_has(template, shows_tools, words):
    chat_format = ChatFormat.of(FakeTokenizer(template, shows_tools))
    assert chat_format.describe(shows_tools=shows_tools) == words
