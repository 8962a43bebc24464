"""Chats with tools in the formats of public models: rendered as by transformers, and their calls read back.

The templates in support/chat_templates are written for these tests, in the models' public formats.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from flambeau.llm.chat.call_ids import with_named_ids, with_short_ids
from flambeau.llm.chat.chat_format import ChatFormat
from flambeau.llm.chat.deltas import ChatDelta, whole_calls
from flambeau.llm.errors import InvalidRequest
from flambeau.llm.text.tokenizer import load_tokenizer
from support.tokenizer_files import byte_level_json, write_json_tokenizer

pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

TEMPLATES = Path(__file__).parents[3] / "support/chat_templates"
CHATML = ("<|im_start|>", "<|im_end|>")


@dataclass(frozen=True, kw_only=True)
class Model:
    """A family: its special tokens (the first two begin and end texts), and what its template must be taken for."""

    special: tuple[str, ...]
    tools: str
    header: str  # before a reply
    thinks: bool = False
    end: str = ""  # after a reply; empty: the token that ends texts


MODELS = {
    "hermes": Model(
        special=("<|begin_of_text|>", "<|end_of_text|>", *CHATML),
        tools="hermes",
        header="<|im_start|>assistant\n",
        end="<|im_end|>",
    ),
    "qwen2_5": Model(
        special=("<|startoftext|>", "<|endoftext|>", *CHATML),
        tools="hermes",
        header="<|im_start|>assistant\n",
        end="<|im_end|>",
    ),
    "qwen3": Model(
        special=("<|startoftext|>", "<|endoftext|>", *CHATML),
        tools="hermes",
        header="<|im_start|>assistant\n",
        thinks=True,
        end="<|im_end|>",
    ),
    "llama3": Model(
        special=(
            "<|begin_of_text|>",
            "<|end_of_text|>",
            "<|start_header_id|>",
            "<|end_header_id|>",
            "<|eot_id|>",
            "<|eom_id|>",
            "<|python_tag|>",
        ),
        tools="llama3_json",
        header="<|start_header_id|>assistant<|end_header_id|>\n\n",
        end="<|eot_id|>",
    ),
    "mistral": Model(
        special=(
            *("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
            *("[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        ),
        tools="mistral",
        header="[/INST]",
    ),
    "deepseek_r1": Model(
        special=(
            *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
            *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
            *("<｜tool▁sep｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>"),
            "<｜tool▁output▁end｜>",
        ),
        tools="deepseek_v3",
        header="<｜Assistant｜>",
        thinks=True,
    ),
    "gpt_oss": Model(
        special=(
            *("<|startoftext|>", "<|return|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>"),
            *("<|constrain|>", "<|call|>"),
        ),
        tools="harmony",
        header="<|start|>assistant",
        thinks=True,
        end="<|call|>",
    ),
    "gemma3": Model(
        special=("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
        tools="pythonic",
        header="<start_of_turn>model\n",
        end="<end_of_turn>",
    ),
    "glm4_5": Model(
        special=(
            *("<sop>", "<|endoftext|>", "[gMASK]", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
            *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
            *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
        ),
        tools="glm",
        header="<|assistant|>",
        thinks=True,
    ),
    "granite": Model(
        special=("<|startoftext|>", "<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>"),
        tools="granite",
        header="<|start_of_role|>assistant<|end_of_role|>",
    ),
    "kimi_k2": Model(
        special=(
            *("[BOS]", "[EOS]", "<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>"),
            *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>"),
            *("<|tool_call_argument_begin|>", "<|tool_call_end|>"),
        ),
        tools="kimi_k2",
        header="<|im_assistant|>assistant<|im_middle|>",
        end="<|im_end|>",
    ),
    "minimax_m2": Model(
        special=("]~!b[", "[e~[", "]~b]", "<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>"),
        tools="minimax_m2",
        header="]~b]ai\n",
        thinks=True,
        end="[e~[",
    ),
    "command_r7b": Model(
        special=(
            *("<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>", "<|START_OF_TURN_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|USER_TOKEN|>"),
            *("<|CHATBOT_TOKEN|>", "<|START_THINKING|>", "<|END_THINKING|>", "<|START_ACTION|>", "<|END_ACTION|>"),
            *("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TOOL_RESULT|>", "<|END_TOOL_RESULT|>"),
        ),
        tools="command",
        header="<|CHATBOT_TOKEN|>",
        thinks=True,
    ),
    "lfm2": Model(
        special=("<|startoftext|>", "<|endoftext|>", *CHATML, "<|tool_call_start|>", "<|tool_call_end|>"),
        tools="lfm2",
        header="<|im_start|>assistant\n",
        end="<|im_end|>",
    ),
}
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "units": {"type": "array", "items": {"enum": ["C", "F"]}},
    },
    "required": ["city"],
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "weather", "description": "The weather in a city", "parameters": PARAMETERS},
    },
    {"type": "function", "function": {"name": "time", "description": "The time", "parameters": {"type": "object"}}},
]
ARGUMENTS = {"city": 'Köln "Süd", <b>', "days": 3, "units": ["C", "F"]}
CALL_ID = "call_0123456789abcdef"


def conversation(arguments):
    """Two questions, the first answered with a call and its result."""
    call = {"id": CALL_ID, "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "How is the weather?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": CALL_ID, "content": '{"rain": true, "wind": "5 m/s"}'},
        {"role": "assistant", "content": "It rains."},
        {"role": "user", "content": "And tomorrow?"},
    ]


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    """A family, its tokenizer here, and the same of transformers."""
    own = MODELS[request.param]
    begin, end, *_ = own.special
    names = {"bos_token": begin, "eos_token": end}
    template = (TEMPLATES / f"{request.param}.jinja").read_text(encoding="utf-8")
    folder = write_json_tokenizer(
        tmp_path_factory.mktemp(request.param), byte_level_json(own.special), chat_template=template, **names
    )
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **names)
    theirs.chat_template = template
    return own, load_tokenizer(folder), theirs


def sent(own, messages):
    """The messages as the request reader passes them on."""
    if own.tools == "kimi_k2":
        return with_named_ids(messages)
    return with_short_ids(messages) if own.tools == "mistral" else messages


@pytest.mark.parametrize("length", [2, 4, 6])
@pytest.mark.parametrize("tools", [TOOLS, None], ids=["tools", "no tools"])
def test_prompt_is_that_of_transformers(model, length, tools):
    own, ours, theirs = model
    given = sent(own, conversation(json.dumps(ARGUMENTS)))[:length]  # as OpenAI's clients send it: arguments are text
    wanted = sent(own, conversation(ARGUMENTS))[:length]
    text = theirs.apply_chat_template(wanted, tools=tools, tokenize=False, add_generation_prompt=True)
    assert ours.render_chat(given, tools=tools) == text
    assert "And tomorrow?" in text or length < 6
    ids = theirs.apply_chat_template(wanted, tools=tools, add_generation_prompt=True, return_dict=False)
    assert ours.encode_chat(given, tools=tools) == ids


def test_call_that_a_template_writes_is_read_back(model):
    own, ours, _ = model
    chat_format = ChatFormat.of(ours)
    assert (chat_format.tools.name, chat_format.thinks) == (own.tools, own.thinks)
    messages = sent(own, conversation(json.dumps(ARGUMENTS)))
    prompt = ours.encode_chat(messages[:2], tools=TOOLS)
    text = ours.render_chat(messages[:3], tools=TOOLS, add_generation_prompt=False)
    written = text.rpartition(own.header)[2].partition(own.end or own.special[1])[0]
    ids = ours.encode_with_special(written)
    turn = chat_format.turn(ours, prompt, tools=TOOLS).without_thought()
    assert found_in(ours, turn, prompt, ids) == ("", [("weather", ARGUMENTS)])


def found_in(tokenizer, turn, prompt, ids):
    """The text and the calls of a reply that comes token by token."""
    parser, whole = turn.parser(), ChatDelta()
    detokenizer = tokenizer.detokenizer(prompt, marker_texts=turn.format.marker_texts)
    for token in ids:
        whole.add(parser.take(detokenizer.push([token])))
    whole.add(parser.take(detokenizer.flush()))
    whole.add(parser.finish())
    return whole.text, [(call.name, json.loads(call.arguments)) for call in whole_calls(whole.calls)]


def test_messages_that_a_template_refuses_are_a_clear_error(tmp_path):
    own = MODELS["mistral"]
    template = (TEMPLATES / "mistral.jinja").read_text(encoding="utf-8")
    folder = write_json_tokenizer(
        tmp_path, byte_level_json(own.special), chat_template=template, bos_token="<s>", eos_token="</s>"
    )
    with pytest.raises(InvalidRequest, match="nine letters and digits"):
        load_tokenizer(folder).render_chat(conversation(ARGUMENTS), tools=TOOLS)


PHI_4_MINI = (
    "{% for message in messages %}{% if message['role'] == 'system' and 'tools' in message %}"
    "<|system|>{{ message['content'] }}<|tool|>{{ message['tools'] }}<|/tool|><|end|>"
    "{% else %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endif %}{% endfor %}"
)
UNKNOWN = "{{ tools }}{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


def with_template(tmp_path, template):
    special = ("<|begin|>", "<|end|>")
    names = {"bos_token": special[0], "eos_token": special[1]}
    return load_tokenizer(write_json_tokenizer(tmp_path, byte_level_json(special), chat_template=template, **names))


def test_template_that_reads_tools_from_a_message_shows_none(tmp_path):
    assert not with_template(tmp_path, PHI_4_MINI).shows_tools


def test_template_that_refuses_system_messages_may_show_tools(tmp_path):
    refusal = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}"
    assert with_template(tmp_path, refusal + UNKNOWN).shows_tools


def test_unknown_notation_of_calls_is_named_in_a_warning(tmp_path, caplog):
    assert ChatFormat.of(with_template(tmp_path, UNKNOWN)).tools.name == "json"
    assert "stay in the text. If you know it, set tool_parser to one of harmony," in caplog.text
    caplog.clear()
    ChatFormat.of(with_template(tmp_path, UNKNOWN), "hermes")
    ChatFormat.of(with_template(tmp_path, UNKNOWN.replace("{{ tools }}", "")))
    assert not caplog.records


def test_ids_of_calls_are_names_and_numbers_for_kimi():
    calls = [{"id": f"call_{i}", "type": "function", "function": {"name": name}} for i, name in enumerate("ab")]
    own = {"id": "functions.c:7", "function": {"name": "c"}}
    messages = [
        {"role": "assistant", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "call_1", "content": "x"},
        {"role": "assistant", "tool_calls": [own]},
        {"role": "tool", "tool_call_id": "functions.c:7", "content": "y"},
        {"role": "tool", "tool_call_id": "other", "content": "z"},
    ]
    found = with_named_ids(messages)
    assert [call["id"] for call in found[0]["tool_calls"]] == ["functions.a:0", "functions.b:1"]
    assert [message["tool_call_id"] for message in found if "tool_call_id" in message] == [
        "functions.b:1",
        "functions.c:7",
        "other",
    ]
    assert found[2]["tool_calls"] == [own]
    assert messages[0]["tool_calls"] == calls
