"""The chat finds its model and reads the stream of events."""

from __future__ import annotations

import http.server
import json
import threading

import pytest

from flambeau.cli.api_client import RequestFailed
from flambeau.cli.llm_chat import COMMANDS, Conversation, complete_command, find_text_model, read_events
from flambeau.errors import ConfigError


class ManagementApi(http.server.BaseHTTPRequestHandler):
    """Answers as an API that is not the inference API."""

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"models": []}')

    def log_message(self, *words):
        pass


def test_address_that_is_not_the_inference_api_is_an_error():
    with http.server.HTTPServer(("127.0.0.1", 0), ManagementApi) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        with pytest.raises(ConfigError, match="is not the address of an inference API"):
            find_text_model(f"http://127.0.0.1:{server.server_port}")


class LoadingApi(ManagementApi):
    """Answers as the inference API of a server whose model is being loaded."""

    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        one = {"name": "slow", "ready": False}
        document = one if self.path == "/v1/models/slow" else {"data": [], "models": ["slow"]}
        self.wfile.write(json.dumps(document).encode())


def test_model_that_is_being_loaded_is_named():
    with http.server.HTTPServer(("127.0.0.1", 0), LoadingApi) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(ConfigError, match="generates text yet; slow is not ready: see `flambeau models ls`"):
            find_text_model(f"http://127.0.0.1:{server.server_port}")
        server.shutdown()


def test_commands_of_a_conversation(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    talk = Conversation("Be brief.")
    talk.messages.append({"role": "user", "content": "é"})
    assert talk.run("/save talk.json") == "2 messages are in talk.json"
    assert json.loads((tmp_path / "talk.json").read_text(encoding="utf-8")) == talk.messages
    assert talk.run("/save") == "name a file: /save FILE"
    assert talk.run("/save no/such/file") == "no/such/file cannot be written: No such file or directory"
    assert talk.run("/system") == "Be brief."
    talk.run("/clear")
    assert talk.messages == [{"role": "system", "content": "Be brief."}]
    talk.run("/system Rhyme.")
    assert talk.system == "Rhyme."
    assert talk.run("/xyz") == "/xyz is not a command; /help lists them"
    assert all(command in talk.run("/help") for command in COMMANDS)
    assert [complete_command("/s", i) for i in range(3)] == ["/system", "/save", None]


def test_events_become_text_and_errors_are_raised():
    def line(document):
        return b"data: " + json.dumps(document).encode() + b"\n"

    text = line({"choices": [{"delta": {"content": "hi"}}]})
    assert [*read_events([text, b"\n", line({"choices": []}), b"data: [DONE]\n"])] == [("", "hi")]
    thought = line({"choices": [{"delta": {"reasoning_content": "hm"}}]})
    assert [*read_events([thought])] == [("hm", "")]
    with pytest.raises(RequestFailed, match="too long"):
        [*read_events([line({"error": {"message": "too long", "code": 400}})])]
