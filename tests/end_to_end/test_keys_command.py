"""Keys of `flambeau serve`: printed, found, made and revoked; who lacks one is told the remedy."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from support.running import RunningServer, path

SHOUT = """
class Shout:
    example = {"text": "hello"}
    def initialize(self, context):
        pass
    def handle(self, data, context):
        return [row["body"]["text"].upper() for row in data]
"""
ENDLESS = """
import itertools, time

def handle(data, context):
    if data is not None:
        return endless(context)

def endless(context):
    for number in itertools.count():
        if context.is_cancelled(0):
            return
        yield f"{number}\\n"
        time.sleep(0.05)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    (folder / "shout.py").write_text(SHOUT)
    (folder / "endless.py").write_text(ENDLESS)
    return folder


@pytest.fixture(scope="module")
def server(folder):
    words = [
        *(str(folder / name) for name in ("shout.py", "endless.py")),
        "--require-token",
        "--key-file",
        str(folder / "key_file.json"),
    ]
    running = RunningServer(folder / "log", *words).wait_ready()
    yield running
    running.stop()


def run(command, folder, **env):
    """Run a shell command in a folder, with `flambeau` on its path."""
    binaries = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables = {**os.environ, "PATH": binaries, "PYTHONPATH": path(), **env}
    return subprocess.run(command, shell=True, cwd=folder, env=variables, capture_output=True, text=True, timeout=100)


def test_printed_command_carries_the_key(server, folder, tmp_path):
    [line] = server.until(lambda: server.logged("try: ", "shout"))
    assert json.loads((folder / "key_file.json").read_text())["inference"]["key"] not in server.log
    assert run(line.partition("try: ")[2], tmp_path).stdout == "HELLO"


def test_command_finds_the_key_beside_it_or_in_the_environment(server, folder, tmp_path):
    ls = f"flambeau models ls --url {server.management_url}"
    assert "shout" in run(ls, folder).stdout
    missing = run(ls, tmp_path)
    assert missing.returncode == 1
    assert "needs a key" in missing.stderr
    assert "flambeau keys show management" in missing.stderr
    assert "shout" in run(ls, tmp_path, FLAMBEAU_KEY_FILE=str(folder / "key_file.json")).stdout
    key = json.loads((folder / "key_file.json").read_text())["management"]["key"]
    assert "shout" in run(ls, tmp_path, FLAMBEAU_KEY=key).stdout
    (folder / "body.json").write_text('{"text": "hi"}')
    assert run(f"flambeau predict shout body.json --url {server.url}", folder).stdout == "HI"


@pytest.mark.parametrize(
    "target", ["/predictions/shout", "/v1/models", "/v1/chat/completions", "/v1/models/shout:predict", "/v2", "/ping"]
)
def test_caller_without_a_key_gets_401_and_the_remedy(server, target):
    reply = server.request("GET", target)
    assert (reply.status, reply.headers["www-authenticate"]) == (401, "Bearer")
    assert "Authorization: Bearer KEY" in reply.text
    assert "flambeau keys show inference" in reply.text
    assert reply.body.endswith(b"\n")


def test_management_rejects_a_wrong_key(server, folder):
    key = json.loads((folder / "key_file.json").read_text())["inference"]["key"]
    reply = server.manage("GET", "/models", headers={"Authorization": f"Bearer {key}"})
    assert reply.status == 401
    assert reply.message.startswith("The key is for the inference API. Send the management key")


def test_key_is_made_listed_and_revoked_while_the_server_runs(server, folder):
    made = run("flambeau keys new bob", folder)
    header = {"Authorization": f"Bearer {made.stdout.strip()}"}
    server.until(lambda: server.predict("shout", {"text": "a"}, headers=header).status == 200)
    listed = run("flambeau keys list --json", folder).stdout
    assert {key["name"]: (key["api"], key["expires"]) for key in json.loads(listed)} == {
        "management": ("management", "never"),
        "inference": ("inference", "never"),
        "API": ("API", "never"),
        "bob": ("inference", "never"),
    }
    assert made.stdout.strip() not in listed
    assert run("flambeau keys new bob", folder).returncode == 1
    assert run("flambeau keys revoke bob", folder).returncode == 0
    server.until(lambda: server.predict("shout", {"text": "a"}, headers=header).status == 401)
    assert "did you mean inference?" in run("flambeau keys revoke inferense", folder).stderr


def test_key_of_a_user_has_limits(server, folder):
    limits = "--requests-per-minute 2 --tokens-per-minute 1000 --concurrent 5 --model shout --priority low --weight 2"
    made = run(f"flambeau keys add ann {limits}", folder)
    header = {"Authorization": f"Bearer {made.stdout.strip()}"}
    server.until(lambda: server.request("GET", "/v1/models", headers=header).status == 200)
    first = server.predict("shout", {"text": "a"}, headers=header)
    assert (first.status, first.headers["x-ratelimit-limit-requests"]) == (200, "2")
    assert first.headers["x-ratelimit-remaining-requests"] == "1"
    assert first.headers["x-ratelimit-reset-requests"].endswith("s")
    assert first.headers["x-ratelimit-limit-tokens"] == "1000"
    assert server.predict("shout", {"text": "a"}, headers=header).status == 200
    over = server.predict("shout", {"text": "a"}, headers=header)
    assert over.status == 429
    assert 1 <= int(over.headers["retry-after"]) <= 30
    assert "limited to 2 requests a minute" in over.message
    other = server.predict("endless", b"", headers=header)
    assert (other.status, other.json["type"]) == (403, "ForbiddenException")
    assert "only shout" in other.message
    assert server.request("GET", "/v1/models", headers=header).json["models"] == ["shout"]
    usage = run(f"flambeau keys usage --json --url {server.management_url}", folder)
    [ann] = [key for key in json.loads(usage.stdout) if key["name"] == "ann"]
    assert (ann["requests"], ann["running"], ann["rejected"]) == (2, 0, {"requests": 1})
    assert "ann" in run(f"flambeau keys usage --url {server.management_url}", folder).stdout
    assert "2 requests/min" in run("flambeau keys list", folder).stdout
    metrics = server.request("GET", "/metrics", port=server.metrics_port).text
    assert 'flambeau_key_requests_total{key="ann"} 2' in metrics
    assert 'flambeau_key_rejected_total{key="ann",limit="requests"} 1' in metrics
    assert run("flambeau keys limit ann --concurrent 9", folder).stdout == "ann: 9 at a time\n"
    server.until(lambda: server.predict("shout", {"text": "a"}, headers=header).status == 200)
    assert server.predict("shout", {"text": "a"}, headers=header).status == 200
    assert run("flambeau keys revoke ann", folder).returncode == 0


# ---- limits of a key over WebSockets: every message is a request ----


@pytest.fixture
def socket_of(server, folder):
    """Opens WebSockets to models with a new key that has limits."""
    names = []

    def make(limits):
        names.append(f"ws{len(names)}-{os.getpid()}")
        made = run(f"flambeau keys add {names[-1]} {limits}", folder)
        headers = {"Authorization": f"Bearer {made.stdout.strip()}"}
        server.until(lambda: server.request("GET", "/v1/models", headers=headers).status == 200)
        url = server.url.replace("http", "ws") + "/predictions/"
        return lambda model: connect(url + model, additional_headers=headers), names[-1]

    yield make
    for name in names:
        run(f"flambeau keys revoke {name}", folder)


def closed_with(ws):
    """The code and the reason of a session's end."""
    with contextlib.suppress(ConnectionClosed):
        while True:
            ws.recv(timeout=60)
    return ws.close_code, ws.close_reason


def usage_of(server, folder, name):
    usage = run(f"flambeau keys usage --json --url {server.management_url}", folder)
    return next(key for key in json.loads(usage.stdout) if key["name"] == name)


def test_messages_of_a_websocket_count_as_requests_of_its_key(server, folder, socket_of):
    open_socket, name = socket_of("--requests-per-minute 2")
    with open_socket("shout") as ws:
        for _ in range(2):
            ws.send('{"text": "a"}')
            assert [ws.recv(timeout=60), ws.recv(timeout=60)] == ["A", ""]
        ws.send('{"text": "a"}')
        code, reason = closed_with(ws)
    assert code == 4429
    assert "limited to 2 requests a minute" in reason
    assert "Try again in" in reason
    with open_socket("shout") as ws:  # another connection has no other limit
        ws.send('{"text": "a"}')
        assert closed_with(ws)[0] == 4429
    found = usage_of(server, folder, name)
    assert (found["requests"], found["running"], found["rejected"]) == (2, 0, {"requests": 2})


def test_messages_of_several_websockets_run_at_a_time_as_the_key_allows(server, folder, socket_of):
    open_socket, name = socket_of("--concurrent 1")
    with open_socket("endless") as first:
        first.send("go")
        assert first.recv(timeout=60) == "0\n"
        with open_socket("shout") as second:
            second.send('{"text": "a"}')
            code, reason = closed_with(second)
        assert (code, "1 requests at a time" in reason) == (4429, True)
        assert first.recv(timeout=60) == "1\n"  # the first goes on
    server.until(lambda: usage_of(server, folder, name)["running"] == 0)  # a closed session gives its place back
    with open_socket("shout") as ws:
        ws.send('{"text": "a"}')
        assert ws.recv(timeout=60) == "A"


def test_websocket_of_a_key_reaches_only_the_models_that_it_may_use(socket_of):
    open_socket, _ = socket_of("--model shout")
    with open_socket("endless") as ws:
        ws.send("go")
        code, reason = closed_with(ws)
    assert code == 4403
    assert "may not use the model 'endless'" in reason
    with open_socket("shout") as ws:
        ws.send('{"text": "a"}')
        assert ws.recv(timeout=60) == "A"


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ("inference", "flambeau keys new inference"),
        ("eve --priority urgent", "high, normal, low"),
        ("eve --weight 1000", "from 0.01 to 100"),
        ("'e v e'", "not a name"),
    ],
)
def test_wrong_limits_are_refused(folder, server, words, remedy):
    refused = run(f"flambeau keys add {words}", folder)
    assert refused.returncode == 1
    assert remedy in refused.stderr


def lines_of_stream(address, key, body=None):
    """The lines of a streamed response, as they come."""
    connection = http.client.HTTPConnection(*address, timeout=60)
    with contextlib.closing(connection):
        path = "/console/events" if body is None else "/predictions/endless"
        connection.request("GET" if body is None else "POST", path, body, {"Authorization": f"Bearer {key}"})
        with connection.getresponse() as response:
            assert response.status == 200
            yield from response


def test_revoked_key_ends_its_open_streams(server, folder):
    made = [run(f"flambeau keys new {name}", folder).stdout.strip() for name in ("watcher --api management", "reader")]
    console = lines_of_stream(("127.0.0.1", server.management_port), made[0])
    numbers = lines_of_stream(("127.0.0.1", server.port), made[1], b"")
    assert (next(console), next(numbers)) == (b"event: history\n", b"0\n")
    for name in ("watcher", "reader"):
        run(f"flambeau keys revoke {name}", folder)
    last = [*console][-3:]
    assert last[0] == b"event: end\n"
    assert b"The key is wrong, or was revoked" in last[1]
    assert list(numbers)  # which ends, as the connection is closed
    server.until(lambda: server.logged("streams with a key that was revoked or has expired"))
