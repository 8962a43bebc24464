"""A conversation goes to the worker that has read its beginning, here or on another machine."""

from __future__ import annotations

import http.client
import json

import pytest

pytest.importorskip("torch")
pytest.importorskip("sentencepiece")
pytest.importorskip("safetensors")

from support.language_models import ONE_THREAD, write_language_model
from support.running import RunningServer

SETTINGS = """
minWorkers: 2
maxWorkers: 2
cluster: {here: 1, cpus: 0.5}
handler: {name: gpt_handler, model_path: checkpoint, compile: false, max_num_seqs: 8, num_blocks: 256}
"""
TURNS = ["the slings and arrows of outrageous fortune " * 2, "or to take arms against a sea of troubles " * 2]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("affinity")
    write_language_model(folder / "tiny" / "checkpoint")
    (folder / "tiny" / "model-config.yaml").write_text(SETTINGS)
    server = RunningServer(
        folder / "server.log",
        *(str(folder / "tiny"), "--cluster", "local=1", "--worker-address", "127.0.0.1:0"),
        env=ONE_THREAD,
    ).wait_listening()
    server.until(lambda: server.is_ready, timeout=120)  # both load torch
    yield server
    server.stop(timeout=40)


def order(prompt, **more):
    return {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True, **more}


def cached_tokens(server, prompt):
    reply = server.request(
        "POST", "/v1/completions", json.dumps(order(prompt)).encode(), {"Content-Type": "application/json"}
    )
    assert reply.status == 200, reply.text
    return reply.json["usage"]["prompt_tokens_details"]["cached_tokens"]


def begin_stream(server, prompt):
    """Keep a worker busy: the connection and the reply, of which a line was read."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    body = json.dumps(order(prompt, max_tokens=200, stream=True))
    connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    response.readline()
    return connection, response


@pytest.mark.parametrize("name", ["first", "second"])
def test_next_turn_finds_the_blocks_of_the_one_before(server, name):
    """While one worker is busy, the other one gets the first turn; the next turn comes when both are idle."""
    other = "Whether 'tis nobler in the mind to suffer, he asked himself again, or not at all, " + name
    connection, response = begin_stream(server, other)
    beginning = f"{name}: {TURNS[0]}"
    assert cached_tokens(server, beginning) == 0
    response.read()
    connection.close()
    assert cached_tokens(server, beginning + TURNS[1]) >= 16
    assert cached_tokens(server, other + TURNS[1]) >= 16
