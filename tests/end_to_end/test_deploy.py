"""The commands of deploy/ as the image, the pod and the service manager run them; only ports and folders are others."""

from __future__ import annotations

import configparser
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import yaml

from flambeau.archive.pack import Recipe, pack
from support.running import HANDLERS, RunningServer, free_ports, path
from support.snippets import ROOT

DEPLOY = ROOT / "deploy"
KEYS = {
    "FLAMBEAU_INFERENCE_KEY": "inference-key-of-32-characters-..",
    "FLAMBEAU_MANAGEMENT_KEY": "management-key-of-32-characters.",
}
INFERENCE = {"Authorization": f"Bearer {KEYS['FLAMBEAU_INFERENCE_KEY']}"}
SLOW = """
import time


class Slow:
    def initialize(self, context):
        pass

    def handle(self, data, context):
        time.sleep(1.5)
        return [row["body"] for row in data]
"""
# The settings of KServe's sample for image classifiers, which names the wrapper's port.
KSERVE_SAMPLE = """
inference_address=http://0.0.0.0:8085
management_address=http://0.0.0.0:8085
metrics_address=http://0.0.0.0:{metrics}
grpc_inference_port={grpc}
grpc_management_port={grpc_management}
enable_envvars_config=true
install_py_dep_per_model=true
enable_metrics_api=true
metrics_mode=prometheus
NUM_WORKERS=1
number_of_netty_threads=4
job_queue_size=10
model_store={store}
model_snapshot={{"name":"startup.cfg","modelCount":1,"models":{{"mnist":{{"1.0":{{"defaultVersion":true,\
"marName":"mnist.mar","minWorkers":1,"maxWorkers":5,"batchSize":5,"maxBatchDelay":200,"responseTimeout":60}}}}}}}}
"""


class Container(RunningServer):
    """A command of an image: no arguments of ours, only the environment and the working folder."""

    def __init__(self, words: Sequence[str], folder: Path, env: Mapping[str, str], ports: Sequence[int]) -> None:
        self.port, self.management_port, self.metrics_port = ports
        self.log_path = folder / "log"
        program = Path(sys.executable).with_name(words[0])
        self.env = {"PATH": os.environ["PATH"], "PYTHONPATH": path(), "HOME": str(folder), **env}
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [program, *words[1:]], cwd=folder, env=self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def __enter__(self) -> Container:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def instructions() -> dict[str, str]:
    """The last ENV, CMD and HEALTHCHECK instructions of the image, with continued lines joined."""
    text = (DEPLOY / "docker" / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line and line[0].isupper()]
    return {word: rest for word, rest in lines if word in ("CMD", "HEALTHCHECK")}


def environment(ports: Sequence[int]) -> dict[str, str]:
    names = ("FLAMBEAU_PORT", "FLAMBEAU_MANAGEMENT_PORT", "FLAMBEAU_METRICS_PORT")
    return dict(zip(names, map(str, ports), strict=True))


@pytest.fixture
def store(tmp_path):
    folder = tmp_path / "models"
    folder.mkdir()
    handler = tmp_path / "slow.py"
    handler.write_text(SLOW)
    pack(Recipe(model_name="slow", handler=str(handler)), folder)
    return folder


@pytest.fixture
def home(tmp_path):
    folder = tmp_path / "home"
    folder.mkdir()
    return folder


def test_image_serves_its_store_is_healthy_and_loses_nothing_when_it_is_stopped(store, home):
    lines = instructions()
    words = [str(store) if word == "/models" else word for word in json.loads(lines["CMD"])]
    assert words[:2] == ["flambeau", "serve"]
    assert str(store) in words
    ports = free_ports(3)
    container = Container(words, home, {"FLAMBEAU_HOST": "0.0.0.0", **environment(ports), **KEYS}, ports)
    with container:
        container.wait_ready()
        probe = json.loads(lines["HEALTHCHECK"].partition(" CMD ")[2])
        probe[0] = sys.executable
        assert subprocess.run(probe, env=container.env, timeout=30, check=False).returncode == 0
        assert container.predict("slow", b"x").status == 401
        assert container.manage("GET", "/models").status == 401
        assert container.request("GET", "/metrics", port=container.metrics_port).status == 200

        replies = []
        threads = [
            threading.Thread(target=lambda: replies.append(container.predict("slow", b"kept", headers=INFERENCE)))
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        container.until(lambda: b'flambeau_queue_jobs{model="slow",version="1.0"} 1' in queue(container))
        container.process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join()
        assert [reply.body for reply in replies] == [b"kept", b"kept"]
        assert container.process.wait(30) == 0
    assert subprocess.run(probe, env=container.env, timeout=30, check=False, stderr=subprocess.DEVNULL).returncode != 0


def queue(container):
    return container.request("GET", "/metrics?name[]=flambeau_queue_jobs", port=container.metrics_port).body


def test_image_without_keys_says_what_is_missing_or_makes_them(store, home):
    ports = free_ports(3)
    words = ["flambeau", "serve", str(store)]
    with Container(words, home, {"FLAMBEAU_HOST": "0.0.0.0", **environment(ports)}, ports) as container:
        container.wait_ready()
        assert container.predict("slow", b"x").status == 401
        assert (home / "key_file.json").stat().st_mode & 0o077 == 0


def test_kserve_runtime_serves_the_sample_of_torchserve_unchanged(home, tmp_path):
    store = tmp_path / "model-store"
    store.mkdir()
    pack(Recipe(model_name="mnist", handler=str(HANDLERS / "echo.py")), store)
    *ports, grpc, grpc_management = free_ports(4)
    config = tmp_path / "config.properties"
    config.write_text(KSERVE_SAMPLE.format(metrics=ports[1], grpc=grpc, grpc_management=grpc_management, store=store))
    runtime, service = yaml.safe_load_all((DEPLOY / "kserve" / "mar-store.yaml").read_text())
    (container,) = runtime["spec"]["containers"]
    replaced = {"/mnt/models/model-store": str(store), "/mnt/models/config/config.properties": str(config)}
    words = [word if "=" not in word else replace_value(word, replaced) for word in container["args"]]
    env = {one["name"]: one["value"] for one in container["env"] if "{{" not in one["value"]}
    env["TS_INFERENCE_ADDRESS"] = env["TS_INFERENCE_ADDRESS"].replace("8080", str(ports[0]))
    # The sample names one port for inference and management; the variable moves the inference API alone.
    env["TS_MANAGEMENT_ADDRESS"] = env["TS_INFERENCE_ADDRESS"]
    with Container(words, home, env, (ports[0], ports[0], ports[1])) as server:
        server.wait_ready()
        assert server.request("GET", "/v2/health/ready").status == 200
        assert server.request("GET", "/v2/models/mnist/ready").status == 200
        assert server.request("GET", "/v1/models/mnist").status == 200
        reply = server.request(
            "POST", "/v1/models/mnist:predict", b'{"instances": [{"data": "x"}]}', {"Content-Type": "application/json"}
        )
        assert reply.status == 200, reply.body
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert server.request("GET", container[probe]["httpGet"]["path"]).status == 200
    sleep_s = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert service["spec"]["predictor"]["terminationGracePeriodSeconds"] > sleep_s + 30


def replace_value(word: str, replaced: Mapping[str, str]) -> str:
    flag, _, value = word.partition("=")
    return f"{flag}={replaced[value]}"


@pytest.mark.slow
def test_kserve_runtime_of_language_models_speaks_the_openai_api(home):
    runtime, _ = yaml.safe_load_all((DEPLOY / "kserve" / "language-models.yaml").read_text())
    (container,) = runtime["spec"]["containers"]
    model = next((ROOT / "src" / "flambeau" / "examples").glob("*/target"))
    words = [word.replace("{{.Name}}", "assistant").replace("/mnt/models", str(model)) for word in container["args"]]
    ports = free_ports(3)
    with Container(words, home, environment(ports), ports) as server:
        server.wait_ready()
        body = json.dumps({"model": "assistant", "prompt": "Once", "max_tokens": 4}).encode()
        reply = server.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        assert reply.status == 200, reply.body
        assert reply.json["usage"]["completion_tokens"] == 4


def test_unit_of_systemd_starts_the_server_with_its_settings_and_keys(store, home, tmp_path):
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string((DEPLOY / "systemd" / "flambeau.service").read_text())
    service = unit["Service"]
    settings = tmp_path / "flambeau.yaml"
    settings.write_text("drain_timeout: 30\nmax_request_size: 10\n")
    replaced = {
        "/opt/flambeau/bin/flambeau": "flambeau",
        "/var/lib/flambeau/models": str(store),
        "/etc/flambeau/flambeau.yaml": str(settings),
    }
    words = [replaced.get(word, word) for word in shlex.split(service["ExecStart"])]
    ports = free_ports(3)
    with Container(words, home, {**environment(ports), **KEYS}, ports) as server:
        server.wait_ready()
        assert server.predict("slow", b"more than ten bytes").status == 413
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(30) == 0
        assert time.monotonic() - began < int(service["TimeoutStopSec"])
    assert service["KillMode"] == "mixed", "SIGTERM to workers would end the requests that are being answered"
