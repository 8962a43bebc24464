"""`flambeau serve` with a configuration file, variables and flags; the commands that talk to it."""

from __future__ import annotations

import http.client
import json
import os
import ssl
import subprocess
import sys

import pytest

from flambeau.frontend.tls import self_signed
from support.running import HANDLERS, RunningServer, path

CONFIG = """
models:
  - path: {echo}
    name: loud-echo
    workers: 2
  - {function}
certificate_file: certificate.pem
private_key_file: key.pem
cors_allowed_origin: https://pages.example.com
max_request_size: 50
batch_size: 4
job_queue_size: 7
model_defaults:
  function:
    max_batch_delay: 15
"""


class SecureServer(RunningServer):
    """A server at https://localhost."""

    @property
    def url(self) -> str:
        return f"https://localhost:{self.port}"

    def ask(self, method, path, body=None, *, port=None):
        connection = http.client.HTTPSConnection("localhost", port or self.port, context=self.context, timeout=60)
        try:
            connection.request(method, path, body)
            response = connection.getresponse()
            return response, response.read()
        finally:
            connection.close()

    @property
    def context(self):
        return ssl.create_default_context(cafile=self.log_path.parent / "certificate.pem")

    @property
    def is_ready(self):
        try:
            return self.ask("GET", "/readyz")[0].status == 200
        except OSError:
            return False


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("settings")
    certificate, key = self_signed("localhost")
    (folder / "certificate.pem").write_bytes(certificate)
    (folder / "key.pem").write_bytes(key)
    file = folder / "flambeau.yaml"
    file.write_text(CONFIG.format(echo=HANDLERS / "echo.py", function=HANDLERS / "function.py"))
    environment = {
        "FLAMBEAU_CONFIG": str(file),
        "FLAMBEAU_MAX_REQUEST_SIZE": "100",
        "FLAMBEAU_RESPONSE_TIMEOUT": "33",
        "FLAMBEAU_KEYSTORE_PASS": "sesame",
        "FLAMBEAU_JOB_QUEUE_SIZE": "8",
        "FLAMBEAU_MAX_REQEST_SIZE": "1",
    }
    server = SecureServer(folder / "log", "--job-queue-size", "9", env=environment)
    server.environment = {**environment, "SSL_CERT_FILE": str(folder / "certificate.pem"), "FLAMBEAU_URL": server.url}
    yield server.wait_ready()
    server.stop()


def flambeau(server, *words, **environment):
    """Run a command with the variables of the server."""
    ports = {"FLAMBEAU_MANAGEMENT_URL": f"https://localhost:{server.management_port}"}
    env = {**os.environ, "PYTHONPATH": path(), **server.environment, **ports, **environment}
    command = [sys.executable, "-m", "flambeau", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=env, check=False)


def describe(server, name):
    [document] = json.loads(server.ask("GET", f"/models/{name}", port=server.management_port)[1])
    return document


def test_models_of_the_file_are_served_with_their_settings_and_those_of_all(server):
    echo, function = describe(server, "loud-echo"), describe(server, "function")
    assert (len(echo["workers"]), len(function["workers"])) == (2, 1)
    assert (echo["maxBatchDelay"], function["maxBatchDelay"]) == (0, 15)
    assert echo["batchSize"] == function["batchSize"] == 4
    assert echo["responseTimeout"] == function["responseTimeout"] == 33


def test_variable_beats_the_file_and_flag_beats_both(server):
    assert server.ask("POST", "/predictions/function", b"x" * 80)[0].status == 200
    assert server.ask("POST", "/predictions/function", b"x" * 120)[0].status == 413
    assert describe(server, "function")["jobQueueStatus"]["remainingCapacity"] == 9


def test_responses_have_the_cors_header(server):
    headers = server.ask("GET", "/ping")[0].headers
    assert headers["Access-Control-Allow-Origin"] == "https://pages.example.com"


def test_start_prints_the_addresses_of_every_api_and_misspelled_variables(server):
    [line] = server.logged("management API")
    host = "https://127.0.0.1"
    for address in (
        f"management API {host}:{server.management_port}",
        f"console {host}:{server.management_port}/,",
        f"metrics {host}:{server.metrics_port}/metrics",
        f"OpenAI base URL {host}:{server.port}/v1",
    ):
        assert address in line
    assert server.logged("FLAMBEAU_MAX_REQEST_SIZE", "did you mean FLAMBEAU_MAX_REQUEST_SIZE?", level="WARNING")


def test_config_show_has_the_source_of_each_value(server):
    ports = ["--port", server.port, "--management-port", server.management_port, "--metrics-port", server.metrics_port]
    shown = flambeau(server, "config", "show", "--job-queue-size", "9", *ports)
    assert shown.returncode == 0, shown.stderr
    rows = {line.split()[0]: line.split(maxsplit=1)[1] for line in shown.stdout.splitlines()}
    file = server.environment["FLAMBEAU_CONFIG"]
    assert rows["max_request_size"].split() == ["100", "FLAMBEAU_MAX_REQUEST_SIZE"]
    assert rows["job_queue_size"].split() == ["9", "--job-queue-size"]
    assert rows["batch_size"].endswith(f"{file}, line 11")
    assert rows["drain_timeout"].split() == ["30", "default"]
    assert rows["keystore_pass"].split() == ["********", "FLAMBEAU_KEYSTORE_PASS"]
    assert "sesame" not in shown.stdout + shown.stderr
    assert "did you mean FLAMBEAU_MAX_REQUEST_SIZE?" in shown.stderr
    changed = json.loads(flambeau(server, "config", "show", "--changed", "--json").stdout)
    origins = {row["setting"]: row["origin"] for row in changed}
    assert (origins["batch_size"], origins["job_queue_size"]) == ("file", "environment")
    assert "drain_timeout" not in origins


def test_mistakes_end_config_show_and_serve_in_one_line(server, tmp_path):
    file = tmp_path / "f.yaml"
    file.write_text("port: 1\nmax_request_sise: 2\n")
    for command in (("config", "show"), ("serve",)):
        result = flambeau(server, *command, "--config", file)
        assert result.returncode == 1
        assert result.stderr.splitlines()[-1] == (
            f"flambeau: {file}, line 2: max_request_sise is not a setting; did you mean max_request_size?"
        )


def test_unknown_model_gets_the_name_that_was_meant(server):
    response, body = server.ask("POST", "/predictions/loud_eco", b"x")
    assert (response.status, json.loads(body)["message"]) == (404, "Model not found: loud_eco; did you mean loud-echo?")
    result = flambeau(server, "models", "describe", "functoin")
    assert result.stderr == "flambeau: Model not found: functoin; did you mean function? (HTTP 404)\n"
    assert json.loads(server.ask("POST", "/predictions/zzz", b"x")[1])["message"] == "Model not found: zzz"


def test_commands_find_the_server_by_its_variable(server, tmp_path):
    (tmp_path / "x.txt").write_text("hello")
    assert "hello" in flambeau(server, "predict", "function", tmp_path / "x.txt").stdout
    assert "loud-echo" in flambeau(server, "models", "ls").stdout


def complete(server, *words):
    variables = {
        "_FLAMBEAU_COMPLETE": "complete_bash",
        "COMP_WORDS": " ".join(words),
        "COMP_CWORD": str(len(words) - 1),
    }
    command = [sys.executable, "-c", "import sys; sys.argv[0] = 'flambeau'; from flambeau.cli.main import main; main()"]
    env = {**os.environ, **server.environment, "FLAMBEAU_MANAGEMENT_URL": f"https://localhost:{server.management_port}"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=100, env={**env, **variables}, check=False)
    return result.stdout.split()


def test_shell_completes_flags_words_and_models(server):
    assert "--cors-allowed-origin" in complete(server, "flambeau", "serve", "--cors")
    assert complete(server, "flambeau", "serve", "--log-level", "d") == ["debug"]
    assert complete(server, "flambeau", "models", "describe", "lo") == ["loud-echo"]
    assert complete(server, "flambeau", "predict", "fu") == ["function"]


def test_management_api_is_at_the_port_after_that_of_the_variable(server):
    env = {"FLAMBEAU_MANAGEMENT_URL": "", "FLAMBEAU_URL": f"https://localhost:{server.management_port - 1}"}
    assert "loud-echo" in flambeau(server, "models", "ls", **env).stdout
