"""The `flambeau` command, as a person types it."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import time

import pytest

from flambeau import Client, __version__
from flambeau.errors import NoConnection
from flambeau.frontend.tls import self_signed
from support.archives import pack_handler
from support.running import HANDLERS

MODULE = [sys.executable, "-m", "flambeau"]


def flambeau(*words, stdin=b"", **options):
    return subprocess.run([*MODULE, *map(str, words)], input=stdin, capture_output=True, timeout=100, **options)


def test_it_says_which_version_it_is():
    for word in ("version", "--version"):
        result = flambeau(word)
        assert (result.returncode, result.stdout.decode(), result.stderr) == (0, f"{__version__}\n", b"")


def test_models_are_looked_after_from_the_terminal(start, tmp_path):
    store = tmp_path / "store"
    store.mkdir()
    pack_handler(store, "echo")
    server = start("--model-store", store).wait_ready()
    url = ["--url", f"http://127.0.0.1:{server.management_port}"]
    result = flambeau("models", "register", "echo.mar", *url)
    assert result.stdout.decode() == 'Model "echo" Version: 1.0 registered with 1 initial workers\n'
    assert flambeau("models", "scale", "echo", "2", *url).returncode == 0
    listed = json.loads(flambeau("models", "ls", "--json", *url).stdout)
    assert (listed[0]["modelName"], len(listed[0]["workers"])) == ("echo", 2)
    table = flambeau("models", "ls", *url).stdout.decode().splitlines()
    assert table[1].split()[:3] == ["echo", "1.0", "2/2"]
    assert b"batchSize" in flambeau("models", "describe", "echo", *url).stdout
    assert flambeau("models", "default", "echo", "1.0", *url).returncode == 0
    assert flambeau("models", "rm", "echo", *url).stdout == b'Model "echo" unregistered\n'
    result = flambeau("models", "rm", "echo", *url)
    assert result.returncode == 1
    assert result.stderr.decode() == "flambeau: Model not found: echo (HTTP 404)\n"


def test_predict_sends_files_and_standard_input(start, tmp_path):
    server = start("echo.py").wait_ready()
    url = ["--url", f"http://127.0.0.1:{server.port}"]
    file = tmp_path / "x.json"
    file.write_text('{"a": 1}')
    assert json.loads(flambeau("predict", "echo", file, *url).stdout)["row"] == {"body": {"a": 1}}
    assert json.loads(flambeau("predict", "echo", "-", *url, stdin=b"[1]").stdout)["row"] == {"body": [1]}
    raw = json.loads(flambeau("predict", "echo", "-", *url, stdin=b"\xff").stdout)
    assert raw["row"]["body"][0] == "bytearray"
    missing = flambeau("predict", "echo", tmp_path / "none", *url)
    assert missing.returncode == 1
    assert b"cannot be read" in missing.stderr


def test_predict_shows_why_a_request_failed(start):
    server = start("faulty.py").wait_ready()
    result = flambeau("predict", "faulty", "-", "--url", f"http://127.0.0.1:{server.port}", stdin=b'{"do": "raise"}')
    assert result.returncode == 1
    assert b"Prediction failed: " in result.stderr
    assert b"(HTTP 503)" in result.stderr
    assert b"the secret is 42" in result.stderr


def test_no_server_is_said_plainly():
    result = flambeau("models", "ls", "--url", "http://127.0.0.1:9")
    assert result.returncode == 1
    assert b"start one with `flambeau serve`" in result.stderr
    assert b"Traceback" not in result.stderr


def test_certificate_that_is_not_trusted_is_named_with_the_remedy(start, tmp_path):
    certificate, key = self_signed("localhost")
    (tmp_path / "server.pem").write_bytes(certificate)
    (tmp_path / "server.key").write_bytes(key)
    files = ["--certificate-file", tmp_path / "server.pem", "--private-key-file", tmp_path / "server.key"]
    server = start("echo.py", *files)
    server.until(lambda: server.logged("Model server started"))
    url = f"https://127.0.0.1:{server.management_port}"

    def ls(url, **env):
        return flambeau("models", "ls", "--url", url, env={**os.environ, **env})

    refused = ls(url)
    assert refused.returncode == 1
    assert b"is not trusted: self-signed certificate; name its PEM file" in refused.stderr
    assert b"FLAMBEAU_CA_FILE" in refused.stderr
    assert b"echo" in ls(url, FLAMBEAU_CA_FILE=str(tmp_path / "server.pem")).stdout
    other = flambeau("models", "ls", "--url", url, env={**os.environ, "FLAMBEAU_CA_FILE": str(tmp_path / "server.key")})
    assert b"server.key cannot be used: it holds no certificate; name a PEM file" in other.stderr
    assert b"if it uses TLS, write https://127.0.0.1" in ls(url.replace("https", "http")).stderr
    with pytest.raises(NoConnection, match="name its PEM file, or that of its authority, in FLAMBEAU_CA_FILE"):
        Client(f"https://127.0.0.1:{server.port}").predict("echo", "a")


def test_command_without_a_certificate_that_the_server_accepts_has_the_remedy(start, tmp_path):
    certificate, key = self_signed("localhost")
    (tmp_path / "both.pem").write_bytes(certificate + key)
    (tmp_path / "server.pem").write_bytes(certificate)
    (tmp_path / "server.key").write_bytes(key)
    files = ["--certificate-file", tmp_path / "server.pem", "--private-key-file", tmp_path / "server.key"]
    server = start("echo.py", *files, "--client-ca-file", tmp_path / "server.pem")
    server.until(lambda: server.logged("Model server started"))
    url = f"https://127.0.0.1:{server.management_port}"

    def ls(**env):
        trusting = {**os.environ, "FLAMBEAU_CA_FILE": str(tmp_path / "server.pem"), **env}
        return flambeau("models", "ls", "--url", url, env=trusting)

    refused = ls()
    assert refused.returncode == 1
    assert b"if it asks clients for a certificate, name its PEM file" in refused.stderr
    assert b"in FLAMBEAU_CLIENT_CERTIFICATE" in refused.stderr
    assert b"echo" in ls(FLAMBEAU_CLIENT_CERTIFICATE=str(tmp_path / "both.pem")).stdout
    other = ls(FLAMBEAU_CLIENT_CERTIFICATE=str(tmp_path / "server.pem"))
    assert b"server.pem cannot be used: it holds no certificate with its key; name a PEM file" in other.stderr


def test_handler_file_is_registered_from_the_store_and_other_sources_have_a_remedy(start, tmp_path):
    store = tmp_path / "store"
    store.mkdir()
    (tmp_path / "words.py").write_text("def words(text):\n    return len(text.split())\n")
    server = start("echo.py", "--model-store", store).wait_ready()
    register = ["models", "register", "--url", server.management_url]
    assert b"to register that one, write ./words.py" in flambeau(*register, "words.py", cwd=tmp_path).stderr
    refused = flambeau(*register, "./words.py", cwd=tmp_path).stderr.decode()
    assert f"it is not in the model store {store}; copy it there and register words.py" in refused
    assert len(refused.splitlines()) == 1
    (store / "words.py").write_text((tmp_path / "words.py").read_text())
    assert b"registered" in flambeau(*register, "words.py", cwd=store).stdout
    assert server.predict("words", "to be", kind="text/plain").json == 2
    hub = server.manage("POST", "/models?url=org/name@main")
    assert hub.status == 404
    assert "start the server with it (flambeau serve org/name@main), or download it (hf download" in hub.message


def test_a_handler_with_a_syntax_error_is_not_packed(tmp_path):
    handler = tmp_path / "wrong.py"
    handler.write_text("def handle(data, context):\n    return [\n")
    result = flambeau("archive", "pack", "--model-name", "m", "--handler", handler, "--export-path", tmp_path)
    assert result.returncode == 1
    assert f"{handler}:2: the handler has a syntax error: '[' was never closed".encode() in result.stderr
    assert not (tmp_path / "m.mar").exists()


def test_archives_are_packed_inspected_and_unpacked(tmp_path):
    words = ["--model-name", "m", "--handler", HANDLERS / "echo.py", "--export-path", tmp_path]
    result = flambeau("archive", "pack", *words, "--version", "2.0")
    assert result.stdout.decode().strip() == str(tmp_path / "m.mar")
    assert flambeau("archive", "pack", *words).returncode == 1
    assert flambeau("archive", "pack", *words, "--format", "rar").returncode == 1
    shown = json.loads(flambeau("archive", "inspect", tmp_path / "m.mar", "--json").stdout)
    assert shown["manifest"]["model"]["modelVersion"] == "2.0"
    assert {file["name"] for file in shown["files"]} == {"echo.py", "MAR-INF/MANIFEST.json"}
    assert b"echo.py" in flambeau("archive", "inspect", tmp_path / "m.mar").stdout
    assert flambeau("archive", "unpack", tmp_path / "m.mar", "--into", tmp_path / "out").returncode == 0
    assert (tmp_path / "out" / "echo.py").is_file()
    assert flambeau("archive", "unpack", tmp_path / "m.mar", "--into", tmp_path / "out").returncode == 1


def test_handlers_run_in_process(tmp_path):
    inputs = []
    for i in range(2):
        file = tmp_path / f"{i}.json"
        file.write_text(json.dumps({"i": i}))
        inputs += ["--input", file]
    result = flambeau("run", HANDLERS / "echo.py", *inputs, "--json")
    replies = [json.loads(text) for text in json.loads(result.stdout)]
    assert [reply["row"]["body"]["i"] for reply in replies] == [0, 1]
    assert replies[0]["batch"] == 2
    assert b"loaded echo.py" in result.stderr
    packed = pack_handler(tmp_path, "function")
    assert flambeau("run", packed, *inputs[:2]).stdout == b"function: {'i': 0}\n"


def test_exceptions_come_through_when_run_in_process(tmp_path):
    file = tmp_path / "x.json"
    file.write_text('{"do": "raise"}')
    result = flambeau("run", HANDLERS / "faulty.py", "--input", file)
    assert result.returncode == 1
    assert b"ValueError: the secret is 42" in result.stderr
    assert b"flambeau/cli" not in result.stderr
    assert b"typer" not in result.stderr


def test_file_without_a_handler_says_what_to_define(tmp_path):
    (tmp_path / "nothing.py").write_text("x = 1\n")
    result = flambeau("run", tmp_path / "nothing.py")
    assert result.returncode == 1
    assert b"Define one class with initialize(context) and handle(data, context)" in result.stderr
    assert b"Traceback" not in result.stderr


@pytest.mark.parametrize("port", ["99999", "-3"])
def test_port_out_of_range_is_refused(port):
    result = flambeau("serve", HANDLERS / "echo.py", "--port", port)
    assert result.returncode == 2


def test_any_free_port_is_printed(tmp_path):
    words = [
        *MODULE,
        "serve",
        str(HANDLERS / "echo.py"),
        "--port",
        "0",
        "--management-port",
        "0",
        "--metrics-port",
        "0",
    ]
    with subprocess.Popen(words, stderr=subprocess.PIPE, text=True) as process:
        line = process.stderr.readline()
        process.terminate()
        process.stderr.read()
    assert "listening on http://127.0.0.1:" in line
    assert "127.0.0.1:0 " not in line


def test_streams_run_in_process_too(tmp_path):
    file = tmp_path / "x.json"
    file.write_text("{}")
    assert flambeau("run", HANDLERS / "async_streamer.py", "--input", file).stdout == b"0 1 2 3 4 \n"


def test_doctor_looks_at_the_machine():
    findings = json.loads(flambeau("doctor", "--json").stdout)
    assert {"cores", "uvloop", "shared memory", "torch"} <= {finding["what"] for finding in findings}
    assert b"flambeau" in flambeau("doctor").stdout


def test_wrong_words_name_the_right_ones():
    result = flambeau("serve", "--worker-transport", "pigeon")
    assert result.returncode == 2
    assert b"'pigeon' is not one of unix, tcp" in result.stderr
    assert flambeau("serve", "--log-level", "loud").returncode == 2


def test_terminal_sees_progress_and_a_line_to_try(tmp_path, start):
    from support.running import free_ports

    leader, follower = pty.openpty()
    port, management, metrics = map(str, free_ports(3))
    command = [*MODULE, "serve", str(HANDLERS / "slow_start.py"), "--port", port]
    command += ["--management-port", management, "--metrics-port", metrics]
    process = subprocess.Popen(command, stdout=follower, stderr=follower, env={**os.environ, "TERM": "xterm"})
    os.close(follower)
    seen, deadline = "", time.monotonic() + 20
    while f"curl http://127.0.0.1:{port}/predictions/slow_start" not in seen and time.monotonic() < deadline:
        seen += os.read(leader, 65536).decode(errors="replace")
    process.terminate()
    process.wait(60)
    os.close(leader)
    assert "loading slow_start" in seen
    assert f"curl http://127.0.0.1:{port}/predictions/slow_start" in seen


@pytest.mark.slow
def test_examples_answer_without_a_path(start):
    server = start().wait_ready()
    server.until(lambda: "predictions/digits" in server.log)
    example = server.log.partition("predictions/digits")[2].partition("-d '")[2].partition("'")[0]
    reply = server.predict("digits", json.loads(example))
    assert reply.json["digit"] == 7
    assert reply.json["score"] > 0.9
    assert "index_to_name" not in server.log
    for shape in ([64], [1, 64]):
        tensor = {"name": "image", "shape": shape, "datatype": "FP32", "data": json.loads(example)}
        inferred = server.request("POST", "/v2/models/digits/infer", json.dumps({"inputs": [tensor]}).encode())
        assert [each["name"] for each in inferred.json["outputs"]] == ["digit", "score"]
    reply = server.predict("digits", [1, 2])
    assert (reply.status, "64 numbers" in reply.message) == (400, True)
    text = server.predict("storyteller", {"prompt": "Once upon a time", "max_new_tokens": 8}).json["generated_text"]
    assert text.startswith("Once upon a time")
