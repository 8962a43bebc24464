"""Configuration as TorchServe's users write it: files, variables, model-config.yaml and snapshots."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

from flambeau.torchserve.config_properties import read_file
from support.archives import pack_handler
from support.command import Command


@pytest.fixture
def command(tmp_path):
    """The command, and a store with one model."""
    command = Command(tmp_path)
    pack_handler(command.store, "echo")
    yield command
    command.stop_all()


def snapshot_of(file):
    return json.loads(read_file(file)["model_snapshot"])


# ---- precedence ----


def test_flags_beat_the_file_and_the_environment_beats_both_where_the_file_allows_it(command):
    pack_handler(command.store, "echo", name="other")
    command.configure("enable_envvars_config=true", "load_models=none.mar", "job_queue_size=5")
    variables = {"TS_LOAD_MODELS": "other.mar", "TS_JOB_QUEUE_SIZE": "7"}
    command.started("--ncs", "--models", "echo.mar", env=variables)
    assert command.models() == ["other"]
    assert command.describe("other")["jobQueueStatus"]["remainingCapacity"] == 7
    command.run("--stop", "--foreground")
    command.configure("load_models=none.mar", "job_queue_size=5")
    command.started("--ncs", "--models", "echo.mar", env=variables)
    assert command.models() == ["echo"]
    assert command.describe("echo")["jobQueueStatus"]["remainingCapacity"] == 5
    assert command.logged("TS_JOB_QUEUE_SIZE", "TS_LOAD_MODELS")


def test_named_file_takes_the_place_of_the_usual_one(command):
    command.configure("load_models=none.mar")
    command.configure("load_models=echo.mar", file="mine.properties")
    command.started("--ncs", "--ts-config", "mine.properties")
    assert command.models() == ["echo"]
    command.run("--stop", "--foreground")
    command.started("--ncs", "--ts-config", "config.properties", env={"TS_CONFIG_FILE": "mine.properties"})
    assert command.models() == ["echo"]


def test_keys_without_meaning_are_named_once_and_misspelt_ones_with_the_nearest(command):
    command.configure("vmargs=-Xmx4g", "number_of_netty_threads=32", "job_queue_sise=3", "cpu_launcher_enable=true")
    command.started("--ncs")
    for key in ("vmargs", "number_of_netty_threads", "cpu_launcher_enable"):
        assert len(command.logged(key)) == 1
    assert command.logged("job_queue_sise", "job_queue_size")


def test_registering_over_the_api_has_to_be_allowed(command):
    command.started("--ncs")
    refused = command.manage("POST", "/models?url=echo.mar")
    assert (refused.status, refused.json["type"]) == (405, "MethodNotAllowedException")
    command.run("--stop", "--foreground")
    command.configure("enable_model_api=false")
    command.started("--ncs", "--enable-model-api")
    assert command.manage("POST", "/models?url=echo.mar").status == 200


# ---- models of a configuration ----

MODELS = (
    'models={"echo": {"1.0": {"defaultVersion": true, "marName": "echo.mar", "minWorkers": 2, "maxWorkers": 3,\\\n'
    '  "batchSize": 4, "maxBatchDelay": 50, "responseTimeout": 7, "startupTimeout": 70}}}'
)


def test_models_configures_startup_models_that_say_nothing_themselves(command):
    command.configure(MODELS, "load_models=echo.mar", "default_response_timeout=33")
    command.started("--ncs")
    said = command.describe("echo")
    assert (said["minWorkers"], said["maxWorkers"]) == (2, 3)
    assert (said["batchSize"], said["maxBatchDelay"]) == (4, 50)
    assert (said["responseTimeout"], said["startupTimeout"]) == (7, 70)


def test_model_config_beats_models_and_what_it_leaves_out_falls_through(command):
    pack_handler(command.store, "echo", config="minWorkers: 1\nmaxWorkers: 1\nbatchSize: 8\nresponseTimeout: 9\n")
    command.configure(MODELS, "load_models=echo.mar", "enable_model_api=true", "default_startup_timeout=44")
    command.started("--ncs")
    said = command.describe("echo")
    assert (said["minWorkers"], said["maxWorkers"], said["batchSize"]) == (1, 1, 8)
    assert (said["maxBatchDelay"], said["responseTimeout"], said["startupTimeout"]) == (50, 9, 70)
    command.manage("POST", "/models?url=echo.mar&model_name=fresh&batch_size=2&startup_timeout=55&response_timeout=5")
    fresh = command.describe("fresh")
    assert (fresh["batchSize"], fresh["responseTimeout"], fresh["startupTimeout"]) == (2, 9, 55)
    command.manage("POST", "/models?url=echo.mar&model_name=plain")
    assert command.describe("plain")["startupTimeout"] == 44


def test_register_call_takes_batches_and_timeouts_from_models_but_no_workers(command):
    command.configure(MODELS, "enable_model_api=true")
    command.started("--ncs")
    command.manage("POST", "/models?url=echo.mar&response_timeout=5&max_batch_delay=20")
    said = command.describe("echo")
    assert (said["minWorkers"], said["batchSize"], said["maxBatchDelay"], said["responseTimeout"]) == (0, 4, 20, 7)


def test_model_config_is_read_with_hints_that_name_the_model(command):
    config = "minWorkers: 2\nbatchsize: 3\nmax_batch_delay: 5\nhandler:\n  threads: 1\nmax_length: 40\n"
    pack_handler(command.store, "echo", config=config)
    command.started("--ncs", "--models", "echo.mar")
    for keys in (("minWorkers", "maxWorkers"), ("batchsize", "batchSize"), ("max_batch_delay", "maxBatchDelay")):
        assert command.logged("model-config.yaml", "echo", *keys, level="WARNING")
    assert "max_length" not in command.log
    assert "threads" not in command.log


# ---- snapshots ----


def test_snapshots_are_written_at_start_change_and_end_and_restored(command):
    command.configure("enable_model_api=true", "mine=kept")
    command.started("--ts-config", "config.properties", "--models", "echo.mar")
    command.until(lambda: command.snapshots("startup"))
    command.manage("POST", "/models?url=echo.mar&model_name=two&batch_size=3&max_batch_delay=40&response_timeout=9")
    assert len(command.snapshots("snapshot")) == 1, "written before the call is answered"
    command.manage("PUT", "/models/two?min_worker=1&max_worker=2&synchronous=true")
    assert len(command.snapshots("snapshot")) == 2
    command.run("--stop", "--foreground")
    [shutdown] = command.snapshots("shutdown")
    saved = snapshot_of(shutdown)
    assert (saved["name"], saved["modelCount"]) == (shutdown.name, 2)
    assert saved["models"]["two"]["1.0"] == {
        "defaultVersion": True,
        "marName": "echo.mar",
        "minWorkers": 1,
        "maxWorkers": 2,
        "batchSize": 3,
        "maxBatchDelay": 40,
        "responseTimeout": 9,
        "startupTimeout": 120,
        "runtimeType": "python",
    }
    assert read_file(shutdown)["mine"] == "kept"

    (command.folder / "logs" / "config" / "notes.txt").write_text("not a snapshot")
    (command.folder / "logs" / "config" / "99999999999999999-startup.cfg").write_text("no date")
    command.started("--models", "none.mar")
    assert command.logged(f"logs/config/{shutdown.name}")
    assert command.models() == ["echo", "two"]
    two = command.describe("two")
    assert (two["minWorkers"], two["maxWorkers"], two["batchSize"], two["maxBatchDelay"]) == (1, 2, 3, 40)
    assert (two["responseTimeout"], two["loadedAtStartup"]) == (9, False)
    assert command.manage("POST", "/models?url=echo.mar&model_name=three").status == 200, "settings are restored too"


def test_torn_snapshot_is_skipped_for_the_one_before(command):
    command.started("--models", "echo.mar")
    assert command.manage("PUT", "/models/echo?min_worker=2").status == 202
    command.until(lambda: command.snapshots("snapshot"))
    command.run("--stop", "--foreground")
    [shutdown] = command.snapshots("shutdown")
    shutdown.write_bytes(shutdown.read_bytes()[:200])
    [last] = command.snapshots("snapshot")
    last.write_bytes(b"")
    command.started()
    assert command.describe("echo")["minWorkers"] == 1, "as in the snapshot of the start"
    for torn in (shutdown, last):
        assert command.logged(torn.name, level="WARN")


def test_no_snapshots_when_they_are_off(command):
    command.started("--ncs", "--models", "echo.mar")
    command.run("--stop", "--foreground")
    assert command.snapshots() == []


def test_snapshot_written_by_torchserve_is_restored(command):
    saved = {"defaultVersion": True, "marName": "echo.mar", "minWorkers": 2, "maxWorkers": 2, "batchSize": 1}
    document = {
        "name": "20261115102149533-startup.cfg",
        "modelCount": 1,
        "created": 1794738109535,
        "models": {"first": {"1.0": {**saved, "maxBatchDelay": 100, "runtimeType": "python"}}},
    }
    escaped = json.dumps(document, indent=2).replace(":", "\\:").replace("\n", "\\n")
    text = (
        "#Saving snapshot\n#Sun Nov 15 10:21:49 UTC 2026\nversion=0.12.0\nnumber_of_gpu=0\nload_models=none.mar\n"
        f"inference_address=http\\://127.0.0.1\\:{command.port}\npython=/usr/bin/python3\n"
        f"metrics_address=http\\://127.0.0.1\\:{command.metrics_port}\ngrpc_inference_port=0\ngrpc_management_port=0\n"
        f"management_address=http\\://127.0.0.1\\:{command.management_port}\nmodel_snapshot={escaped}\n"
    )
    (command.folder / "20261115102149533-startup.cfg").write_text(text)
    command.started("--ts-config", "20261115102149533-startup.cfg", "--disable-token-auth")
    assert command.models() == ["first"]
    assert command.describe("first")["minWorkers"] == 2


def test_snapshot_written_by_hand_on_one_port(command):
    """As KServe does it: both APIs at one address, models in the configuration."""
    (command.folder / "config.properties").write_text(
        f"inference_address=http://127.0.0.1:{command.port}\nmanagement_address=http://127.0.0.1:{command.port}\n"
        f"metrics_address=http://127.0.0.1:{command.metrics_port}\nenable_metrics_api=true\ninstall_py_dep_per_model=true\n"
        "disable_token_authorization=true\ngrpc_inference_port=0\ngrpc_management_port=0\nnumber_of_netty_threads=4\njob_queue_size=10\n"
        "model_store=store\n"
        'model_snapshot={"name":"startup.cfg","modelCount":1,"models":{"parrot":{"1.0":{"defaultVersion":true,'
        '"marName":"echo.mar","minWorkers":1,"maxWorkers":5,"batchSize":1,"maxBatchDelay":5000,"responseTimeout":120}}}}\n'
    )
    command.started("--ncs", "--ts-config", "config.properties")
    assert command.call("POST", "/predictions/parrot", b"hi").status == 200
    said = command.call("GET", "/models/parrot").json[0]
    assert (said["minWorkers"], said["maxWorkers"], said["maxBatchDelay"]) == (1, 5, 5000)


def test_snapshot_of_an_archive_that_is_gone_refuses_to_start(command):
    snapshot = {
        "models": {
            "m": {
                "1.0": {
                    "defaultVersion": True,
                    "marName": "gone.mar",
                    "minWorkers": 1,
                    "maxWorkers": 1,
                    "batchSize": 1,
                    "maxBatchDelay": 100,
                }
            }
        }
    }
    command.configure(f"model_snapshot={json.dumps(snapshot)}")
    result = command.run("--start", "--foreground", "--ncs", "--model-store", "store")
    text = "Invalid configuration: Model archive file for model m, version 1.0 not found in model store"
    assert (result.returncode, result.stdout.splitlines()[-1]) == (1, text)


def test_model_that_cannot_be_restored_does_not_take_the_others_along(command):
    (command.store / "broken.mar").write_bytes(b"no archive")
    common = {"defaultVersion": True, "minWorkers": 1, "maxWorkers": 1, "batchSize": 1, "maxBatchDelay": 100}
    models = {
        "a": {"1.0": {**common, "marName": "broken.mar"}},
        "b": {"1.0": {**common, "marName": "echo.mar"}},
    }
    command.configure(f"model_snapshot={json.dumps({'models': models})}")
    command.started("--ncs")
    assert command.models() == ["b"]
    assert "Failed to load model: broken.mar" in command.log


def test_default_version_and_folders_outside_the_store_are_restored(command):
    pack_handler(command.store, "echo", version="2.0", file="echo2.mar")
    pack_handler(command.store, "echo")
    folder = command.folder / "elsewhere" / "loose"
    shutil.copytree(pack_handler(command.folder, "echo", name="loose", format="no-archive"), folder)
    models = ["--models", "echo.mar", "echo=echo2.mar", str(folder)]
    command.started(*models, "--ts-config", "config.properties")
    assert command.describe("echo")["modelVersion"] == "1.0"
    command.manage("PUT", "/models/echo/2.0/set-default")
    command.manage("PUT", "/models/echo/1.0/traffic?percent=20")
    command.run("--stop", "--foreground")
    command.started()
    assert command.models() == ["echo", "loose"]
    described = command.describe("echo")
    assert (described["modelVersion"], described["trafficPercent"]) == ("2.0", 80)


# ---- protection ----


def test_public_bind_switched_off_by_name_starts_with_a_warning(command):
    command.listeners[0] = f"inference_address=http://0.0.0.0:{command.port}"
    command.configure()
    command.started("--ncs", "--disable-token-auth", "--models", "echo.mar")
    assert command.logged(f"0.0.0.0:{command.port}", level="WARNING")
    assert command.call("POST", "/predictions/echo", b"x").status == 200
    assert "Token authorization: off" in command.log


@pytest.mark.parametrize(
    ("line", "words", "env", "state"),
    [
        ("disable_token_authorization=false", [], {}, "on"),
        ("", ["--enable-token-auth"], {}, "on"),
        ("", [], {"TS_DISABLE_TOKEN_AUTHORIZATION": "false"}, "on"),
        ("disable_token_authorization=false", ["--disable-token-auth"], {}, "off"),
    ],
)
def test_keys_on_a_loopback_address_as_set(command, line, words, env, state):
    command.configure(line)
    command.started("--ncs", *words, env=env)
    command.until(lambda: f"Token authorization: {state}" in command.log)


def test_keys_are_written_and_required_on_loopback_by_default(command):
    config = command.configure()
    config.write_text(config.read_text().replace("disable_token_authorization=true", ""))
    command.started("--ncs", "--models", "echo.mar")
    keys = json.loads((command.folder / "key_file.json").read_text())
    assert "key_file.json" in next(line for line in command.log.splitlines() if "Token authorization: on" in line)
    for call, kind in ((command.call, "inference"), (command.manage, "management")):
        path = "/predictions/echo" if kind == "inference" else "/models/echo"
        key = {"Authorization": f"Bearer {keys[kind]['key']}"}
        assert (call("GET", path).status, call("GET", path, headers=key).status) == (400, 200)


def test_our_own_command_refuses_a_public_bind_without_keys(command):
    words = [sys.executable, "-m", "flambeau.cli.main", "serve", "--host", "0.0.0.0", "--port", "0", "--no-token"]
    result = subprocess.run(words, capture_output=True, text=True, timeout=100, **command._where(None))
    assert result.returncode == 1
    assert "--allow-unprotected" in result.stderr


def test_model_that_was_named_and_is_not_there_keeps_the_server_from_being_ready(command):
    command.started("--ncs", "--models", "gone.mar")
    command.until(lambda: command.call("GET", "/startupz").status == 200)
    reply = command.call("GET", "/readyz")
    assert reply.status == 503
    assert [(model["modelName"], model["status"]) for model in reply.json["models"]] == [("gone.mar", "missing")]
    assert command.call("GET", "/ping").status == 200


@pytest.mark.parametrize(("line", "status"), [("", 503), ("allow_missing=true", 200)])
def test_model_of_the_store_that_cannot_be_read_keeps_the_server_from_being_ready(command, line, status):
    command.configure(line, "enable_model_api=true")
    (command.store / "broken.mar").write_bytes(b"not an archive")
    command.started("--ncs", "--models", "all")
    command.until(lambda: command.call("GET", "/startupz").status == 200)
    reply = command.call("GET", "/readyz")
    assert reply.status == status
    assert [(model["modelName"], model["status"]) for model in reply.json["models"]] == [("broken.mar", "missing")]
    assert command.manage("DELETE", "/models/broken.mar").status == 200
    assert command.call("GET", "/readyz").json == {"status": "ready"}


def test_workflow_store_that_is_not_there_is_no_reason_not_to_start(command):
    command.configure("workflow_store=/nowhere")
    command.started("--ncs")
    command.until(lambda: command.call("GET", "/readyz").status == 200)
    assert command.logged("/nowhere", level="WARNING")
