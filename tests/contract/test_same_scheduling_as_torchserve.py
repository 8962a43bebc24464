"""Stateful, continuous, ticketed and asynchronous models answer here as they do on TorchServe.

Needs an environment with torchserve and Java, named by FLAMBEAU_TORCHSERVE_VENV.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from support.archives import pack_handler
from support.running import free_ports
from support.streams import Stream
from support.torchserve import CommandServer, our_environment, torchserve_environment

VENV = os.environ.get("FLAMBEAU_TORCHSERVE_VENV")
ID = "ts_request_sequence_id"
SEQUENCES = (
    "sequenceBatching: true\nsequenceMaxIdleMSec: 60000\nmaxSequenceJobQueueSize: 2\nmaxNumSequence: 2\nbatchSize: 2\n"
)
MODELS = {
    "sums": ("summing", SEQUENCES),
    "steps": ("stepping", "continuousBatching: true\nbatchSize: 2\n"),
    "both": ("stepping", SEQUENCES + "continuousBatching: true\n"),
    "ticketed": ("noting", "useJobTicket: true\n"),
    "awaited": ("asynchronous", "asyncCommunication: true\n"),
}

pytestmark = [
    pytest.mark.skipif(not VENV, reason="FLAMBEAU_TORCHSERVE_VENV does not name an environment with TorchServe"),
    pytest.mark.timeout(300),
]


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    folder, store = tmp_path_factory.mktemp("both"), tmp_path_factory.mktemp("store")
    for name, (handler, config) in MODELS.items():
        pack_handler(store, handler, name=name, config=config + "minWorkers: 1\nmaxWorkers: 1\n")
    (store / "model-config.yaml").unlink()
    venv = Path(VENV)
    lines = [f"initial_worker_port={free_ports(1)[0]}"]  # its workers' sockets are named by it, in a folder of everyone
    command = [str(venv / "bin" / "torchserve")]
    theirs = CommandServer(command, folder / "theirs", store, lines, torchserve_environment(venv))
    command = [sys.executable, "-m", "flambeau.torchserve.command"]
    ours = CommandServer(command, folder / "ours", store, [], our_environment())
    try:
        yield [server.wait_for_models([*MODELS], 200) for server in (theirs, ours)]
    finally:
        for server in (theirs, ours):
            server.stop()


def seen(reply):
    """What a client sees, without what differs from run to run."""
    body = re.sub(rb'"(pid|calls?)": \d+', rb'"\1": 0', reply.body)
    body = re.sub(rb"ts-seq-[0-9a-f-]{36}", b"ts-seq-new", body)
    body = re.sub(rb'"id": "[^"]*"', b'"id": ""', body)
    headers = {
        name: re.sub("ts-seq-.*", "ts-seq-new", value)
        for name, value in reply.headers.items()
        if name.startswith("ts_") or name in ("content-type", "transfer-encoding")
    }
    if reply.status >= 400:
        problem = json.loads(body)
        return reply.status, headers, {key: problem[key] for key in ("code", "type", "message")}
    return reply.status, headers, body


def ask(servers, model, order, **headers):
    theirs, ours = (seen(server.predict(model, order, headers=headers)) for server in servers)
    if theirs[0] == 503 and "has no worker" in theirs[2]["message"]:  # we add the reason
        assert ours[2].pop("message").startswith(theirs[2].pop("message"))
    assert ours == theirs
    return ours


def test_running_batches(servers):
    status, headers, body = ask(servers, "steps", {"n": 3})
    assert (status, headers) == (200, {"ts_stream_next": "true", "transfer-encoding": "chunked"})
    assert len(body.splitlines()) == 3
    assert ask(servers, "steps", {"n": 1, "whole": True})[1] == {}
    assert ask(servers, "steps", {"n": 3, "raise": 1})[0] == 503
    assert ask(servers, "steps", {"n": 2})[0] == 200


def test_sequences(servers):
    assert ask(servers, "sums", {"add": 3})[1] == {ID: "ts-seq-new"}
    assert json.loads(ask(servers, "sums", {"add": 3}, **{ID: "a"})[2])["sum"] == 3
    assert json.loads(ask(servers, "sums", {"add": 4}, **{ID: "a"})[2])["sum"] == 7
    assert ask(servers, "sums", {"add": 4}, **{ID: "b"})[0] == 503
    assert ask(servers, "sums", {"add": 4, "raise": True}, **{ID: "a"})[0] == 503
    assert json.loads(ask(servers, "sums", {"add": 4}, **{ID: "a"})[2])["sum"] == 15


def test_sequences_in_running_batches(servers):
    assert ask(servers, "both", {"n": 3})[1][ID] == "ts-seq-new"
    assert len(ask(servers, "both", {"n": 3}, **{ID: "a"})[2].splitlines()) == 3
    assert ask(servers, "both", {"n": 1, "whole": True}, **{ID: "a"})[0] == 200
    assert ask(servers, "both", {"n": 1, "whole": True}, **{ID: "b"})[0] == 503
    assert ask(servers, "both", {"n": 2, "end_step": 2}, **{ID: "a"})[0] == 200
    # The place is free again: here at once, while TorchServe lets the next sequence wait.
    assert servers[1].predict("both", {"n": 1, "whole": True}, headers={ID: "b"}).status == 200


def test_tickets(servers, tmp_path):
    busy = []
    for i, server in enumerate(servers):
        note = tmp_path / f"note-{i}"
        busy.append(Stream(server, "ticketed", {"name": "busy", "s": 4, "note": str(note)}))
        server.until(note.exists)
    order = {"name": "late", "note": str(tmp_path / "late")}
    assert ask(servers, "ticketed", order)[0] == 503
    assert [stream.begin().status for stream in busy] == [200, 200]
    for stream in busy:
        stream.leave()


def test_asynchronous_handlers(servers):
    assert json.loads(ask(servers, "awaited", {"i": 1})[2])["i"] == 1
    assert ask(servers, "awaited", {"i": 1, "raise": True})[0] == 503


@pytest.mark.parametrize("model", MODELS)
def test_describe_shows_the_same_settings(servers, model):
    theirs, ours = (server.describe(model) for server in servers)
    keys = ["continuousBatching", "useJobTicket", "stateful", "batchSize"]  # not maxBatchDelay: see docs/migrate.md
    keys += ["sequenceMaxIdleMSec", "sequenceTimeoutMSec", "maxNumSequence", "maxSequenceJobQueueSize"]
    assert {key: ours[key] for key in keys} == {key: theirs[key] for key in keys}
