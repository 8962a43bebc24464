"""Models from hostile places: slow downloads, files with code, archives with too many entries."""

from __future__ import annotations

import shutil
import threading
import time

import pytest

from flambeau.metrics.registry import MAX_MODEL_SERIES
from support.archives import pack_handler
from support.file_server import serving_files
from support.hostile_archives import write_many_entries
from support.hostile_programs import write_hostile_program, write_program

NUM_SLOW = 40  # more than the threads that asyncio has for everything else


@pytest.fixture
def slow_web():
    """A web server whose archives arrive a byte at a time."""
    over = threading.Event()
    with serving_files() as web:

        def drip(handler):
            handler.send_response(200)
            handler.send_header("Content-Length", "1000000")
            handler.end_headers()
            try:
                while not over.wait(0.2):
                    handler.wfile.write(b"x")
                    handler.wfile.flush()
            except OSError:
                pass

        for number in range(NUM_SLOW):
            web.files[f"/{number}.mar"] = drip
        yield web
        over.set()


def parts_in(store):
    return [path.name for path in store.iterdir() if path.name.endswith(".part")]


def test_slow_downloads_delay_neither_local_models_nor_the_end_of_the_server(start, tmp_path, slow_web):
    store = tmp_path / "store"
    store.mkdir()
    pack_handler(store, "echo")
    server = start("--model-store", store, "--allow-url", ".*", "--allow-private-urls").wait_listening()
    urls = [f"/models?url={slow_web.url}/{number}.mar" for number in range(NUM_SLOW)]
    calls = server.at_once(lambda url: server.manage("POST", url), urls)
    server.until(lambda: len(slow_web.asked) >= 6)
    began = time.monotonic()
    registered = server.manage("POST", "/models?url=echo.mar&initial_workers=0").status
    registered_s = time.monotonic() - began
    began = time.monotonic()
    assert server.stop(timeout=100) == 0
    stopped_s = time.monotonic() - began
    assert parts_in(store) == []
    assert [call.result().status for call in calls] == [400] * NUM_SLOW
    assert registered == 200
    assert max(registered_s, stopped_s) < 10, f"registered in {registered_s:.1f} s, stopped in {stopped_s:.1f} s"


def test_archive_of_many_entries_is_rejected_at_once(start, tmp_path):
    write_many_entries(tmp_path / "many.mar", 200_000)
    server = start("--model-store", tmp_path).wait_listening()
    began = time.monotonic()
    reply = server.manage("POST", "/models?url=many.mar")
    assert "more than 10000 entries" in reply.message
    assert time.monotonic() - began < 5  # it took this long to parse them


def test_handler_sees_no_key_and_cannot_flood_the_metrics(start, tmp_path):
    keys = {f"FLAMBEAU_{name}_KEY": name.lower() * 20 for name in ("MANAGEMENT", "INFERENCE", "API")}
    (tmp_path / "nosy.py").write_text(NOSY)
    server = start(tmp_path / "nosy.py", "--require-token", env=keys)
    server.until(lambda: "Model server started." in server.log)
    reply = server.predict("nosy", headers={"Authorization": f"Bearer {keys['FLAMBEAU_INFERENCE_KEY']}"})
    assert reply.status == 200
    assert not [value for value in keys.values() if value in reply.text]
    text = server.until(lambda: (found := metrics_of(server)).count("id=") >= MAX_MODEL_SERIES and found)
    assert text.count("id=") == MAX_MODEL_SERIES
    assert "x" * 300 not in text
    assert len(server.logged("nosy", str(MAX_MODEL_SERIES), level="ERROR")) == 1


def metrics_of(server):
    return server.request("GET", "/metrics", port=server.metrics_port).text


NOSY = """
import os, pathlib, sys

def handle(data, context):
    for number in range(5000):
        print(f"[METRICS]Hits.Count:1|#id:{number}|#hostname:h,1700000000")
    print(f"[METRICS]{'x' * 300}.Count:1|#Level:Model|#hostname:h,1700000000")
    print(f"[METRICS]Long.Count:1|#Level:{'x' * 300}|#hostname:h,1700000000", flush=True)
    return [str(dict(os.environ)) + pathlib.Path("/proc/self/cmdline").read_text()]
"""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's, at its own older parts
class TestProgramsWithCode:
    """On real workers: the file's code must not run in them."""

    @pytest.fixture(scope="class")
    def program(self, tmp_path_factory):
        return write_program(tmp_path_factory.mktemp("program") / "net.pt2")

    @pytest.mark.parametrize("way", ["example", "guard"])
    def test_program_with_code_is_rejected(self, start, tmp_path, program, way):
        file = write_hostile_program(tmp_path / "evil.pt2", program, way, tmp_path / "mark")
        server = start("--model-store", tmp_path).wait_listening()
        reply = server.manage("POST", f"/models?url={file.name}&initial_workers=1&synchronous=true")
        assert reply.status == 500
        assert "evil.pt2 holds more than a program" in server.log
        assert not (tmp_path / "mark").exists()

    def test_safe_weights_reject_programs(self, start, tmp_path, program):
        shutil.copy(program, tmp_path / "net.pt2")
        server = start("--model-store", tmp_path, "--safe-weights").wait_listening()
        reply = server.manage("POST", "/models?url=net.pt2&initial_workers=1&synchronous=true")
        assert reply.status == 500
        assert "can run code, and the server does not accept that (safe_weights)" in server.log
