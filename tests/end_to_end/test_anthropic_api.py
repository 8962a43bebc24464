"""Anthropic's own client talks to this server."""

from __future__ import annotations

import json
import sys

import pytest

from flambeau.config.server import KeysConfig
from support.archives import pack_handler
from support.configured import ConfiguredServer
from support.running import RunningServer
from support.snippets import run, snippets

TOOL = {"name": "weather", "description": "The weather.", "input_schema": {"type": "object"}}
CALL = [[0, "", None, None, "", [[0, "weather", '{"city"']]]], [[0, "", "tool_calls", None, "", [[0, "", ': "Oslo"}']]]]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("anthropic")
    store = folder / "store"
    store.mkdir()
    pack_handler(store, "scripted")
    pack_handler(store, "echo")
    running = RunningServer(folder / "log", str(store)).wait_listening()
    running.until(lambda: running.is_ready, timeout=60)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def anthropic():
    """Importing it takes seconds: not for those who only collect tests."""
    return pytest.importorskip("anthropic")


@pytest.fixture(scope="module")
def client(server, anthropic):
    with client_of(anthropic, server.url) as made:
        yield made


def client_of(anthropic, url, key="none"):
    return anthropic.Anthropic(base_url=url, api_key=key, max_retries=0, timeout=30)


def script(*steps, **orders):
    return [{"role": "user", "content": json.dumps({"steps": steps, **orders})}]


ASKED = {"model": "scripted", "max_tokens": 50}
HELLO = script([[0, "Hell"]], [[0, "o", "stop"]])


def test_message_and_its_stream(client):
    found = client.messages.create(messages=HELLO, **ASKED)
    assert (found.type, found.role, found.model) == ("message", "assistant", "scripted")
    assert [(block.type, block.text) for block in found.content] == [("text", "Hello")]
    assert (found.stop_reason, found.stop_sequence) == ("end_turn", None)
    assert (found.usage.input_tokens, found.usage.cache_read_input_tokens, found.usage.output_tokens) == (7, 4, 7)
    with client.messages.stream(messages=HELLO, **ASKED) as stream:
        assert "".join(stream.text_stream) == "Hello"
        last = stream.get_final_message()
    assert last.content[0].text == "Hello"
    assert last.usage.input_tokens == 7
    assert last.stop_reason == "end_turn"


def test_settings_reach_the_model(client):
    asked = {"messages": [{"role": "user", "content": "report"}], "system": "Speak.", "stop_sequences": ["END"]}
    told = json.loads(client.messages.create(extra_body={"temperature": 0.5}, **asked, **ASKED).content[0].text)
    assert told["sampling"] == {"max_tokens": 50, "stop": ["END"], "temperature": 0.5}


def test_call_of_a_tool_and_its_stream(client):
    messages = script([[0, "Wait. "]], *CALL)
    found = client.messages.create(messages=messages, tools=[TOOL], **ASKED)
    assert found.stop_reason == "tool_use"
    assert [block.type for block in found.content] == ["text", "tool_use"]
    assert (found.content[1].name, found.content[1].input) == ("weather", {"city": "Oslo"})
    with client.messages.stream(messages=messages, tools=[TOOL], **ASKED) as stream:
        last = stream.get_final_message()
    assert (last.content[1].name, last.content[1].input) == ("weather", {"city": "Oslo"})
    result = {"type": "tool_result", "tool_use_id": found.content[1].id, "content": "rain"}
    going_on = [*messages, {"role": "assistant", "content": found.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(messages=going_on, tools=[TOOL], **ASKED).content[0].text == "rain"


def test_tokens_are_counted(client):
    messages = [{"role": "user", "content": "abc"}]
    assert client.messages.count_tokens(model="scripted", messages=messages).input_tokens == 4
    assert client.messages.count_tokens(model="scripted", messages=messages, system="de").input_tokens == 7


def test_errors_are_anthropics(client, anthropic):
    with pytest.raises(anthropic.NotFoundError, match="scripted") as missing:
        client.messages.create(messages=HELLO, model="nobody", max_tokens=1)
    assert missing.value.body["error"]["type"] == "not_found_error"
    source = {"type": "base64", "media_type": "image/png", "data": "aGVsbG8="}
    with pytest.raises(anthropic.BadRequestError, match="reads no images"):
        client.messages.create(messages=[{"role": "user", "content": [{"type": "image", "source": source}]}], **ASKED)
    with pytest.raises(anthropic.BadRequestError, match="generates no text"):
        client.messages.create(messages=HELLO, model="echo", max_tokens=1)
    with pytest.raises(anthropic.BadRequestError, match="5000 tokens"):
        client.messages.create(messages=[{"role": "user", "content": "refuse"}], **ASKED)
    with pytest.raises(anthropic.APIStatusError, match=r"api_error|overloaded_error"):
        for _ in client.messages.create(messages=script([[0, "a"]], [[0, "b"]], fail=1), stream=True, **ASKED):
            pass


def test_wrong_method_and_path(server):
    reply = server.request("GET", "/v1/messages")
    assert (reply.status, reply.json["error"]["type"]) == (405, "invalid_request_error")
    reply = server.request("POST", "/v1/messages/batches")
    assert (reply.status, reply.json["error"]["type"]) == (404, "not_found_error")


def test_key_is_accepted_as_anthropics_clients_send_it(anthropic, tmp_path):
    key = "k" * 40
    model = pack_handler(tmp_path, "scripted")
    settings = {"keys": KeysConfig(is_on=True)}
    with ConfiguredServer(tmp_path, model, env={"FLAMBEAU_INFERENCE_KEY": key}, **settings) as server:
        stranger = client_of(anthropic, server.url, "wrong" * 8)
        with stranger, pytest.raises(anthropic.AuthenticationError) as found:
            stranger.messages.create(messages=HELLO, **ASKED)
        assert found.value.body["error"]["type"] == "authentication_error"
        with client_of(anthropic, server.url, key) as client:
            assert client.messages.create(messages=HELLO, **ASKED).content[0].text == "Hello"


# ---- docs/messages-and-responses.md ----


def test_docs_can_be_followed(server, tmp_path):
    pytest.importorskip("openai")
    programs = snippets("docs/messages-and-responses.md", "python")
    commands = [line for shell in snippets("docs/messages-and-responses.md", "sh") for line in shell.splitlines()]
    assert (len(programs), len(commands)) == (2, 3)
    for program in programs:
        words = program.replace(":8080", f":{server.port}").replace("storyteller", "scripted")
        result = run(f"{sys.executable} - <<'END'\n{words}\nEND", tmp_path)
        assert "Tell me a story." in result.stdout, result.stderr
    for command in commands:
        result = run(command.replace(":8080", f":{server.port}").replace("storyteller", "scripted"), tmp_path)
        assert result.returncode == 0, (command, result.stdout, result.stderr)
