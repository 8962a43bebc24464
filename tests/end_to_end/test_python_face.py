"""flambeau.serve, Client and AsyncClient against real server processes."""

from __future__ import annotations

import asyncio
import http.server
import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

import flambeau
from flambeau.config.server import KeysConfig
from flambeau.errors import ApiError, CallTimedOut, ClientError, ConfigError, NoConnection, ServerNotStarted
from support.archives import pack_handler
from support.configured import ConfiguredServer
from support.file_server import serving, serving_files
from support.running import HANDLERS, is_running

ECHOED = '{\n  "row": {\n    "body": "a"\n  },\n  "batch": 1\n}'  # without a content type, as the contract has it
WORDS = ["one\n", "two, ü\n", "", "three\r\n"]


SPOKEN = ["one\n", "two, ü\n", b"three\r\n", b"\xff\x00"]


def double(value):
    return value * 2


def speak(order):
    for i, word in enumerate(WORDS):
        if i == order.get("fail at"):
            raise RuntimeError("broke in the middle")
        yield word
    yield b"\xff\x00"


class Naps:
    def initialize(self, context):
        pass

    def handle(self, data, context):
        time.sleep(data[0]["body"])
        return ["awake"]


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    pack_handler(folder, "scripted")
    pack_handler(folder, "echo")
    return folder


@pytest.fixture(scope="module")
def server(store):
    with flambeau.serve(double, speak, Naps, store / "scripted.mar", model_store=store) as running:
        yield running


# ---- the client ----


def test_values_texts_and_bytes_go_there_and_back(server):
    client = server.client
    assert client.predict("double", 21) == 42
    assert client.predict("double", {"a": 1}.keys().__len__()) == 2
    assert client.predict("double", "ab") == "abab"
    assert client.predict("double", [1, {"b": None}]) == [1, {"b": None}, 1, {"b": None}]
    assert client.predict("double", b"x", version="1.0") in (b"xx", "xx")


def test_parts_of_a_stream_arrive_as_they_were_made(server):
    assert [*server.client.stream("speak", {})] == SPOKEN


def test_stream_that_fails_raises_the_cause_after_its_parts(server):
    found = []
    with pytest.raises(ApiError, match="RuntimeError: broke in the middle") as caught:
        found.extend(server.client.stream("speak", {"fail at": 1}))  # list.extend keeps nothing of a failed iteration
    assert caught.value.status == 503
    assert caught.value.request_id
    parts = server.client.stream("speak", {"fail at": 1})
    assert next(parts) == "one\n"
    with pytest.raises(ApiError):
        next(parts)


def test_error_of_a_handler_carries_status_cause_and_request_id(server):
    with pytest.raises(ApiError) as caught:
        server.client.predict("double", {"a": 1})
    error = caught.value
    assert error.status == 503
    assert "TypeError: unsupported operand" in str(error)
    assert "in double" in error.cause
    assert error.request_id in server.logs
    with pytest.raises(ApiError) as caught:
        server.client.predict("nobody")
    assert (caught.value.status, caught.value.kind) == (404, "ModelNotFoundException")


def test_slow_answer_times_out_and_the_client_goes_on(server):
    with pytest.raises(CallTimedOut, match="raise timeout_s"):
        server.client.predict("naps", 0.6, timeout_s=0.1)
    assert server.client.predict("naps", 0, timeout_s=60) == "awake"


def test_missing_server_is_named(server):
    with pytest.raises(NoConnection, match=r"no server answers at http://127\.0\.0\.1:9 "):
        flambeau.Client("http://127.0.0.1:9").predict("double", 1)
    with pytest.raises(CallTimedOut, match="was not ready after"):
        flambeau.Client("http://127.0.0.1:9").wait_ready(timeout_s=0.2)


def test_threads_share_a_client_and_its_connections(server):
    from concurrent.futures import ThreadPoolExecutor

    with flambeau.Client(server.url) as client, ThreadPoolExecutor(8) as pool:
        assert [*pool.map(lambda i: client.predict("double", i), range(100))] == [2 * i for i in range(100)]


def test_models_are_registered_described_scaled_and_removed(server):
    models = server.client.models
    assert {"double", "speak", "naps", "scripted"} <= {model["modelName"] for model in models.list()}
    assert "registered with 1 initial workers" in models.register("echo.mar", name="mine", batch_size=2)
    assert models.describe("mine")["batchSize"] == 2
    assert "scaled to 0" in models.scale("mine", 0)
    assert "unregistered" in models.unregister("mine")
    with pytest.raises(ApiError, match="Model not found: mine"):
        models.describe("mine")


def test_health_says_whether_every_model_can_answer(server):
    health = server.client.health()
    assert (health.is_ready, health.status) == (True, "ready")
    server.client.wait_ready()


def test_language_model_generates_and_chats(server):
    client = server.client
    whole = client.generate("one two", model="scripted", max_tokens=3)
    assert whole
    assert "".join(client.stream_generate("one two", model="scripted", max_tokens=3)) == whole
    reply = client.chat("hello", model="scripted", max_tokens=3)
    assert reply
    messages = [{"role": "user", "content": "hello"}]
    assert "".join(client.stream_chat(messages, model="scripted", max_tokens=3)) == reply
    with pytest.raises(ApiError, match="temperature") as caught:
        client.generate("x", model="scripted", temperature=99)
    assert caught.value.status == 400


async def test_async_client_does_the_same_from_one_loop(server):
    async with server.async_client() as client:
        answers = await asyncio.gather(*(client.predict("double", i) for i in range(50)))
        assert answers == [2 * i for i in range(50)]
        assert [part async for part in client.stream("speak", {})] == SPOKEN
        with pytest.raises(ApiError, match="broke in the middle"):
            [part async for part in client.stream("speak", {"fail at": 2})]
        with pytest.raises(ApiError) as caught:
            await client.predict("nobody")
        assert caught.value.status == 404
        with pytest.raises(CallTimedOut):
            await client.predict("naps", 0.6, timeout_s=0.1)
        assert (await client.models.describe("double"))["modelName"] == "double"
        assert "double" in {model["modelName"] for model in await client.models.list()}
        assert (await client.health()).is_ready
        whole = await client.chat("hello", model="scripted", max_tokens=3)
        assert "".join([text async for text in client.stream_chat("hello", model="scripted", max_tokens=3)]) == whole
        assert await client.generate("one two", model="scripted", max_tokens=3)
    with pytest.raises(NoConnection):
        await flambeau.AsyncClient("http://127.0.0.1:9").predict("double", 1)


def test_keys_come_from_the_argument_or_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "server"
    folder.mkdir()
    with ConfiguredServer(folder, HANDLERS / "echo.py", pages=True, keys=KeysConfig(is_on=True)) as running:
        with pytest.raises(ApiError) as caught:
            flambeau.Client(running.url).predict("echo", "a")
        assert caught.value.status in (400, 401)
        client = flambeau.Client(running.url, key_file=folder / "key_file.json")
        assert client.predict("echo", "a") == ECHOED
        assert [model["modelName"] for model in client.models.list()] == ["echo"]  # at the port that / names
        keys = json.loads((folder / "key_file.json").read_bytes())
        assert flambeau.Client(running.url, key=keys["inference"]["key"]).predict("echo", "a") == ECHOED


async def test_list_of_models_without_an_end_is_an_error():
    with serving_files() as web:
        for start in ("/models", "/models?next_page_token=1"):
            web.files[start] = b'{"models": [{"modelName": "a", "modelUrl": "a"}], "nextPageToken": "1"}'
        with pytest.raises(ClientError, match="the list of models has no end: the page '1'"):
            flambeau.Client(web.url, management_url=web.url).models.list()
        with pytest.raises(ClientError, match="no end"):
            async with flambeau.AsyncClient(web.url, management_url=web.url) as client:
                await client.models.list()
        web.files["/models"] = b'{"models": [], "nextPageToken": "2"}'
        with pytest.raises(ClientError, match="no end"):
            flambeau.Client(web.url, management_url=web.url).models.list()


class BusyOnce(http.server.BaseHTTPRequestHandler):
    """Answers 503 with Retry-After, then 200."""

    num_calls = 0

    def do_POST(self):
        type(self).num_calls += 1
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(503 if self.num_calls == 1 else 200)
        self.send_header("Retry-After", "0")
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, *_):
        pass


def test_busy_server_is_asked_again_only_on_request():
    with serving(http.server.ThreadingHTTPServer(("127.0.0.1", 0), BusyOnce)) as busy:
        url = f"http://127.0.0.1:{busy.server_port}"
        with pytest.raises(ApiError, match="HTTP 503"):
            flambeau.Client(url).predict("m", 1)
        BusyOnce.num_calls = 0
        assert flambeau.Client(url, retries=1).predict("m", 1) == "ok"


class OneEach(BusyOnce):
    """Closes each connection after its answer, without saying so."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        type(self).num_calls = 1
        super().do_POST()
        self.close_connection = True


def test_connection_that_the_server_has_closed_is_replaced():
    with (
        serving(http.server.ThreadingHTTPServer(("127.0.0.1", 0), OneEach)) as server,
        flambeau.Client(f"http://127.0.0.1:{server.server_port}") as client,
    ):
        for _ in range(3):
            assert client.predict("m", 1) == "ok"
            time.sleep(0.05)  # for the end of the connection to arrive


# ---- the server ----


def run_script(folder: Path, text: str, **options):
    script = folder / "script.py"
    script.write_text(textwrap.dedent(text))
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, **options
    )


def test_script_without_a_guard_serves_what_it_defines(tmp_path):
    (tmp_path / "beside.py").write_text("def shift(value):\n    return value + 1\n")
    script = run_script(
        tmp_path,
        """
        import flambeau
        from beside import shift

        def predict(value):
            return {"answer": shift(value)}

        server = flambeau.serve(predict, batch_size=2)
        print(server.client.predict("predict", 41), server.client.models.describe("predict")["batchSize"])
        """,
    )
    output, errors = script.communicate(timeout=100)
    assert (script.returncode, output.strip()) == (0, "{'answer': 42} 2"), errors


def test_server_ends_with_a_process_that_is_killed(tmp_path):
    script = run_script(
        tmp_path,
        """
        import time
        import flambeau

        def predict(value):
            return value

        server = flambeau.serve(predict)
        worker = server.client.models.describe("predict")["workers"][0]["pid"]
        print(server.process.pid, worker, flush=True)
        time.sleep(100)
        """,
    )
    pids = [int(word) for word in script.stdout.readline().split()]
    assert len(pids) == 2
    assert all(map(is_running, pids))
    script.kill()
    script.communicate()
    deadline = time.monotonic() + 60
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


async def test_server_starts_inside_a_running_loop():
    with flambeau.serve(double, port=0) as running:  # any free one, as without it
        async with running.async_client() as client:
            assert await client.predict("double", 2) == 4
        assert running.is_running
    assert not running.is_running
    assert "stopped" in running.logs


def test_server_with_keys_gives_them_to_its_own_clients_only(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with flambeau.serve(double, require_token=True) as running:
        assert running.client.predict("double", 2) == 4
        assert running.client.models.describe("double")["modelName"] == "double"
        assert running.key_file.exists()
        with pytest.raises(ApiError) as caught:
            flambeau.Client(running.url).predict("double", 2)
        assert caught.value.status in (400, 401)
    assert not any(tmp_path.iterdir())


def test_handler_that_cannot_be_loaded_raises_with_its_last_lines():
    class Broken:
        def initialize(self, context):
            raise FileNotFoundError("weights.pt is missing")

        def handle(self, data, context):
            return data

    with pytest.raises(ServerNotStarted, match="broken could not be loaded") as caught:
        flambeau.serve(Broken)
    assert "weights.pt is missing" in caught.value.cause


def test_invalid_paths_and_options_raise_with_the_words_of_the_command(tmp_path):
    with pytest.raises(ServerNotStarted, match=r"missing\.py does not exist"):
        flambeau.serve(tmp_path / "missing.py")
    with pytest.raises(ServerNotStarted, match=r"exited with status 2[\s\S]*batch-sizes"):
        flambeau.serve(double, batch_sizes=2)
    with pytest.raises(ConfigError, match="cannot be served"):
        flambeau.serve(lambda value: value)


def test_file_archive_and_folder_are_served_as_by_the_command(tmp_path, store):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "handler.py").write_text((HANDLERS / "echo.py").read_text())
    with flambeau.serve(str(HANDLERS / "echo.py"), store / "scripted.mar", folder) as running:
        assert {one["modelName"] for one in running.client.models.list()} == {"echo", "scripted", "model"}
        assert (
            running.client.predict("echo", "a")
            == running.client.predict("model", "a")
            == {"row": {"body": "a"}, "batch": 1}
        )
