"""OpenAI's own client makes responses."""

from __future__ import annotations

import json

import pytest

from support.archives import pack_handler
from support.running import RunningServer

openai = pytest.importorskip("openai")

TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}, "strict": False}
CALL = [0, "", "tool_calls", None, "", [[0, "weather", '{"city": "Oslo"}']]]


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    folder = tmp_path_factory.mktemp("responses")
    store = folder / "store"
    store.mkdir()
    pack_handler(store, "scripted")
    running = RunningServer(folder / "log", str(store)).wait_listening()
    running.until(lambda: running.is_ready, timeout=60)
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=30) as made:
        yield made
    running.stop()


def script(*steps, **orders):
    return json.dumps({"steps": steps, **orders})


HELLO = script([[0, "Hell"]], [[0, "o", "stop"]])


def test_response_and_its_stream(client):
    found = client.responses.create(model="scripted", input=HELLO)
    assert (found.object, found.status, found.model, found.output_text) == (
        "response",
        "completed",
        "scripted",
        "Hello",
    )
    assert (found.usage.input_tokens, found.usage.output_tokens, found.usage.total_tokens) == (11, 7, 18)
    assert found.usage.input_tokens_details.cached_tokens == 4
    events = [*client.responses.create(model="scripted", input=HELLO, stream=True)]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "Hello"
    assert events[-1].response.output_text == "Hello"
    with client.responses.stream(model="scripted", input=HELLO) as stream:
        for _ in stream:
            pass
        assert stream.get_final_response().output_text == "Hello"


def test_settings_reach_the_model(client):
    found = client.responses.create(model="scripted", input="report", temperature=0.5, max_output_tokens=9)
    assert json.loads(found.output_text)["sampling"] == {"max_tokens": 9, "temperature": 0.5}


def test_call_of_a_tool_and_its_result(client):
    asked = {"model": "scripted", "tools": [TOOL]}
    first = client.responses.create(input=script([CALL]), **asked)
    [call] = first.output
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "weather", {"city": "Oslo"})
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    stored = client.responses.create(input=[output], previous_response_id=first.id, **asked)
    assert (stored.output_text, stored.previous_response_id) == ("rain", first.id)
    alone = client.responses.create(
        input=[{"role": "user", "content": "a"}, *(item.model_dump() for item in first.output), output],
        store=False,
        **asked,
    )
    assert alone.output_text == "rain"


def test_stored_response_is_read_continued_and_deleted(client):
    first = client.responses.create(model="scripted", input="one", instructions="Speak.", metadata={"a": "b"})
    read = client.responses.retrieve(first.id)
    assert (read.output_text, read.metadata) == ("one", {"a": "b"})
    assert [item.content[0].text for item in client.responses.input_items.list(first.id)] == ["one"]
    second = client.responses.create(model="scripted", input="two", previous_response_id=first.id)
    assert second.output_text == "two"
    client.responses.delete(first.id)
    for call in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError, match="kept for an hour"):
            call(first.id)
    with pytest.raises(openai.BadRequestError, match="Send the whole input") as found:
        client.responses.create(model="scripted", input="three", previous_response_id=first.id)
    assert found.value.param == "previous_response_id"
    assert client.responses.retrieve(second.id).previous_response_id == first.id


def test_response_that_is_not_stored_is_forgotten(client):
    found = client.responses.create(model="scripted", input="one", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(found.id)


def test_errors(client):
    with pytest.raises(openai.BadRequestError, match="reads no images") as found:
        client.responses.create(
            model="scripted",
            input=[
                {"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,aGVsbG8="}]}
            ],
        )
    assert found.value.param == "input[0].content[0]"
    with pytest.raises(openai.APIError, match=r"as the script says|failed"):
        for _ in client.responses.create(
            model="scripted", input=script([[0, "a"]], [[0, "b"]], fail=1), stream=True, store=False
        ):
            pass
    with pytest.raises(openai.NotFoundError, match="scripted"):
        client.responses.create(model="nobody", input="a")
