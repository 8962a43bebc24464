"""The `torchserve` command: start, stop and version, as in TorchServe's launcher."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

from flambeau import __version__
from flambeau.errors import FlambeauError
from flambeau.torchserve import TORCHSERVE_VERSION
from flambeau.torchserve.command_flags import missing, missing_folders, parser
from flambeau.torchserve.config_properties import read_file
from flambeau.torchserve.pid_file import SIGN, VARIABLE, PidFile, command_of
from flambeau.torchserve.snapshot import newest

RUNNING = "TorchServe is already running, please use torchserve --stop to stop TorchServe."
STOP_S = 60
PORTS_S = 5  # a stopping server closes its ports well within this, so that the next one can start
POLL_S = 0.05


def main() -> None:
    """Run the command and exit with its status."""
    if (status := run(parser().parse_args(), sys.argv[1:])) != 0:
        sys.exit(status)


def run(arguments: argparse.Namespace, words: list[str]) -> int:
    """Execute the command and return its exit status."""
    pid_file = PidFile(arguments.pid_file)
    pid = pid_file.read()
    if arguments.version:
        print(f"TorchServe Version is {TORCHSERVE_VERSION}")
        print(f"Flambeau {__version__}")
        return 0
    if arguments.stop:
        return stop(pid, pid_file, wait=arguments.foreground)
    if pid is not None:
        print(RUNNING)
        return 1
    try:
        problem = start_problem(arguments)
    except FlambeauError as error:
        problem = f"Invalid configuration: {error}"
    if problem:
        print(problem)
        return 1
    return start(words, pid_file, foreground=arguments.foreground)


def start_problem(arguments: argparse.Namespace) -> str | None:
    """The reason why the server cannot be started, or None."""
    if problem := missing(arguments, named_config(arguments), os.environ.get("TEMP")):
        return problem
    file = config_file(arguments)
    store = arguments.model_store or (read_file(file).get("model_store") if file else None)
    return missing_folders(arguments, store)


def named_config(arguments: argparse.Namespace) -> Path | None:
    named = os.environ.get("TS_CONFIG_FILE") or arguments.ts_config
    return Path(named) if named else None


def config_file(arguments: argparse.Namespace) -> Path | None:
    """The config file: the named one, else the newest snapshot, else config.properties of the working folder."""
    if named := named_config(arguments):
        return named
    if not arguments.no_config_snapshots and (snapshot := newest(snapshot_folder())):
        return snapshot
    usual = Path("config.properties")
    return usual if usual.is_file() else None


def snapshot_folder() -> Path:
    return Path(os.environ.get("LOG_LOCATION") or "logs") / "config"


def start(words: list[str], pid_file: PidFile, *, foreground: bool) -> int:
    """Start the server process. In the foreground it replaces this process, so that signals reach it."""
    command = [sys.executable, "-m", "flambeau.torchserve.server_process", SIGN, *words]
    environment = {**os.environ, VARIABLE: str(pid_file.path.absolute())}
    if temp := os.environ.get("TEMP"):
        environment["TMPDIR"] = temp
    if foreground:
        write_pid(os.getpid(), pid_file)
        replace_process(command, environment)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the server survives the end of its terminal
    write_pid(subprocess.Popen(command, env=environment).pid, pid_file)
    return 0


def write_pid(pid: int, pid_file: PidFile) -> None:
    """Write the pid file; a server without one runs as well."""
    try:
        pid_file.write(pid)
    except OSError as error:
        print(f"{pid_file.path} cannot be written ({error.strerror}): torchserve --stop will not find process {pid}")


def replace_process(command: list[str], environment: dict[str, str]) -> NoReturn:
    sys.stdout.flush()
    os.execve(command[0], command, environment)


def stop(pid: int | None, pid_file: PidFile, *, wait: bool) -> int:
    """Stop the server that the pid file names."""
    if pid is None:
        print("TorchServe is not currently running.")
        return 0
    try:
        os.kill(pid, signal.SIGTERM)
    except OSError:
        print("TorchServe already stopped.")
        pid_file.path.unlink(missing_ok=True)
        return 0
    Path("key_file.json").unlink(missing_ok=True)
    is_gone = wait_for_end(pid, STOP_S if wait else PORTS_S)
    if not wait:
        print("TorchServe has stopped.")
    elif not is_gone:
        print("Stopping TorchServe took too long.")
    pid_file.path.unlink(missing_ok=True)
    return 0


def wait_for_end(pid: int, limit_s: float) -> bool:
    """Wait for a server process to end; False after `limit_s`."""
    deadline = time.monotonic() + limit_s
    while (command := command_of(pid)) is not None and SIGN in command:
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


if __name__ == "__main__":
    main()
