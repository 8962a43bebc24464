"""Models from hostile places: slow downloads, files with code, archives with too many entries."""

from __future__ import annotations

import threading
import time

import pytest

from support.archives import pack_handler
from support.file_server import serving_files

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
