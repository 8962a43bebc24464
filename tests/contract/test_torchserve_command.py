"""The `torchserve` command, as scripts use it."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from flambeau.torchserve.pid_file import command_of
from support.archives import pack_handler
from support.command import MODULE, Command


@pytest.fixture
def command(tmp_path):
    """The command, and a store with one model."""
    command = Command(tmp_path)
    pack_handler(command.store, "echo")
    yield command
    command.stop_all()


# ---- starting and stopping ----


def test_start_in_the_background_and_stop(command):
    words = ("--ncs", "--models", "parrot=echo.mar", "--ts-config", "config.properties")
    command.started(*words)
    assert command.call("POST", "/predictions/parrot", b"hello").status == 200
    again = command.run("--start", "--model-store", "store")
    text = "TorchServe is already running, please use torchserve --stop to stop TorchServe.\n"
    assert (again.returncode, again.stdout) == (1, text)
    stopped = command.run("--stop")
    assert (stopped.returncode, stopped.stdout) == (0, "TorchServe has stopped.\n")
    assert not command.pid_file.exists()
    assert command.run("--stop").stdout == "TorchServe is not currently running.\n"


def test_stop_in_the_foreground_waits_and_says_nothing(command):
    command.started("--ncs")
    pid = int(command.pid_file.read_text())
    assert command.run("--stop", "--foreground").stdout == ""
    assert command_of(pid) is None


def test_start_works_at_once_after_a_stop(command):
    for _ in range(2):
        command.started("--ncs", "--models", "echo.mar")
        assert command.call("POST", "/predictions/echo", b"x").status == 200
        command.run("--stop")


WAITS = """
import time
from pathlib import Path


def handle(data, context):
    Path("begun").touch()
    while data and not Path("go").exists():
        time.sleep(0.02)
    return ["answered"] * len(data or [])
"""


def test_next_server_starts_while_the_last_one_still_answers(command):
    folder = command.store / "waits"
    folder.mkdir()
    (folder / "handler.py").write_text(WAITS.replace('"begun"', f'"{folder}/begun"').replace('"go"', f'"{folder}/go"'))
    (folder / "model-config.yaml").write_text("modelName: waits\n")
    command.configure("drain_timeout=300")
    command.started("--ncs", "--models", "waits")
    first = int(command.pid_file.read_text())
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(command.call, "POST", "/predictions/waits", b"x")
        command.until((folder / "begun").exists)
        assert command.run("--stop").stdout == "TorchServe has stopped.\n"
        assert command_of(first) is not None
        command.started("--ncs", "--models", "echo.mar")
        assert command.call("POST", "/predictions/echo", b"x").status == 200
        second = command.pid_file.read_text()
        (folder / "go").touch()
        assert answer.result(30).body == b"answered"
    command.until(lambda: command_of(first) is None)
    assert command.pid_file.read_text() == second, "the old server leaves the new one's pid file alone"


def test_server_runs_without_a_pid_file_where_none_can_be_written(command):
    command.configure("job_queue_size=x")
    result = command.run("--start", "--foreground", "--ncs", "--model-store", "store", "--pid-file", "/proc/none")
    assert "/proc/none cannot be written" in result.stdout
    assert "Invalid configuration" in result.stdout


def test_stop_removes_the_key_file_of_its_folder(command):
    command.started("--ncs")
    (command.folder / "key_file.json").write_text("{}")
    command.run("--stop")
    assert not (command.folder / "key_file.json").exists()


def test_start_in_the_foreground_takes_signals_itself(command):
    words = ["--start", "--foreground", "--ncs", "--model-store", "store", "--models", "all"]
    with command.log_path.open("wb") as log:
        process = subprocess.Popen([*MODULE, *words], stdout=log, stderr=log, **command._where(None))
    command.until(lambda: "Model server started." in command.log)
    assert int(command.pid_file.read_text()) == process.pid
    assert command.call("POST", "/predictions/echo", b"x").status == 200
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    assert not command.pid_file.exists()


def test_starting_is_what_happens_when_no_action_is_named(command):
    with command.log_path.open("wb") as log:
        result = subprocess.run([*MODULE, "--ncs", "--model-store", "store"], stdout=log, **command._where(None))
    assert result.returncode == 0
    command.until(lambda: "Model server started." in command.log)


def test_words_that_scripts_wait_for_are_on_standard_output(command):
    with command.log_path.open("wb") as log:
        subprocess.run(
            [*MODULE, "--start", "--ncs", "--model-store", "store"],
            stdout=log,
            stderr=subprocess.DEVNULL,
            **command._where(None),
        )
    command.until(lambda: "Model server started.\n" in command.log)


def test_server_outlives_its_terminal(command):
    command.started("--ncs", "--models", "echo.mar")
    os.kill(int(command.pid_file.read_text()), signal.SIGHUP)
    assert command.call("POST", "/predictions/echo", b"x").status == 200


def test_startup_models_are_registered_before_anybody_can_connect(command):
    pack_handler(command.store, "slow_start")
    command.started("--ncs", "--models", "all")
    assert set(command.models()) == {"echo", "slow_start"}
    assert command.describe("echo")["loadedAtStartup"] is True


# ---- the pid file ----


def test_orphan_pid_file_is_removed(command):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    command.pid_file.write_text(str(ended.pid))
    assert command.run("--stop").stdout == "Removing orphan pid file.\nTorchServe is not currently running.\n"
    assert not command.pid_file.exists()


@pytest.mark.parametrize("text", ["", "nonsense", "-1"])
def test_pid_file_that_holds_no_pid_is_an_orphan(command, text):
    command.pid_file.write_text(text)
    assert command.run("--stop").stdout == "Removing orphan pid file.\nTorchServe is not currently running.\n"


def test_processes_that_are_none_of_ours_are_left_alone(command):
    command.pid_file.write_text(str(os.getpid()))
    assert command.run("--stop").stdout == "TorchServe is not currently running.\n"


def test_pid_file_may_lie_elsewhere_so_that_two_servers_can_run(command, tmp_path_factory):
    command.started("--ncs")
    other = Command(tmp_path_factory.mktemp("other"))
    other.environment["TMPDIR"] = command.environment["TMPDIR"]
    other.environment["TS_PID_FILE"] = str(other.folder / "mine.pid")
    other.started("--ncs")
    assert (other.folder / "mine.pid").exists()
    other.run("--stop", "--foreground")
    assert command.call("GET", "/ping").status == 200


# ---- messages ----


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--model-store", "nowhere"], "--model-store directory not found: nowhere"),
        ([], "Missing mandatory parameter --model-store"),
        (["--ts-config", "none", "--model-store", "store"], "--ts-config file not found: none"),
        (["--log-config", "none", "--model-store", "store"], "--log-config file not found: {folder}/none"),
        (["--cpp-log-config", "none", "--model-store", "store"], "--cpp-log-config file not found: {folder}/none"),
        (["--workflow-store", "none", "--model-store", "store"], "--workflow-store directory not found: none"),
    ],
)
def test_what_is_missing_is_said_in_torchserves_words(command, words, text):
    result = command.run("--start", *words)
    assert (result.returncode, result.stdout.strip()) == (1, text.format(folder=command.folder))


def test_temp_that_is_no_folder_is_named(command):
    result = command.run("--start", "--model-store", "store", env={"TEMP": "/nowhere"})
    text = "Invalid temp directory: /nowhere, please check TEMP environment variable.\n"
    assert (result.returncode, result.stdout) == (1, text)


def test_variable_names_the_config_file_and_beats_the_flag(command):
    result = command.run("--start", "--model-store", "store", env={"TS_CONFIG_FILE": "none"})
    assert (result.returncode, result.stdout) == (1, "--ts-config file not found: none\n")


def test_model_store_of_the_config_file_will_do(command):
    command.configure(f"model_store={command.store}", "load_models=echo.mar", file="mine.properties")
    command.log_path.touch()
    with command.log_path.open("ab") as log:
        subprocess.run([*MODULE, "--ncs", "--ts-config", "mine.properties"], stdout=log, **command._where(None))
    command.until(lambda: "Model server started." in command.log)
    assert command.models() == ["echo"]


def test_ill_typed_value_ends_the_server_with_status_1(command):
    command.configure("job_queue_size=many")
    result = command.run("--start", "--foreground", "--ncs", "--model-store", "store")
    text = "Invalid configuration: job_queue_size is 'many'; it must be a whole number from 1 to 2147483647"
    assert (result.returncode, result.stdout.strip()) == (1, text)
    assert not command.pid_file.exists()


def test_port_in_use_is_named(command):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", command.port))
        taken.listen()
        result = command.run("--start", "--foreground", "--ncs", "--model-store", "store")
    assert result.returncode == 1
    assert f"Failed to bind to address: http://127.0.0.1:{command.port}\n" in result.stdout


def test_version(command):
    result = command.run("--version")
    assert (result.returncode, result.stdout.splitlines()[0]) == (0, "TorchServe Version is 0.12.0")
    both = command.run("--version", "--start")
    assert both.returncode == 2


# ---- which models ----


def test_comma_lists_names_and_folders(command):
    folder = command.folder / "elsewhere" / "loose"
    folder.mkdir(parents=True)
    shutil.copy(Path(__file__).parents[1] / "support" / "handlers" / "echo.py", folder / "handler.py")
    (folder / "model-config.yaml").write_text("modelName: loose\n")
    command.started("--ncs", "--models", f"one=echo.mar,two=echo.mar, {folder}", "three=echo.mar")
    assert command.models() == ["loose", "one", "three", "two"]


def test_model_that_cannot_be_loaded_is_skipped(command):
    (command.store / "broken.mar").write_bytes(b"not an archive")
    pack_handler(command.store, "echo", name="deep", config="a: " + "[" * 100_000)
    pack_handler(command.store, "echo")
    bad = ("none.mar", "broken.mar", "deep.mar", "http://127.0.0.1:1/x.mar")
    command.started("--ncs", "--models", *bad, "echo.mar")
    assert command.models() == ["echo"]
    for name in bad:
        assert f"Failed to load model: {name}" in command.log
    [line] = [line for line in command.log.splitlines() if "Failed to load model: http" in line]
    assert re.search(r"Failed to download archive from: http://127.0.0.1:1/x.mar: .*\w", line)  # the cause follows


def test_all_means_every_archive_and_folder_that_is_not_hidden(command):
    pack_handler(command.store, "echo", name="packed", format="tgz")
    pack_handler(command.store, "echo", name="open", format="no-archive")
    (command.store / ".hidden.mar").write_bytes(b"")
    (command.store / "notes.txt").write_text("")
    command.started("--ncs", "--models", "ALL")
    assert command.models() == ["echo", "open", "packed"]
    assert "hidden" not in command.log
    assert "notes" not in command.log


def test_archive_without_a_name_is_called_after_its_file(command):
    folder = command.store / "my-model.v2"
    (folder / "MAR-INF").mkdir(parents=True)
    shutil.copy(Path(__file__).parents[1] / "support" / "handlers" / "echo.py", folder / "handler.py")
    (folder / "MAR-INF" / "MANIFEST.json").write_text(json.dumps({"model": {"handler": "handler.py"}}))
    command.started("--ncs", "--models", "my-model.v2")
    assert command.models() == ["my_model"]


def test_one_worker_without_gpus_and_the_default_number_where_one_is_given(command):
    command.environment["CUDA_VISIBLE_DEVICES"] = ""
    command.started("--ncs", "--models", "echo.mar")
    assert command.describe("echo")["minWorkers"] == 1
    command.run("--stop", "--foreground")
    command.configure("default_workers_per_model=2")
    command.started("--ncs", "--models", "echo.mar")
    assert command.describe("echo")["minWorkers"] == 2


# ---- import names ----


def test_module_of_torchserve_is_the_command(command):
    words = [sys.executable, "-m", "ts.model_server", "--stop"]
    result = subprocess.run(words, capture_output=True, text=True, **command._where(None))
    assert result.stdout == "TorchServe is not currently running.\n"


def test_launcher_starts_registers_and_stops(command):
    program = (
        "import sys\nimport flambeau.torchserve.launcher\n"
        f"flambeau.torchserve.launcher.MANAGEMENT = 'http://127.0.0.1:{command.management_port}'\n"
        "from ts import launcher\n"
        "lines = launcher.start(model_store='store', snapshot_file='config.properties', no_config_snapshots=True,"
        " disable_token=True, enable_model_api=True)\n"
        "reply = launcher.register_model('parrot', 'echo.mar')\n"
        "again = launcher.register_model('parrot', 'echo.mar')\n"
        "print('REPLY', reply.status_code, reply.json()['status'], file=sys.stderr)\n"
        "print('AGAIN', again.status_code, file=sys.stderr)\n"
        "launcher.stop()\n"
        "while lines.get(timeout=60) is not None: pass\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, **command._where(None))
    assert 'REPLY 200 Model "parrot" Version: 1.0 registered with 1 initial workers' in result.stderr, result.stdout
    assert "AGAIN 409" in result.stderr


def test_launcher_says_why_nothing_started(command):
    program = "from ts import launcher; launcher.start(model_store='nowhere')"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, **command._where(None))
    assert "--model-store directory not found: nowhere" in result.stderr


def test_parsers_have_torchserves_names():
    from ts.arg_parser import ArgParser
    from ts.version import __version__

    words = ["--start", "--dt", "--enable-model-api", "--ncs", "--ppath", "p", "--models", "a", "b=c"]
    arguments = ArgParser.extract_args(words)
    assert (arguments.token_auth, arguments.model_mode, arguments.no_config_snapshots) == (True, True, True)
    assert (arguments.plugins_path, arguments.models, arguments.stop) == ("p", ["a", "b=c"], False)
    worker = ArgParser.model_service_worker_args().parse_args(["--sock-type", "unix", "--sock-name", "x", "--async"])
    assert (worker.sock_type, worker.sock_name, worker.async_comm) == ("unix", "x", True)
    assert __version__
