"""The access log of `flambeau serve` has ids, sizes and whole durations; probes are no failed requests."""

from __future__ import annotations

import http.client
import re
import subprocess
import sys

import pytest

from support.archives import pack_handler
from support.running import RunningServer

STREAM = """
import time
class Stream:
    def initialize(self, context):
        pass
    def handle(self, data, context):
        for number in range(5):
            time.sleep(0.1)
            yield [b"12345678"]
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    pack_handler(folder, "echo")
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory, store):
    folder = tmp_path_factory.mktemp("log")
    (folder / "stream.py").write_text(STREAM)
    words = [str(folder / "stream.py"), "--model-store", str(store), "--access-log"]
    running = RunningServer(folder / "log", *words).wait_ready()
    yield running
    running.stop()


def line_of(server, request_id):
    """The parts of the only access line of a request."""
    [line] = server.until(lambda: server.logged(f"id={request_id}"))
    found = re.search(r'"(\w+) (\S+) HTTP/1.1" (\d+) (\d+) id=\S+ in=(\d+) out=(\d+)(.*)', line)
    assert found is not None, line
    method, path, status, ms, received, sent, end = found.groups()
    return method, path, int(status), int(ms), int(received), int(sent), end


def test_stream_is_logged_with_its_sizes_and_whole_duration(server):
    reply = server.predict("stream", b"abc", headers={"x-request-id": "whole"})
    assert reply.body == b"12345678" * 5
    method, path, status, ms, received, sent, end = line_of(server, "whole")
    assert (method, path, status, received, sent, end) == ("POST", "/predictions/stream", 200, 3, 40, "")
    assert ms >= 400  # five pauses of 100 ms, and clocks that round


def test_stream_whose_client_leaves_is_logged_as_aborted(server):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("POST", "/predictions/stream", b"", {"x-request-id": "gone"})
    connection.getresponse().read(8)
    connection.close()
    assert line_of(server, "gone")[-1] == " aborted"


def test_plain_answer_is_logged_once(server):
    server.request("GET", "/ping", headers={"x-request-id": "plain"})
    assert line_of(server, "plain")[:3] == ("GET", "/ping", 200)


def test_failing_probe_is_no_failed_request(server, store):
    def num_failed():
        text = server.request("GET", "/metrics", port=server.metrics_port).text
        return sum(float(value) for value in re.findall(r"^Requests5XX\S* (\S+)", text, re.MULTILINE))

    pack_handler(store, "broken")
    assert server.manage("POST", "/models?url=broken.mar&initial_workers=1&synchronous=false").status == 202
    server.until(lambda: server.request("GET", "/readyz").status == 503)
    before = num_failed()
    for path in ("/readyz", "/v2/health/ready"):
        assert server.request("GET", path).status == 503
    assert num_failed() == before
    assert server.predict("broken", {}).status == 503
    assert num_failed() == before + 1
    assert server.manage("DELETE", "/models/broken").status == 200


def register(server, source, folder):
    words = [sys.executable, "-m", "flambeau.cli.main", "models", "register", str(source), "--name", "other"]
    words += ["--url", server.management_url]
    return subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=100)


def test_path_is_registered_or_refused_and_never_another_file_of_its_name(server, store, tmp_path):
    own = pack_handler(tmp_path, "echo")
    refused = register(server, own, tmp_path)
    assert refused.returncode == 1
    assert f"it is not in the model store {store}" in refused.stderr
    assert "--allow-url" in refused.stderr
    refused = register(server, "./echo.mar", tmp_path)
    assert refused.returncode == 1
    taken = register(server, store / "echo.mar", tmp_path)
    assert taken.returncode == 0, taken.stderr
    assert server.manage("DELETE", "/models/other").status == 200
    assert register(server, "echo.mar", tmp_path).returncode == 0
    assert server.manage("DELETE", "/models/other").status == 200
    pack_handler(tmp_path, "echo", name="lone")
    hinted = register(server, "lone.mar", tmp_path)
    assert hinted.returncode == 1
    assert "write ./lone.mar" in hinted.stderr
