"""The `torchserve` command, as far as it has arrived: start in the foreground or background, stop, version.

Token authorisation, snapshots and workflows are not there yet; their flags are accepted.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from flambeau import __version__
from flambeau.cli import serve as work
from flambeau.cli.serve import Plan
from flambeau.config.logs import set_up_server_logs
from flambeau.config.properties import Properties, read_properties
from flambeau.config.server import ServerConfig
from flambeau.errors import ConfigError, FlambeauError
from flambeau.serving.store import models_in

RUNNING = "TorchServe is already running, please use torchserve --stop to stop TorchServe."
STOP_S = 60


def parser() -> argparse.ArgumentParser:
    """TorchServe's flags."""
    flags = argparse.ArgumentParser(prog="torchserve", description="Model server for PyTorch")
    action = flags.add_mutually_exclusive_group()
    action.add_argument("-v", "--version", action="store_true", help="Return the version")
    action.add_argument("--start", action="store_true", help="Start the server")
    action.add_argument("--stop", action="store_true", help="Stop the server")
    flags.add_argument("--ts-config", help="Configuration file (config.properties)")
    flags.add_argument("--model-store", help="Folder of model archives")
    flags.add_argument("--workflow-store", help="Folder of workflow archives")
    flags.add_argument("--models", nargs="+", metavar="MODEL", help="Models to load: all, file.mar or name=file.mar")
    flags.add_argument("--log-config", help="Accepted for compatibility")
    flags.add_argument("--cpp-log-config", help="Accepted for compatibility")
    flags.add_argument("--foreground", action="store_true", help="Wait for the server")
    flags.add_argument("--no-config-snapshots", "--ncs", action="store_true", dest="no_config_snapshots")
    flags.add_argument("--plugins-path", "--ppath", dest="plugins_path")
    flags.add_argument("--disable-token-auth", "--dt", action="store_true", dest="disable_token_auth")
    flags.add_argument("--enable-model-api", action="store_true")
    return flags


def main() -> None:
    """Run the command."""
    arguments = parser().parse_args()
    try:
        sys.exit(run(arguments))
    except FlambeauError as error:
        print(f"Invalid configuration: {error}")
        sys.exit(1)


def run(arguments: argparse.Namespace) -> int:
    """Do what the flags say and return the exit status."""
    if arguments.version:
        print(f"TorchServe Version is {__version__}")
        return 0
    if arguments.stop:
        return stop(wait=arguments.foreground)
    if running_pid() is not None:
        print(RUNNING)
        return 1
    set_up_server_logs("info")
    config = os.environ.get("TS_CONFIG_FILE") or arguments.ts_config
    if config and not Path(config).is_file():
        print(f"--ts-config file not found: {config}")
        return 1
    given = settings(config)
    problem = missing(arguments, given)
    if problem:
        print(problem)
        return 1
    if os.environ.get("FLAMBEAU_TORCHSERVE_CHILD") == "1" or arguments.foreground:
        serve(arguments, given)
        return 0
    environment = {**os.environ, "FLAMBEAU_TORCHSERVE_CHILD": "1"}
    child = subprocess.Popen([sys.executable, "-m", "flambeau.cli.torchserve", *sys.argv[1:]], env=environment)
    pid_file().write_text(str(child.pid))
    return 0


def missing(arguments: argparse.Namespace, given: Properties) -> str | None:
    """What is not where the flags say, in TorchServe's words."""
    if arguments.log_config and not Path(arguments.log_config).is_file():
        return f"--log-config file not found: {arguments.log_config}"
    store = arguments.model_store or given.server.model_store
    if not store:
        return "Missing mandatory parameter --model-store"
    if not Path(store).is_dir():
        return f"--model-store directory not found: {store}"
    if arguments.workflow_store and not Path(arguments.workflow_store).is_dir():
        return f"--workflow-store directory not found: {arguments.workflow_store}"
    return None


def settings(named: str | None) -> Properties:
    """The configuration file, if there is one."""
    path = Path(named) if named else Path("config.properties")
    return read_properties(path, ServerConfig()) if path.is_file() else Properties(server=ServerConfig())


def serve(arguments: argparse.Namespace, given: Properties) -> None:
    """Serve until a signal."""
    store = Path(arguments.model_store or given.server.model_store or ".")
    wanted = ",".join(arguments.models) if arguments.models else given.load_models or ""
    pid_file().write_text(str(os.getpid()))
    try:
        config = replace(given.server, model_store=store)
        wishes = work.Wishes(default_workers=given.default_workers or 1)
        work.start(config, [*plans(store, wanted)], wishes)
    finally:
        pid_file().unlink(missing_ok=True)


def plans(store: Path, wanted: str) -> Iterator[Plan]:
    """The models that `--models` or `load_models` names."""
    if wanted.lower() == "all":
        yield from (Plan(path=path, is_required=False) for path in models_in(store))
        return
    for value in filter(None, wanted.split(",")):
        name, _, file = value.rpartition("=")
        path = store / file if (store / file).exists() else Path(file)
        if not path.exists():
            raise ConfigError(f"Model not found at: {file}")
        yield Plan(path=path, name=name or None, is_required=False)


def stop(*, wait: bool) -> int:
    """Stop the server that the pid file names."""
    pid = running_pid()
    if pid is None:
        print("TorchServe is not currently running.")
        return 0
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        print("TorchServe already stopped.")
        return 0
    deadline = time.monotonic() + STOP_S
    while wait and is_alive(pid):
        if time.monotonic() > deadline:
            print("Stopping TorchServe took too long.")
            return 0
        time.sleep(0.05)
    pid_file().unlink(missing_ok=True)
    print("TorchServe has stopped.")
    return 0


def pid_file() -> Path:
    """Where the server's process id is kept."""
    return Path(tempfile.gettempdir()) / ".model_server.pid"


def running_pid() -> int | None:
    """The id of the running server; an orphan pid file is removed."""
    try:
        pid = int(pid_file().read_text().strip())
    except (OSError, ValueError):
        return None
    if pid == os.getpid():  # our launcher has written it
        return None
    if not is_alive(pid):
        print("Removing orphan pid file.")
        pid_file().unlink(missing_ok=True)
        return None
    return pid if is_ours(pid) else None


def is_alive(pid: int) -> bool:
    """Whether there is such a process."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def is_ours(pid: int) -> bool:
    """Whether a process is a server of this kind, as far as can be told."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return True
    return b"torchserve" in words


if __name__ == "__main__":
    main()
