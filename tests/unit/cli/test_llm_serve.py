"""What `flambeau llm …` refuses at once, and how it tells what a server refused."""

from __future__ import annotations

import http.server
import threading
from pathlib import Path

import pytest

from flambeau.cli import llm_serve as llm
from flambeau.cli.api_client import connect, failure
from flambeau.cli.checkpoint_path import check
from flambeau.cli.llm_chat import the_model
from flambeau.cli.llm_quantize import quantize
from flambeau.cli.llm_serve import ServeFlags, check_flags
from flambeau.config.server import ServerConfig
from flambeau.errors import ConfigError


def test_a_folder_without_weights_is_no_checkpoint(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="holds no weights"):
        check(tmp_path)
    (tmp_path / "model.safetensors").touch()
    check(tmp_path)


def test_a_file_that_holds_no_weights_is_no_checkpoint(tmp_path):
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ConfigError, match=r"--draft .*notes.txt is no checkpoint; name the folder of one, or its file"):
        check(tmp_path / "notes.txt", "--draft")


@pytest.mark.parametrize("url", ["/no/such", "http://[bad", "http://127.0.0.1:99999", "http://x:port", "ftp://x"])
def test_what_is_no_address_is_refused(url):
    with pytest.raises(ConfigError, match="is not a server's address; write http://host:port"):
        connect(url)


def test_a_name_of_the_hub_gets_the_command_that_fetches_it():
    with pytest.raises(ConfigError, match="hf download someone/some-model --local-dir some-model"):
        check(Path("someone/some-model"))
    with pytest.raises(ConfigError, match=r"or its file$"):
        check(Path("/no/such/folder"))


def test_a_folder_that_is_there_is_no_name_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    with pytest.raises(ConfigError, match=r"or its file$"):
        check(Path("models/lama"))


@pytest.mark.parametrize("named", ["ok", "ok/config.json", "ok/model.safetensors"])
def test_a_model_has_the_name_of_its_folder(tmp_path, monkeypatch, named):
    (tmp_path / "ok").mkdir()
    for file in ("config.json", "model.safetensors"):
        (tmp_path / "ok" / file).touch()
    served = []
    monkeypatch.setattr(llm, "serve_paths", lambda config, paths, *others, **options: served.extend(paths))
    llm.serve(ServerConfig(), ServeFlags(model_path=tmp_path / named), name=None, ranks=1, log_level="INFO")
    assert [path.name for path in served] == ["ok"]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"draft_model_path": Path("/no/draft")}, "--draft /no/draft does not exist"),
        ({"tokenizer_path": Path("/no/tokenizer")}, "--tokenizer /no/tokenizer does not exist"),
        ({"dtype": "float8"}, "--dtype may be float32, bfloat16, float16, not 'float8'"),
        ({"quantization": "int2"}, "--quantization may be int8, int4, fp8, not 'int2'"),
    ],
)
def test_flags_that_no_worker_could_start_with_are_refused(flags, reason):
    with pytest.raises(ConfigError, match=reason):
        check_flags(ServeFlags(model_path=Path(), **flags))


@pytest.mark.parametrize(("content", "reason"), [(None, "cannot be read: No such file"), ("  \n", "is empty")])
def test_a_text_to_measure_with_is_read_before_anything_is_written(tmp_path, content, reason):
    text, into = tmp_path / "text", tmp_path / "into"
    if content is not None:
        text.write_text(content)
    with pytest.raises(ConfigError, match=reason):
        quantize(tmp_path, into, "int8", group_size=64, text=text)
    assert not into.exists()


@pytest.mark.parametrize("body", [b'{"error": {"message": "why"}}', b'{"code": 400, "message": "why"}', b"why"])
def test_the_reason_is_told_whatever_form_an_error_has(body):
    assert str(failure(400, body)) == "why (HTTP 400)"


def test_an_address_that_is_not_the_inference_api_is_told():
    class Other(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"models": []}')

        def log_message(self, *words):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Other) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        with pytest.raises(ConfigError, match="is it another port"):
            the_model(f"http://127.0.0.1:{server.server_port}")
