"""OpenAI's own client forces tool calls from a model that was never trained, and reads what it thinks."""

from __future__ import annotations

import json

import pytest

openai = pytest.importorskip("openai")
jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("torch")
pytest.importorskip("sentencepiece")
pytest.importorskip("safetensors")
pytest.importorskip("llguidance")

from support.language_models import write_language_model  # noqa: E402
from support.network_server import serving_networks  # noqa: E402

TEMPLATE = """
{%- for tool in tools or [] %}{{ tool.function.name }} {% endfor -%}
{%- for message in messages %}{{ message.role }}: {{ message.content or "" }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function.name }}</tool_call>{% endfor %}
{% endfor -%}
assistant: <think>{% if not thinking %}</think>{% endif %}
"""
WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 8},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["city", "days", "unit"],
    "additionalProperties": False,
}
TIME = {"type": "object", "properties": {"zone": {"enum": ["UTC", "CET"]}}, "required": ["zone"], "maxProperties": 1}
SCHEMAS = {"weather": WEATHER, "time": TIME}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "strict": True, "parameters": WEATHER}},
    {"type": "function", "function": {"name": "time", "strict": True, "parameters": TIME}},
]
ASK = {"model": "tiny", "messages": [{"role": "user", "content": "Ulm?"}], "temperature": 1, "max_tokens": 700}
NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tools")
    model = write_language_model(folder / "model", context=1024)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    options = {"max_num_seqs": 16, "num_blocks": 2000, "speculative": True, "speculate_k": 3}
    with (
        serving_networks(folder, {"tiny": model}, **options) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=120) as made,
    ):
        yield made


def ask(client, **options):
    extra = {name: options.pop(name) for name in ("max_reasoning_tokens", "chat_template_kwargs") if name in options}
    return client.chat.completions.create(**{**ASK, **options}, extra_body=extra)


def check_choice(choice):
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    for call in choice.message.tool_calls:
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    return choice.message.tool_calls


def test_forced_calls_are_always_valid(client):
    ids = []
    for choice in ask(client, tools=TOOLS, tool_choice=NAMED, n=6).choices:
        [call] = check_choice(choice)
        assert call.function.name == "weather"
        ids.append(call.id)
    assert len({*ids}) == len(ids) == 6


def test_any_tool_and_one_at_a_time(client):
    reply = ask(client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, n=4)
    assert {len(check_choice(choice)) for choice in reply.choices} == {1}
    assert {choice.message.tool_calls[0].function.name for choice in reply.choices} <= {*SCHEMAS}


def test_stream_of_a_forced_call_is_the_whole_reply(client):
    options = {"tools": TOOLS, "tool_choice": NAMED, "seed": 5}
    [whole] = check_choice(ask(client, **options).choices[0])
    chunks = [*ask(client, **options, stream=True)]
    pieces = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert pieces[0].id
    assert pieces[0].function.name == "weather"
    assert len(pieces) > 3
    assert not any(piece.id or piece.function.name for piece in pieces[1:])
    assert "".join(piece.function.arguments for piece in pieces) == whole.function.arguments
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_call_and_its_result_go_back_to_the_model(client):
    [call] = check_choice(ask(client, tools=TOOLS, tool_choice=NAMED).choices[0])
    messages = [
        *ASK["messages"],
        {"role": "assistant", "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "12 C"},
    ]
    reply = ask(client, messages=messages, tools=TOOLS, max_tokens=5)
    assert reply.usage.completion_tokens <= 5


def test_reasoning_is_apart_limited_and_free_of_the_answers_form(client):
    form = {"type": "json_schema", "json_schema": {"name": "t", "strict": True, "schema": TIME}}
    options = {
        "response_format": form,
        "max_reasoning_tokens": 6,
        "chat_template_kwargs": {"thinking": True},
        "seed": 3,
    }
    reply = ask(client, **options, n=2)
    for choice in reply.choices:
        jsonschema.validate(json.loads(choice.message.content), TIME)
        assert choice.message.reasoning_content == choice.message.reasoning
        assert choice.finish_reason == "stop"
    assert any(choice.message.reasoning_content for choice in reply.choices)
    assert 2 <= reply.usage.completion_tokens_details.reasoning_tokens <= 2 * 20
    deltas = [chunk.choices[0].delta for chunk in ask(client, **options, stream=True)]
    whole = ask(client, **options).choices[0].message
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas) == whole.reasoning_content
    assert "".join(delta.content or "" for delta in deltas) == whole.content


def test_thought_comes_before_a_forced_call(client):
    reply = ask(
        client,
        tools=TOOLS,
        tool_choice="required",
        max_reasoning_tokens=5,
        chat_template_kwargs={"thinking": True},
        n=2,
    )
    for choice in reply.choices:
        check_choice(choice)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"tool_choice": "required"}, "no tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}, "tools": TOOLS}, "not among the tools"),
        (
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {"name": "f", "strict": True, "parameters": {"properties": {"a": {"not": {}}}}},
                    }
                ]
            },
            "/properties/a/not",
        ),
        ({"reasoning_effort": "extreme"}, "one of none, minimal, low"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_reason(client, options, told):
    with pytest.raises(openai.BadRequestError, match=told):
        ask(client, **options)
