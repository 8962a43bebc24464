"""A generation's reply on its way to the client."""

from __future__ import annotations

import json
from collections import Counter
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from flambeau.config.server import ErrorStyle
from flambeau.errors import InvalidInput, InvalidKey, JobFailed, ModelNotFound, QueueFull, WorkerDied
from flambeau.frontend.http.exchange import Exchange
from flambeau.frontend.openai.completions import CompletionWriter
from flambeau.frontend.openai.requests import CompletionRequest, read_request
from flambeau.frontend.openai.responses import GenerationReply, ResponseHead
from flambeau.wire.generation import Piece, encode_pieces
from flambeau.wire.messages import Part


class Client:
    """Keeps what it is sent."""

    common = b""
    counts_bytes = False
    is_draining = False

    def __init__(self):
        self.sent = b""
        self.is_done = False

    def write(self, data):
        assert not self.is_done
        self.sent += data

    def abort(self):
        raise AssertionError("it was broken off")

    def on_answer(self, exchange, status):
        self.status = status

    def on_finished(self, exchange):
        self.is_done = True

    @property
    def body(self):
        """What came after the head, without the lengths of chunks."""
        head, _, body = self.sent.partition(b"\r\n\r\n")
        if b"chunked" not in head:
            return body.decode()
        return "".join(piece for piece in body.decode().split("\r\n")[1::2])


def new_reply(client, *, is_streamed, names=None):
    exchange = Exchange(client, "POST", "/v1/completions", [], "1.1", 0.0)
    model = SimpleNamespace(answers=Counter(), count_broken=Mock())
    writer = CompletionWriter(ResponseHead("cmpl-1", 1, "m", "fp"), 1, has_logprobs=False, has_usage=False, names=names)
    return GenerationReply(exchange, model, ErrorStyle(has_details=True), writer, is_streamed=is_streamed)


def part(text, reason=None):
    return Part(1, encode_pieces([Piece(0, text, reason)]), last=reason is not None)


def test_parts_of_a_whole_reply_are_kept_until_the_last():
    client = Client()
    reply = new_reply(client, is_streamed=False)
    reply.on_parts([part("a"), part("b")])
    assert client.sent == b""
    reply.on_parts([part("c", "stop")])
    assert json.loads(client.body)["choices"][0]["text"] == "abc"
    assert (client.is_done, reply.model.answers) == (True, {200: 1})


def test_parts_that_arrive_together_are_sent_together_and_end_with_done():
    client = Client()
    reply = new_reply(client, is_streamed=True)
    reply.on_parts([part("a"), part("b")])
    assert client.body.count("data: ") == 2
    assert not client.is_done
    reply.on_parts([part("", "stop")])
    assert client.body.endswith("data: [DONE]\n\n")
    assert (client.is_done, reply.model.answers) == (True, {200: 1})


@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (JobFailed("no", status=400), 400, "invalid_request_error", None),
        (
            JobFailed("is too long for the model's context", status=400),
            400,
            "invalid_request_error",
            "context_length_exceeded",
        ),
        (JobFailed("no", status=503, cause="a traceback"), 503, "server_error", None),
        (InvalidKey("no"), 401, "authentication_error", "invalid_api_key"),
        (ModelNotFound("no"), 404, "invalid_request_error", "model_not_found"),
        (QueueFull("no", retry_after_s=3), 429, "rate_limit_error", "queue_full"),
        (WorkerDied(cause="c"), 500, "server_error", "worker_died"),
        (WorkerDied(cause="c", out_of_memory=True), 507, "server_error", "worker_died"),
    ],
)
def test_error_is_a_status_or_the_last_event(error, status, kind, code):
    client = Client()
    reply = new_reply(client, is_streamed=True)
    reply.on_error(error)
    told = json.loads(client.body)["error"]
    assert (client.status, told["type"], told["code"]) == (status, kind, code)
    assert "traceback" not in client.body
    assert (b"retry-after: 3" in client.sent) is isinstance(error, QueueFull)
    client = Client()
    reply = new_reply(client, is_streamed=True)
    reply.on_parts([part("a")])
    reply.on_error(error)
    *_, last, end = client.body.split("\n\n")
    assert (json.loads(last.removeprefix("data: "))["error"], end) == (told, "")
    assert client.is_done
    reply.model.count_broken.assert_called_once_with(status)


def test_handlers_own_status_is_an_error_and_ends_the_job():
    client = Client()
    reply = new_reply(client, is_streamed=True)
    gone = []
    reply.exchange.on_gone = lambda: gone.append(True)
    reply.on_parts([Part(1, b"not today", last=False, status=418)])
    assert (client.status, json.loads(client.body)["error"]["message"], gone) == (418, "not today", [True])


@pytest.mark.parametrize("is_streamed", [False, True])
def test_a_worker_s_error_names_the_field_as_the_client_does(is_streamed):
    client = Client()
    reply = new_reply(client, is_streamed=is_streamed, names=completion_request(guided_json={"type": "fish"}).names)
    error = InvalidInput("response_format: the JSON schema cannot be enforced at /type", status=400)
    error.field = "response_format"
    reply.on_error(error)
    found = json.loads(client.body)["error"]
    assert found["param"] == "guided_json"
    assert found["message"].startswith("guided_json: the JSON schema cannot")


def test_fields_for_the_form_of_a_text_have_the_names_that_were_sent():
    assert completion_request().names == {}
    assert completion_request(response_format={"type": "text"}, guided_regex="a").names["response_format"] == (
        "guided_regex"
    )
    structured = completion_request(structured_outputs={"regex": "a"})
    assert structured.names == {"response_format": "structured_outputs"}


def completion_request(**fields):
    return read_request(json.dumps({"prompt": "Once", **fields}).encode(), CompletionRequest)
