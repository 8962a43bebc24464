"""`--log-format json`: every line of a real server is a JSON document, with the ids of its request."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from support.running import RunningServer

HANDLER = """
import logging
import os
import sys

logger = logging.getLogger("my.handler")

class Talkative:
    def initialize(self, context):
        print("loads\\ttabs and \\x1b[31mcolors")
        logger.warning("warned\\nin two lines")

    def handle(self, data, context):
        word = (data[0].get("body") or b"").decode() if isinstance(data[0].get("body"), (bytes, bytearray)) else ""
        if word == "bytes":
            os.write(1, b"\\xff\\xfe raw \\x00\\n\\n\\x1e[40,1]\\n\\x1enot json\\n")
        if word == "log":
            logger.error("logged by %s", word, exc_info=ValueError("its\\ncause"))
            print("printed", file=sys.stderr)
        if word == "fail":
            raise RuntimeError("\\ud800 broken \\n text")
        if word == "stream":
            return stream()
        return ["ok"]

def stream():
    for number in range(2):
        logger.info("part %d", number)
        yield ["x"]
"""
TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("json")
    (folder / "talk.py").write_text(HANDLER)
    arguments = [str(folder / "talk.py"), "--log-format", "json", "--access-log", "--log-level", "debug"]
    running = RunningServer(folder / "log", *arguments).wait_ready()
    yield running
    running.stop()
    for line in running.log.splitlines():  # to the very last one
        json.loads(line)


def documents(server, **wanted):
    """The lines with these values; every line is a document with the same first fields."""
    found = [json.loads(line) for line in server.log.splitlines()]
    for document in found:
        assert list(document)[:4] == ["timestamp", "level", "logger", "message"]
    return [one for one in found if all(one.get(name) == value for name, value in wanted.items())]


def one(server, **wanted):
    [found] = server.until(lambda: documents(server, **wanted))
    return found


def test_output_of_a_worker_has_its_model_and_its_worker(server):
    printed = one(server, message="loads\ttabs and \x1b[31mcolors")
    assert (printed["level"], printed["logger"], printed["model"]) == ("INFO", "MODEL_LOG", "talk")
    assert printed["worker"].startswith("W-")
    logged = one(server, message="warned\nin two lines")
    assert (logged["level"], logged["logger"], logged["worker"]) == ("WARNING", "my.handler", printed["worker"])


def test_request_id_and_trace_id_are_in_the_lines_of_handler_and_access_log(server):
    headers = {"x-request-id": "r-log", "traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
    server.predict("talk", b"log", headers=headers)
    logged = one(server, message="logged by log")
    assert (logged["level"], logged["request_id"], logged["trace_id"]) == ("ERROR", "r-log", TRACE)
    assert logged["exception"].endswith("ValueError: its\ncause")
    access = one(server, request_id="r-log", logger="ACCESS_LOG")
    assert (access["method"], access["path"], access["status"]) == ("POST", "/predictions/talk", 200)
    assert (access["model"], access["trace_id"], access["request_bytes"]) == ("talk", TRACE, 3)
    assert one(server, message="printed")["level"] == "WARNING"


def test_records_of_a_stream_have_its_request_id(server):
    server.predict("talk", b"stream", headers={"x-request-id": "r-stream"})
    assert {one(server, message=f"part {number}")["request_id"] for number in range(2)} == {"r-stream"}


def test_failure_of_a_handler_has_the_ids_of_its_request(server):
    assert server.predict("talk", b"fail", headers={"x-request-id": "r-fail"}).status == 503
    failed = one(server, request_id="r-fail", level="WARNING")
    assert (failed["model"], failed["logger"]) == ("talk", "flambeau.frontend.http.inference")


def test_bytes_that_are_no_text_are_valid_lines(server):
    server.predict("talk", b"bytes")
    server.request("GET", "/%ff%00%0a%e2%80%a8?q=%ff%00")
    server.until(lambda: documents(server, message="\x1enot json"))
    assert documents(server, message="\ufffd\ufffd raw \x00")


def test_a_start_that_fails_is_a_json_line(tmp_path):
    command = [sys.executable, "-m", "flambeau", "serve", str(tmp_path / "missing"), "--log-format", "json"]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert done.returncode == 1
    [document] = map(json.loads, (done.stdout + done.stderr).splitlines())
    assert "does not exist" in document["message"]
