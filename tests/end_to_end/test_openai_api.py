"""OpenAI's own client talks to this server."""

from __future__ import annotations

import json
import socket
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from flambeau.archive.pack import Recipe, pack
from flambeau.config.server import KeysConfig
from support.archives import pack_handler
from support.configured import ConfiguredServer
from support.running import RunningServer
from support.snippets import run, snippets

openai = pytest.importorskip("openai")
np = pytest.importorskip("numpy")
pytest.importorskip("tokenizers")
pytest.importorskip("safetensors")

from support.sentence_models import save_bert_folder  # noqa: E402

STEADY = {"OMP_NUM_THREADS": "1"}
JSON = {"Content-Type": "application/json"}


def client_of(server, key="none"):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=30)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("openai")
    store = folder / "store"
    store.mkdir()
    for version in ("1.0", "2.0"):
        pack_handler(store, "scripted", version=version, file=f"scripted-{version}.mar")
    pack_handler(store, "echo")
    pack_handler(folder, "scripted", name="private", config="openai: false\n").rename(store / "private.mar")
    settings = folder / "model-config.yaml"
    settings.write_text(f"handler:\n  model_path: {save_bert_folder(folder / 'bert')}\n  matryoshka: true\n")
    recipe = Recipe(model_name="embedder", handler="sentence_embedder", config_file=settings)
    pack(recipe, store, format="no-archive")
    running = RunningServer(folder / "log", str(store), env=STEADY).wait_listening()
    running.until(lambda: running.is_ready, timeout=60)  # it loads torch
    yield running
    running.stop()


@pytest.fixture(scope="module")
def client(server):
    with client_of(server) as made:
        yield made


def script(*steps, **orders):
    return json.dumps({"steps": steps, **orders})


def say(text):
    return [{"role": "user", "content": text}]


HELLO = script([[0, "Hell"]], [[0, "o", "stop"]])


# ---- whole replies ----


def test_chat(client):
    found = client.chat.completions.create(model="scripted", messages=say(HELLO))
    assert found.id.startswith("chatcmpl-")
    assert (found.object, found.model) == ("chat.completion", "scripted")
    assert found.system_fingerprint.startswith("fp_")
    [choice] = found.choices
    assert (choice.message.role, choice.message.content, choice.message.refusal) == ("assistant", "Hello", None)
    assert (choice.finish_reason, choice.logprobs) == ("stop", None)
    assert (found.usage.prompt_tokens, found.usage.completion_tokens, found.usage.total_tokens) == (11, 7, 18)
    assert found.usage.prompt_tokens_details.cached_tokens == 4
    assert found.usage.completion_tokens_details.accepted_prediction_tokens == 5
    assert found.usage.completion_tokens_details.rejected_prediction_tokens == 1


def test_completion_of_several_prompts(client):
    found = client.completions.create(model="scripted", prompt=["one", "two"], n=2)
    assert found.id.startswith("cmpl-")
    assert found.object == "text_completion"
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    assert {choice.finish_reason for choice in found.choices} == {"stop"}
    assert found.usage.prompt_tokens == 22  # each prompt once, however many choices it has


def test_completion_of_token_ids(client):
    assert client.completions.create(model="scripted", prompt=[5, 6]).choices[0].text == "[5, 6]"
    assert client.completions.create(model="scripted", prompt=[[7], [8]]).choices[0].text == "[7]"


def test_long_prompt_comes_through_shared_memory_whole(client):
    prompt = "".join(chr(0x4E00 + i % 5000) for i in range(100_000))
    assert client.completions.create(model="scripted", prompt=prompt).choices[0].text == prompt


def test_settings_reach_the_model(client):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    more = {"top_k": 5, "min_p": 0.1, "chat_template_kwargs": {"enable_thinking": False}}
    found = client.chat.completions.create(
        model="scripted", messages=say("report"), temperature=0, seed=3, stop=["x"], tools=tools, extra_body=more
    )
    told = json.loads(found.choices[0].message.content)
    assert told["sampling"] == {"temperature": 0, "seed": 3, "stop": ["x"], "top_k": 5, "min_p": 0.1}
    assert (told["tools"], told["options"]) == (tools, {"enable_thinking": False})


def test_versions_of_a_model_have_names(client):
    assert client.chat.completions.create(model="scripted@2.0", messages=say("a")).model == "scripted@2.0"
    assert client.completions.create(model="scripted:1.0", prompt="a").model == "scripted:1.0"
    with pytest.raises(openai.NotFoundError, match=r"'scripted@3.0' does not exist. Available: scripted."):
        client.completions.create(model="scripted@3.0", prompt="a")


def test_request_without_a_model_means_the_only_one_that_can_answer(server):
    body = json.dumps({"messages": say("a")}).encode()
    assert server.request("POST", "/v1/chat/completions", body, JSON).json["model"] == "scripted"


# ---- tools ----

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALLING = script(
    [[0, "", None, None, "Hm."]],
    [[0, "Let me see."]],
    [[0, "", None, None, "", [[0, "weather", '{"city": ']]]],
    [[0, "", None, None, "", [[0, "", '"Ulm"}']]]],
    [[0, "", "tool_calls"]],
)


def test_calls_of_tools_whole_and_as_a_stream(client):
    asked = {"model": "scripted", "messages": say(CALLING), "tools": TOOLS}
    said = "Let me see."
    [choice] = client.chat.completions.create(**asked).choices
    [call] = choice.message.tool_calls
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == (
        "function",
        "weather",
        {"city": "Ulm"},
    )
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", said or None)
    with client.chat.completions.stream(**asked) as stream:  # the client puts it together itself
        for _ in stream:
            pass
        [choice] = stream.get_final_completion().choices
    [call] = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Ulm"})
    assert (choice.finish_reason, choice.message.content or "") == ("tool_calls", said)


def test_without_tools_nothing_is_taken_for_a_call(client):
    text = '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'
    for options in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        asked = {"model": "scripted", "messages": say(script([[0, text, "stop"]])), **options}
        [choice] = client.chat.completions.create(**asked).choices
        assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (text, None, "stop")


# ---- streams ----


def test_chat_as_a_stream(client):
    chunks = [*client.chat.completions.create(model="scripted", messages=say(HELLO), stream=True)]
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert deltas[0].role == "assistant"
    assert [delta.content for delta in deltas] == ["", "Hell", "o", None]
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, None, "stop"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in chunks)


def test_usage_of_a_stream(client):
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = client.chat.completions.create(model="scripted", messages=say(HELLO), **options)
    assert all(chunk.usage is None for chunk in chunks)
    assert (last.choices, last.usage.total_tokens) == ([], 18)
    *chunks, last = client.completions.create(model="scripted", prompt=HELLO, **options)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Hello"
    assert (last.choices, last.usage.total_tokens) == ([], 18)


def test_choices_of_a_stream_are_interleaved(client):
    steps = [[[0, "a"], [1, "x"]], [[1, "y", "length"], [0, "b"]], [[0, "", "stop"]]]
    chunks = [*client.completions.create(model="scripted", prompt=script(*steps), n=2, stream=True)]
    told = [(chunk.choices[0].index, chunk.choices[0].text, chunk.choices[0].finish_reason) for chunk in chunks]
    assert told == [(0, "a", None), (1, "x", None), (1, "y", "length"), (0, "b", None), (0, "", "stop")]


def test_stream_is_server_sent_events_to_the_byte(server):
    body = json.dumps({"model": "scripted", "prompt": HELLO, "stream": True}).encode()
    reply = server.request("POST", "/v1/completions", body, {**JSON, "X-Request-Id": "mine"})
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert reply.headers["x-request-id"] == "mine"
    events = reply.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    first = json.loads(events[0].removeprefix("data: "))
    assert first["choices"] == [{"index": 0, "text": "Hell", "logprobs": None, "finish_reason": None}]


def test_pieces_are_sent_when_they_are_made(client):
    """This reply has no end, so what is read of it was sent before."""
    with client.completions.create(
        model="scripted", prompt=script([[0, "first"]], [[0, "."]], goes_on=True, pause=0.02), stream=True
    ) as stream:
        assert next(iter(stream)).choices[0].text == "first"


@pytest.mark.parametrize("is_streamed", [False, True])
def test_client_that_goes_frees_its_place(server, is_streamed):
    before = counts(server)["cancelled"]
    prompt = script([[0, "a"]], goes_on=True, pause=0.005)
    body = json.dumps({"model": "scripted@1.0", "prompt": prompt, "stream": is_streamed}).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
        if is_streamed:
            assert connection.recv(100).startswith(b"HTTP/1.1 200 OK")
        else:
            server.until(lambda: counts(server)["open"] == 1)
    server.until(lambda: counts(server) == {"open": 0, "cancelled": before + 1})


def counts(server):
    """What the handler says of its jobs."""
    return server.request("GET", "/explanations/scripted/1.0").json


# ---- log-probabilities ----

SPLIT = [
    [[0, "", None, [["\ufffd", -0.5, [0xC3], []]]]],
    [[0, "ä", None, [["\ufffd", -0.25, [0xA4], [["\ufffd", -0.25], ["!", -2]]]]]],
    [[0, "!", "stop", [["!", float("-1e30"), [0x21], []]]]],
]


@pytest.mark.parametrize("top", [None, 0, 2])
def test_logprobs_of_a_chat(client, top):
    options = {} if top is None else {"top_logprobs": top}
    asked = {"model": "scripted", "messages": say(script(*SPLIT)), "logprobs": True, **options}
    [choice] = client.chat.completions.create(**asked).choices
    assert choice.message.content == "ä!"
    assert [(t.token, t.logprob, t.bytes) for t in choice.logprobs.content] == [
        ("\ufffd", -0.5, [0xC3]),
        ("\ufffd", -0.25, [0xA4]),
        ("!", -9999.0, [0x21]),
    ]
    assert [t.token for t in choice.logprobs.content[1].top_logprobs] == ["\ufffd", "!"]
    streamed = [c.choices[0] for c in client.chat.completions.create(**asked, stream=True)]
    assert "".join(piece.delta.content or "" for piece in streamed) == "ä!"
    assert [t for piece in streamed if piece.logprobs for t in piece.logprobs.content] == choice.logprobs.content


@pytest.mark.parametrize("number", [0, 2])
def test_logprobs_of_a_completion(client, number):
    asked = {"model": "scripted", "prompt": script(*SPLIT), "logprobs": number}
    found = client.completions.create(**asked).choices[0].logprobs
    assert found.tokens == ["\ufffd", "\ufffd", "!"]
    assert found.text_offset == [0, 1, 2]
    assert found.token_logprobs == [-0.5, -0.25, -9999.0]
    assert found.top_logprobs == [{"\ufffd": -0.5}, {"\ufffd": -0.25, "!": -2}, {"!": -9999.0}]
    assert json.loads(server_settings(client, logprobs=number))["sampling"]["logprobs"] == number


def server_settings(client, **options):
    return client.completions.create(model="scripted", prompt="report", **options).choices[0].text


# ---- errors ----


def test_unknown_model(client):
    with pytest.raises(openai.NotFoundError) as found:
        client.chat.completions.create(model="gpt-9", messages=say("a"))
    assert found.value.body == {
        "message": "The model 'gpt-9' does not exist. Available: scripted.",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }


def test_model_that_cannot_do_what_is_asked(client):
    with pytest.raises(openai.BadRequestError, match="'echo' generates no text; its handler must be gpt_handler"):
        client.chat.completions.create(model="echo", messages=say("a"))
    with pytest.raises(openai.BadRequestError, match="'embedder' generates no text"):
        client.completions.create(model="embedder", prompt="a")
    with pytest.raises(openai.BadRequestError, match="'scripted' makes no embeddings"):
        client.embeddings.create(model="scripted", input="a")


def test_model_that_is_kept_off_openai_s_api_is_not_there(server, client):
    with pytest.raises(openai.NotFoundError, match=r"'private' is not at /v1: .* openai: false") as found:
        client.chat.completions.create(model="private", messages=say("a"))
    assert (found.value.code, found.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError, match="/predictions/private"):
        client.completions.create(model="private@1.0", prompt="a")
    assert server.request("GET", "/v1/models/private").json == {"name": "private", "ready": True}  # to KServe
    assert server.request("GET", "/explanations/private").status == 200  # as on every other path


def test_wrong_field_is_named(client):
    with pytest.raises(openai.BadRequestError) as found:
        client.chat.completions.create(model="scripted", messages=say("a"), temperature=7)
    assert (found.value.param, found.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(openai.BadRequestError, match="did you mean max_tokens"):
        client.chat.completions.create(model="scripted", messages=say("a"), extra_body={"max_token": 1})


def test_model_refuses_a_request_before_and_after_a_stream_was_asked_for(client):
    for is_streamed in (False, True):
        with pytest.raises(openai.BadRequestError, match="5000 tokens; the model takes 4096"):
            client.completions.create(model="scripted", prompt="refuse", stream=is_streamed)


def test_failure_is_a_status_before_the_first_byte_and_an_event_after(client):
    broken = script([[0, "one"]], [[0, "two", "stop"]], fail=1)
    with pytest.raises(openai.InternalServerError, match="Prediction failed"):
        client.completions.create(model="scripted", prompt=broken)
    stream = iter(client.completions.create(model="scripted", prompt=broken, stream=True))
    assert next(stream).choices[0].text == "one"
    with pytest.raises(openai.APIError, match="Prediction failed") as found:
        next(stream)
    assert (found.value.type, found.value.param) == ("server_error", None)


def test_stream_whose_worker_dies_ends_with_an_event(start):
    server = start("scripted.py").wait_ready()
    with client_of(server) as client:
        prompt = script([[0, "one"]], [[0, "two", "stop"]], exit=1)
        stream = iter(client.completions.create(model="scripted", prompt=prompt, stream=True))
        assert next(stream).choices[0].text == "one"
        with pytest.raises(openai.APIError, match=r"Worker died: .*SIGKILL") as found:
            next(stream)
        assert found.value.code == "worker_died"
        assert found.value.body["cause"][0] in found.value.message
        whole = script([[0, "one"]], exit=0)
        with pytest.raises(openai.InternalServerError, match=r"Worker died: .*SIGKILL") as found:
            client.completions.create(model="scripted", prompt=whole)
        assert (found.value.status_code, found.value.code) == (500, "worker_died")


def test_cause_is_kept_from_those_who_may_not_know(tmp_path):
    model = pack_handler(tmp_path, "scripted")
    with ConfiguredServer(tmp_path, model, error_details=False) as server, client_of(server) as client:
        prompt = script([[0, "one"]], [[0, "two", "stop"]], exit=1)
        stream = iter(client.completions.create(model="scripted", prompt=prompt, stream=True))
        assert next(stream).choices[0].text == "one"
        with pytest.raises(openai.APIError) as found:
            next(stream)
        assert found.value.message.startswith("Worker died: ")
        assert "cause" not in found.value.body


def test_stream_that_can_be_resumed_survives_its_worker_without_a_gap(start):
    server = start("scripted.py").wait_ready()
    [pid] = server.worker_pids("scripted")
    steps = [[[0, "one "]], [[0, "two "]], [[0, "three "]], [[0, "four", "stop"]]]
    options = {"stream": True, "stream_options": {"include_usage": True}}
    with client_of(server) as client:
        prompt = script(*steps, exit=2, resume=True)
        *chunks, last = client.chat.completions.create(model="scripted", messages=say(prompt), **options)
        deltas = [chunk.choices[0].delta for chunk in chunks]
        assert [delta.content for delta in deltas] == ["", "one ", "two ", "three ", "four", None]
        assert [delta.role for delta in deltas] == ["assistant", None, None, None, None, None]
        assert last.usage.total_tokens == 18
    assert server.worker_pids("scripted") != [pid]


def test_paths_and_methods_that_are_not_there(server):
    reply = server.request("GET", "/v1/chat/completions")
    assert (reply.status, reply.json["error"]["type"]) == (405, "invalid_request_error")
    assert server.request("OPTIONS", "/v1/chat/completions").status == 200
    assert server.request("POST", "/v1/chat/nothing", b"{}").status == 404
    assert server.request("POST", "/v1/chat/nothing", b"{}").json["error"]["message"]
    reply = server.request("POST", "/v1/completions", b"{", JSON)
    assert (reply.status, reply.json["error"]["param"]) == (400, None)


def test_suffix_is_refused_by_a_model_that_does_not_fill_in(client):
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="scripted", prompt="a", suffix="b")
    assert caught.value.param == "suffix"
    assert "scripted" in str(caught.value)


@pytest.mark.parametrize("path", ["/v1/threads", "/v1/chat", "/v1", "/v1/models/a/b"])
def test_path_that_is_not_there_is_answered_with_those_that_are(server, path):
    reply = server.request("POST", path, b"{}", JSON)
    error = reply.json["error"]
    assert (reply.status, error["type"], error["param"], error["code"]) == (404, "invalid_request_error", None, None)
    assert error["message"].startswith(f"There is no POST {path} here. Of OpenAI's API there are POST /v1/chat/comple")
    is_also_kserve_s = path in ("/v1", "/v1/models/a/b")
    assert [*reply.json] == (["code", "type", "message", "error"] if is_also_kserve_s else ["error"])


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", "/v1/chat/completions", "POST"),
        ("DELETE", "/v1/completions", "POST"),
        ("PUT", "/v1/embeddings", "POST"),
        ("POST", "/v1/models", "GET, HEAD"),
        ("DELETE", "/v1/models/scripted", "GET, HEAD"),
    ],
)
def test_method_that_a_path_does_not_take_is_answered_with_those_that_it_does(server, method, path, allowed):
    reply = server.request(method, path)
    error = reply.json["error"]
    assert (reply.status, reply.headers["allow"], error["type"]) == (405, allowed, "invalid_request_error")
    assert error["message"] == f"{path} does not take {method}; use {allowed.replace(', ', ' or ')}."


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models", "/v1/models/scripted"])
def test_a_browser_may_ask_before_it_asks(server, path):
    reply = server.request("OPTIONS", path)
    assert (reply.status, reply.body) == (200, b"")


def test_openai_s_client_understands_a_path_that_is_not_there(client):
    with pytest.raises(openai.NotFoundError, match="There is no POST /v1/images/generations here"):
        client.images.generate(model="scripted", prompt="a")


def test_keys_limits_and_preflights_answer_in_the_same_shape(tmp_path):
    key = "k" * 40
    settings = {
        "keys": KeysConfig(is_on=True),
        "cors": (("Access-Control-Allow-Origin", "*"),),
        "max_request_bytes": 2000,
        "job_queue_size": 1,
    }
    model = pack_handler(tmp_path, "scripted")
    with ConfiguredServer(tmp_path, model, env={"FLAMBEAU_INFERENCE_KEY": key}, **settings) as server:
        with client_of(server, "wrong" * 8) as stranger, pytest.raises(openai.AuthenticationError) as found:
            stranger.completions.create(model="scripted", prompt="a")
        assert found.value.code == "invalid_api_key"
        with client_of(server, key) as client:
            assert client.completions.create(model="scripted", prompt="a").choices[0].text == "a"
            assert [model.id for model in client.models.list()] == ["scripted"]
            with pytest.raises(openai.APIStatusError, match="larger than 2000 bytes") as found:
                client.completions.create(model="scripted", prompt="a" * 3000)
            assert (found.value.status_code, found.value.type) == (413, "invalid_request_error")
        reply = server.request("OPTIONS", "/v1/chat/completions", headers={"Origin": "http://a"})
        assert (reply.status, reply.headers["access-control-allow-origin"]) == (200, "*")


def test_full_queue_is_too_many_requests(tmp_path):
    model = pack_handler(tmp_path, "scripted", config="places: 1\nminWorkers: 1\nmaxWorkers: 1\n")
    endless = script([[0, "a"]], goes_on=True, pause=0.01)
    body = json.dumps({"model": "scripted", "prompt": endless, "stream": True}).encode()
    with ConfiguredServer(tmp_path, model, job_queue_size=1) as server, client_of(server) as client:
        with (
            client.completions.create(model="scripted", prompt=endless, stream=True) as running,
            socket.create_connection(("127.0.0.1", server.port)) as waiting,
        ):
            assert next(iter(running)).choices[0].text == "a"
            waiting.sendall(b"POST /v1/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            server.until(lambda: server.describe("scripted")["jobQueueStatus"]["pendingRequests"] == 1)
            with pytest.raises(openai.RateLimitError, match="all 1 places are taken") as found:
                client.completions.create(model="scripted", prompt="a")
        assert found.value.code == "queue_full"
        assert int(found.value.response.headers["retry-after"]) >= 1


# ---- models and embeddings ----


def test_models(server, client):
    found = {model.id: model for model in client.models.list()}
    assert found.keys() == {"scripted", "embedder"}
    assert {model.owned_by for model in found.values()} == {"flambeau"}
    assert 1.7e9 < found["scripted"].created < 1e10
    assert client.models.retrieve("scripted") == client.models.retrieve("scripted")
    assert client.models.retrieve("scripted@2.0").id == "scripted@2.0"
    with pytest.raises(openai.NotFoundError, match="'nobody' does not exist"):
        client.models.retrieve("nobody")


def test_models_are_what_kserve_says_too(server):
    listed = server.request("GET", "/v1/models").json
    assert listed["models"] == ["echo", "embedder", "private", "scripted"]
    assert server.request("GET", "/v1/models/echo").json == {"name": "echo", "ready": True}
    found = server.request("GET", "/v1/models/scripted:anything").json
    assert (found["name"], found["ready"]) == ("scripted", True)
    reply = server.request("GET", "/v1/models/nobody")
    assert (reply.status, reply.json["type"], reply.json["error"]["code"]) == (
        404,
        "ModelNotFoundException",
        "model_not_found",
    )


def test_embeddings(server, client):
    plain = server.predict("embedder", ["the cat sat", "a dog"]).json
    found = client.embeddings.create(model="embedder", input=["the cat sat", "a dog"])  # in base64
    assert [entry.index for entry in found.data] == [0, 1]
    assert np.abs(np.array([entry.embedding for entry in found.data]) - np.array(plain)).max() < 1e-6
    assert (found.usage.prompt_tokens, found.usage.total_tokens, found.model) == (9, 9, "embedder")
    floats = client.embeddings.create(model="embedder", input="a dog", encoding_format="float")
    assert floats.data[0].embedding == pytest.approx(plain[1], abs=1e-6)
    short = client.embeddings.create(model="embedder@1.0", input="a dog", dimensions=4).data[0].embedding
    assert short == pytest.approx((np.array(plain[1][:4]) / np.linalg.norm(plain[1][:4])).tolist(), abs=1e-6)


def test_what_cannot_be_embedded(client):
    with pytest.raises(openai.BadRequestError, match="token ids are not supported"):
        client.embeddings.create(model="embedder", input=[1, 2])
    with pytest.raises(openai.BadRequestError, match="dimensions must be at most 16"):
        client.embeddings.create(model="embedder", input="a", dimensions=17)
    with pytest.raises(openai.BadRequestError, match="text 0 is empty"):
        client.embeddings.create(model="embedder", input="")
    with pytest.raises(openai.NotFoundError, match="Available: embedder"):
        client.embeddings.create(model="ada", input="a")


def test_requests_are_counted_as_predictions_are(server, client):
    def count():
        lines = server.request("GET", "/metrics", port=server.metrics_port).text.splitlines()
        found = [line for line in lines if line.startswith("ts_inference_requests_total") and '"scripted"' in line]
        return sum(float(line.split()[-1]) for line in found)

    before = count()
    client.completions.create(model="scripted", prompt="a")
    assert count() == before + 1


# ---- docs/openai.md ----


def test_docs_can_be_followed(server, start, tmp_path):
    # test_images.py and test_sounds.py follow those with files.
    client, _, _, handler, *_ = snippets("docs/openai.md", "python")
    commands = [line for shell in snippets("docs/openai.md", "sh") for line in shell.splitlines()]
    named = {":8080": f":{server.port}", "storyteller": "scripted", "minilm": "embedder"}
    for old, new in named.items():
        client = client.replace(old, new)
        commands = [line.replace(old, new) for line in commands]
    result = run(f"{sys.executable} - <<'END'\n{client}\nEND", tmp_path)
    assert result.stdout.startswith("Tell me a story."), result.stderr
    assert "['embedder', 'scripted']" in result.stdout
    assert len(commands) == 4
    for command in commands:
        result = run(command, tmp_path)
        assert result.returncode == 0, (command, result.stdout, result.stderr)
    (tmp_path / "lengths.py").write_text(handler)
    with client_of(start(tmp_path / "lengths.py").wait_ready()) as client:
        found = client.embeddings.create(model="lengths", input=["ab", "a b c"])
        assert [entry.embedding for entry in found.data] == [[2, 1], [5, 1]]
        assert found.usage.prompt_tokens == 4


def test_handler_that_only_claims_to_embed_fails_with_the_remedy(start, tmp_path):
    (tmp_path / "claims.py").write_text(
        "class Claims:\n"
        "    abilities = ('embed',)\n"
        "    def initialize(self, context): pass\n"
        "    def handle(self, data, context): return ['no vectors'] * len(data)\n"
    )
    with (
        client_of(start(tmp_path / "claims.py").wait_ready()) as client,
        pytest.raises(openai.InternalServerError, match="did not answer as one that embeds"),
    ):
        client.embeddings.create(model="claims", input="a")


def test_model_that_loads_is_waited_for_and_may_turn_out_to_generate_nothing(start):
    """Before a model has loaded, nobody knows what it can do."""
    server = start("slow_start.py", env={"SLOW_START_S": "1.5"}).wait_listening()
    body = json.dumps({"model": "slow_start", "prompt": "a"}).encode()
    server.until(lambda: server.request("GET", "/v1/models").json["models"])
    reply = server.request("POST", "/v1/completions", body, JSON)
    assert (reply.status, reply.json["error"]["message"][:28]) == (400, "The model generates no text;")


def test_the_lowest_number_of_priority_goes_first(tmp_path):
    model = pack_handler(tmp_path, "scripted", config="places: 1\nminWorkers: 1\nmaxWorkers: 1\n")
    endless, done = script([[0, "a"]], goes_on=True, pause=0.01), []
    with ConfiguredServer(tmp_path, model) as server, client_of(server) as client, ThreadPoolExecutor(4) as pool:

        def ask(name, **options):
            client.completions.create(model="scripted", prompt=script([[0, name, "stop"]], pause=0.1), **options)
            done.append(name)

        with client.completions.create(model="scripted", prompt=endless, stream=True) as running:
            assert next(iter(running)).choices[0].text == "a"
            asked = {"7": 7, "0": 0, "none": None, "-1": -1}
            for number, (name, priority) in enumerate(asked.items(), 1):
                pool.submit(ask, name, **({} if priority is None else {"extra_body": {"priority": priority}}))
                server.until(lambda n=number: server.describe("scripted")["jobQueueStatus"]["pendingRequests"] == n)
            with pytest.raises(openai.BadRequestError, match="priority -1 means high") as found:
                ask("both", extra_body={"priority": -1}, extra_headers={"x-flambeau-priority": "low"})
            assert found.value.param == "priority"
        server.until(lambda: len(done) == 4)
    assert done == ["-1", "0", "none", "7"]
