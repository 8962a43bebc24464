"""Requests with an Idempotency-Key against a real server: many at once, deaths, disconnections, streams."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket

import pytest

from flambeau.config.server import KeysConfig
from support.archives import pack_handler
from support.configured import ConfiguredServer

openai = pytest.importorskip("openai")

FRAGILE = """
import os
from pathlib import Path


def handle(data, context):
    if data is None:
        return None
    order = data[0]["body"]
    with Path(order["note"]).open("a") as note:
        note.write("ran\\n")
    if Path(order["deadly"]).exists():
        os._exit(3)
    if "refuse" in order:
        raise ValueError("never")
    return ["well"]
"""


def key(name="one"):
    return {"Idempotency-Key": name}


def is_replayed(reply):
    return reply.headers.get("idempotency-replayed") == "true"


def num_runs(note):
    return len(note.read_text().splitlines()) if note.exists() else 0


def held_order(folder):
    """A request that runs until the gate is there."""
    note, gate = folder / "note", folder / "gate"
    return {"name": "a", "note": str(note), "until": str(gate)}, note, gate


def begin(server, order, name="one", path="/predictions/noting"):
    """Send a request on a connection of its own, and read nothing."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("POST", path, json.dumps(order), {"content-type": "application/json", **key(name)})
    return connection


def test_fifty_clients_with_one_key_run_the_handler_once(start, tmp_path):
    server = start("noting.py", "--workers", "2").wait_ready()
    order, note, gate = held_order(tmp_path)
    replies = server.at_once(lambda _: server.predict("noting", order, headers=key()), [*range(50)])
    server.until(lambda: num_runs(note) == 1)
    other = {**order, "name": "b"}
    refused = server.predict("noting", other, headers=key())
    assert (refused.status, refused.json["code"]) == (422, 422)
    assert "'one'" in refused.message
    gate.touch()
    found = [reply.result() for reply in replies]
    assert {(reply.status, reply.body) for reply in found} == {(200, found[0].body)}
    assert sum(map(is_replayed, found)) == 49
    later = server.predict("noting", order, headers=key())
    assert (later.body, is_replayed(later), num_runs(note)) == (found[0].body, True, 1)
    assert later.headers["x-request-id"] not in {reply.headers["x-request-id"] for reply in found}
    assert server.predict("noting", order, headers=key("two")).status == 200
    assert num_runs(note) == 2
    assert server.predict("noting", order, headers=key("")).status == 400
    assert server.predict("noting", order, headers=key("k" * 256)).status == 400


def test_after_a_worker_was_killed_the_same_key_runs_again(start, tmp_path):
    (tmp_path / "fragile.py").write_text(FRAGILE)
    server = start(str(tmp_path / "fragile.py")).wait_ready()
    note, deadly = tmp_path / "note", tmp_path / "deadly"
    order = {"note": str(note), "deadly": str(deadly)}
    deadly.touch()
    died = server.predict("fragile", order, headers=key())
    assert (died.status, is_replayed(died)) == (500, False)
    before = num_runs(note)
    deadly.unlink()
    server.until(lambda: server.worker_pids("fragile"))
    again = server.predict("fragile", order, headers=key())
    assert (again.status, again.body, is_replayed(again)) == (200, b"well", False)
    assert is_replayed(server.predict("fragile", order, headers=key()))
    assert num_runs(note) == before + 1


def test_those_that_wait_get_the_reply_of_the_next_worker(start, tmp_path):
    server = start("noting.py").wait_ready()
    order, note, gate = held_order(tmp_path)
    replies = server.at_once(lambda _: server.predict("noting", order, headers=key()), [*range(5)])
    server.until(lambda: num_runs(note) == 1)
    [pid] = server.worker_pids("noting")
    os.kill(pid, signal.SIGKILL)
    server.until(lambda: num_runs(note) == 2)
    gate.touch()
    assert {(reply.result().status, reply.result().body) for reply in replies} == {(200, replies[0].result().body)}
    assert num_runs(note) == 2


def test_an_error_of_the_handler_is_sent_again(start, tmp_path):
    (tmp_path / "fragile.py").write_text(FRAGILE)
    server = start(str(tmp_path / "fragile.py")).wait_ready()
    note = tmp_path / "note"
    order = {"note": str(note), "deadly": str(tmp_path / "deadly"), "refuse": True}
    first, again = (server.predict("fragile", order, headers=key()) for _ in range(2))
    assert first.status == again.status == 503
    assert (first.body, num_runs(note)) == (again.body, 1)
    assert [is_replayed(first), is_replayed(again)] == [False, True]


def test_a_client_that_comes_back_gets_what_its_first_request_has_made(start, tmp_path):
    server = start("noting.py").wait_ready()
    order, note, gate = held_order(tmp_path)
    first = begin(server, order)
    server.until(lambda: num_runs(note) == 1)
    again, third = begin(server, order), begin(server, order)
    for leaving in (first, third):  # once a later request is answered, the server has read those before it
        assert server.predict("noting", {**order, "name": "b"}, headers=key()).status == 422
        leaving.close()
    gate.touch()
    reply = again.getresponse()
    assert (reply.status, reply.getheader("idempotency-replayed"), num_runs(note)) == (200, "true", 1)
    again.close()


def test_stopping_answers_those_that_wait(start, tmp_path):
    server = start("noting.py").wait_ready()
    order, note, gate = held_order(tmp_path)
    connections = [begin(server, order) for _ in range(3)]
    server.until(lambda: num_runs(note) == 1)
    assert server.predict("noting", {**order, "name": "b"}, headers=key()).status == 422
    server.process.send_signal(signal.SIGTERM)
    server.until(lambda: not server._connects())
    gate.touch()
    replies = [connection.getresponse() for connection in connections]
    assert [reply.status for reply in replies] == [200] * 3
    assert len({reply.read() for reply in replies}) == 1
    assert num_runs(note) == 1
    assert server.process.wait(60) == 0
    for connection in connections:
        connection.close()


def test_a_stream_runs_once_and_is_not_repeated(start, tmp_path):
    server = start("streamer.py").wait_ready()
    order = {"n": 2}
    assert server.predict("streamer", order, headers=key()).status == 200
    again = server.predict("streamer", order, headers=key())
    assert again.status == 409
    assert "as a stream" in again.message


def test_a_stream_whose_client_has_gone_may_run_again(start, tmp_path):
    server = start("streamer.py").wait_ready()
    gate, note = tmp_path / "gate", tmp_path / "note"
    order = {"n": 2, "until": str(gate), "note": str(note)}
    body = json.dumps(order).encode()
    head = "POST /predictions/streamer HTTP/1.1\r\ncontent-type: application/json\r\nidempotency-key: one\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as client:
        client.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        received = b""
        while b"0 " not in received:
            received += client.recv(65536)
        assert server.predict("streamer", order, headers=key()).status == 409
    gate.touch()
    server.until(note.exists)
    assert server.predict("streamer", order, headers=key()).status == 200


@pytest.mark.parametrize("path", ["/v2/models/echo/infer", "/v1/models/echo:predict", "/explanations/echo"])
def test_other_apis_know_the_header(share, path):
    server = share("echo.py")
    document = {"inputs": [{"name": "x", "shape": [1], "datatype": "INT64", "data": [1]}], "instances": [1]}
    headers = {"content-type": "application/json", **key(path)}
    first, again = (server.request("POST", path, json.dumps(document).encode(), headers) for _ in range(2))
    assert first.status == again.status
    assert first.body == again.body
    assert [is_replayed(first), is_replayed(again)] == [False, True]
    assert first.headers.get("content-type") == again.headers.get("content-type")


def test_kept_replies_of_a_model_are_found_whatever_the_key(start, tmp_path):
    server = start(pack_handler(tmp_path, "echo", config="responseCacheMb: 1\n")).wait_ready()
    replies = [server.predict("echo", b"x", headers=key(name)) for name in ("one", "two", "one")]
    assert [reply.headers.get("x-flambeau-cache") for reply in replies[:2]] == [None, "hit"]
    assert [is_replayed(reply) for reply in replies] == [False, False, True]


def test_a_replayed_reply_names_the_version_that_made_it(start, tmp_path):
    for version in ("1.0", "2.0"):
        pack_handler(tmp_path, "echo", name="m", version=version, file=f"m-{version}.mar")
    server = start("--model-store", str(tmp_path)).wait_ready()
    for version in ("1.0", "2.0"):
        assert server.manage("POST", f"/models?url=m-{version}.mar&initial_workers=1").status == 200
    assert server.manage("PUT", "/models/m/2.0/traffic?percent=50").status == 200
    names = {}
    for number in range(8):
        replies = [server.predict("m", b"x", headers=key(str(number))) for _ in range(3)]
        [names[number]] = {reply.headers["x-flambeau-model-version"] for reply in replies}
        assert [is_replayed(reply) for reply in replies] == [False, True, True]
    assert {*names.values()} == {"1.0", "2.0"}


def test_the_key_of_another_user_is_another_key(tmp_path):
    secret = "k" * 40
    settings = {"keys": KeysConfig(is_on=True), "idempotency_cache_mb": 1}
    model = pack_handler(tmp_path, "echo")
    with ConfiguredServer(tmp_path, model, env={"FLAMBEAU_INFERENCE_KEY": secret}, **settings) as server:
        file = tmp_path / "key_file.json"
        document = json.loads(file.read_text())
        other = "o" * 40
        document["bob"] = {**document["management"], "key": other, "api": "inference"}
        file.write_text(json.dumps(document))
        mine, bobs = ({"Authorization": f"Bearer {one}", **key()} for one in (secret, other))
        server.until(lambda: server.request("GET", "/v1/models", headers=bobs).status == 200)
        replies = [server.predict("echo", b"x", headers=headers) for headers in (mine, mine, bobs, bobs)]
        assert [reply.status for reply in replies] == [200] * 4
        assert [is_replayed(reply) for reply in replies] == [False, True, False, True]
        assert server.predict("echo", b"x", headers=key()).status in (400, 401)


def test_without_memory_for_it_the_header_has_no_effect(tmp_path):
    with ConfiguredServer(tmp_path, pack_handler(tmp_path, "echo")) as server:
        replies = [server.predict("echo", body, headers=key()) for body in (b"x", b"x", b"y")]
        assert [reply.status for reply in replies] == [200] * 3
        assert not any(map(is_replayed, replies))


def test_openai_s_client_gets_the_same_chat_again(start, tmp_path):
    server = start(pack_handler(tmp_path, "scripted")).wait_ready()
    prompt = json.dumps({"steps": [[[0, "Hell"]], [[0, "o", "stop"]]]})
    chat = {"model": "scripted", "messages": [{"role": "user", "content": prompt}]}
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        first, again, other = (
            client.chat.completions.create(**chat, extra_headers=key(name)) for name in ("one", "one", "two")
        )
        assert first.choices[0].message.content == "Hello"
        assert first == again
        assert first.id != other.id
        with pytest.raises(openai.UnprocessableEntityError) as found:
            client.chat.completions.create(**chat, temperature=0.5, extra_headers=key())
        assert found.value.code == "idempotency_key_reused"
        assert [*client.chat.completions.create(**chat, stream=True, extra_headers=key("streamed"))]
        with pytest.raises(openai.ConflictError, match="as a stream"):
            client.chat.completions.create(**chat, stream=True, extra_headers=key("streamed"))
