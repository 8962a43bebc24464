"""LoRA adapters of a served model: in its settings, loaded and unloaded while it serves, on every worker."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from flambeau.config.server import Address, KeysConfig
from support.configured import ConfiguredServer
from support.running import free_ports

pytest.importorskip("torch")
pytest.importorskip("sentencepiece")
pytest.importorskip("safetensors")

from support.adapters import layer_shapes, write_adapter
from support.language_models import write_language_model
from support.network_server import serving_networks


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model and three adapters of it."""
    folder = tmp_path_factory.mktemp("adapters")
    shapes = layer_shapes(write_language_model(folder / "model"))
    for seed, name in enumerate(("pirate", "poet", "other"), 1):
        write_adapter(folder / name, shapes, seed=seed)
    return folder


@pytest.fixture(scope="module")
def server(folder):
    adapters = {"pirate": str(folder / "pirate")}
    with serving_networks(folder, {"tiny": folder / "model"}, lora_adapters=adapters) as running:
        yield running


def post(server, path, document):
    return server.request("POST", path, json.dumps(document).encode(), headers={"content-type": "application/json"})


def manage(server, call, **document):
    headers = {"content-type": "application/json"}
    return server.manage("POST", f"/v1/{call}", json.dumps(document).encode(), headers=headers)


def complete(server, model):
    options = {"prompt": "To be, or not to be", "temperature": 0, "max_tokens": 12, "ignore_eos": True}
    return post(server, "/v1/completions", {"model": model, **options})


def text_of(server, model):
    reply = complete(server, model)
    assert reply.status == 200, reply.body
    assert reply.json["model"] == model
    return reply.json["choices"][0]["text"]


def names_of(server):
    return [entry["id"] for entry in server.request("GET", "/v1/models").json["data"]]


def test_an_adapter_of_the_settings_is_named_as_a_model(server):
    assert text_of(server, "pirate") == text_of(server, "tiny:pirate") != text_of(server, "tiny")
    assert names_of(server) == ["tiny", "pirate"]
    entry = server.request("GET", "/v1/models/pirate").json
    assert (entry["id"], entry["parent"]) == ("pirate", "tiny")
    messages = [{"role": "user", "content": "Ahoy"}]
    reply = post(server, "/v1/chat/completions", {"model": "pirate", "messages": messages, "max_tokens": 3})
    assert reply.status == 200


def test_adapters_come_and_go_while_the_model_serves(server, folder):
    plain = text_of(server, "tiny")
    assert complete(server, "poet").status == 404
    reply = manage(server, "load_lora_adapter", lora_name="poet", lora_path=str(folder / "poet"))
    assert reply.status == 200, reply.body
    poem = text_of(server, "poet")
    assert poem not in (plain, text_of(server, "pirate"))
    assert names_of(server) == ["tiny", "pirate", "poet"]
    assert manage(server, "load_lora_adapter", lora_name="poet", lora_path=str(folder / "poet")).status == 400
    # A worker that starts later loads the adapter with its first request.
    [pid] = server.worker_pids("tiny")
    os.kill(pid, signal.SIGKILL)
    server.until(lambda: server.worker_pids("tiny") not in ([], [pid]), timeout=60)
    assert text_of(server, "poet") == poem
    assert manage(server, "unload_lora_adapter", lora_name="poet").status == 200
    assert complete(server, "poet").status == 404
    assert names_of(server) == ["tiny", "pirate"]
    # The name may be used again, for another adapter.
    assert manage(server, "load_lora_adapter", lora_name="poet", lora_path=str(folder / "other")).status == 200
    assert text_of(server, "poet") not in (plain, poem)
    assert manage(server, "unload_lora_adapter", lora_name="poet", model="tiny").status == 200
    assert text_of(server, "tiny") == plain


def test_what_cannot_be_loaded_is_refused_with_the_reason(server, folder):
    reply = manage(server, "load_lora_adapter", lora_name="bad", lora_path=str(folder / "model"))
    assert reply.status == 400
    assert "adapter_config.json" in reply.json["error"]["message"]
    assert manage(server, "load_lora_adapter", lora_name="bad").status == 400
    reply = manage(server, "load_lora_adapter", lora_name="tiny", lora_path=str(folder / "poet"))
    assert (reply.status, "the model itself" in reply.json["error"]["message"]) == (400, True)
    assert manage(server, "load_lora_adapter", lora_name="bad", lora_path="/x", model="none").status == 404
    assert manage(server, "unload_lora_adapter", lora_name="bad").status == 404
    assert server.manage("GET", "/v1/load_lora_adapter").status == 405
    assert "management" in post(server, "/v1/load_lora_adapter", {}).json["error"]["message"]
    assert names_of(server) == ["tiny", "pirate"]


def test_adapters_need_the_management_key(tmp_path):
    keys = {"inference": "i" * 40, "management": "m" * 40}
    env = {f"FLAMBEAU_{name.upper()}_KEY": key for name, key in keys.items()}
    [port] = free_ports(1)
    address = Address(port=port)
    settings = {"inference": address, "management": address, "keys": KeysConfig(is_on=True)}
    with ConfiguredServer(tmp_path, env=env, **settings) as server:  # both APIs at one address, and no model

        def status(key, path="/v1/load_lora_adapter"):
            return server.request("POST", path, b"{}", headers={"authorization": f"Bearer {key}"}).status

        assert status(keys["inference"]) == status("wrong" * 8) == 401
        assert status(keys["management"]) == 400  # no name
        assert status(keys["management"], "/v1/completions") == 401
        assert status(keys["inference"], "/v1/completions") == 400


def test_the_command_loads_and_unloads(server, folder):
    def run(*arguments):
        command = [sys.executable, "-m", "flambeau", "models", *arguments, "--url", server.management_url]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd=folder)

    loaded = run("load-adapter", "sailor", "poet")
    assert (loaded.returncode, loaded.stdout) == (0, 'Adapter "sailor" loaded for model: tiny\n'), loaded.stderr
    assert names_of(server) == ["tiny", "pirate", "sailor"]
    assert run("unload-adapter", "sailor").returncode == 0
    assert run("unload-adapter", "sailor").returncode != 0
    assert names_of(server) == ["tiny", "pirate"]
