"""The `torchserve` command: start, stop and version, as in TorchServe's launcher, and its flags."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from flambeau import __version__
from flambeau.errors import FlambeauError
from flambeau.torchserve import TORCHSERVE_VERSION
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


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(prog="torchserve", description="Serve PyTorch models")
    action = flags.add_mutually_exclusive_group()
    action.add_argument("-v", "--version", action="store_true", help="print the version")
    action.add_argument("--start", action="store_true", help="start the server (the default)")
    action.add_argument("--stop", action="store_true", help="stop the server that runs on this machine")
    flags.add_argument("--ts-config", metavar="FILE", help="config.properties; TS_CONFIG_FILE overrides it")
    flags.add_argument("--model-store", metavar="DIR", help="folder of archives and models")
    flags.add_argument("--workflow-store", metavar="DIR", help="folder of workflow archives (default: the model store)")
    flags.add_argument(
        "--models",
        nargs="+",
        metavar="[NAME=]MODEL",
        help="models to load: all, file.mar, a folder, a URL, name=file.mar",
    )
    flags.add_argument("--log-config", metavar="FILE", help="log4j2 configuration; must exist")
    flags.add_argument("--cpp-log-config", metavar="FILE", help="accepted; there is no C++ backend")
    flags.add_argument("--foreground", action="store_true", help="run in the foreground")
    flags.add_argument(
        "--no-config-snapshots", "--ncs", action="store_true", help="neither write snapshots nor start from one"
    )
    flags.add_argument("--plugins-path", "--ppath", metavar="PATH", help="accepted; plugins are Java programs")
    flags.add_argument("--disable-token-auth", "--dt", action="store_true", dest="token_auth", help="require no keys")
    flags.add_argument(
        "--enable-model-api",
        action="store_true",
        dest="model_mode",
        help="allow registration over the APIs",
    )
    ours = flags.add_argument_group("not in TorchServe")
    ours.add_argument("--enable-token-auth", action="store_true", help="require keys on a loopback address too")
    ours.add_argument("--allow-unprotected", action="store_true", help="accept other machines without keys")
    ours.add_argument("--pid-file", metavar="FILE", help="default: TS_PID_FILE, else TMPDIR/.model_server.pid")
    return flags


def flags_to_properties(arguments: argparse.Namespace) -> dict[str, str]:
    """The flags as keys of config.properties; a switch can only turn something on."""
    given = {"model_store": arguments.model_store, "workflow_store": arguments.workflow_store}
    if arguments.models:
        given["load_models"] = ",".join(arguments.models)
    if arguments.token_auth:
        given["disable_token_authorization"] = "true"
    elif arguments.enable_token_auth:
        given["disable_token_authorization"] = "false"
    if arguments.model_mode:
        given["enable_model_api"] = "true"
    if arguments.allow_unprotected:
        given["allow_unprotected"] = "true"
    return {key: value for key, value in given.items() if value}


def worker_parser() -> argparse.ArgumentParser:
    """The flags of TorchServe's worker program, for code that builds its command line."""
    flags = argparse.ArgumentParser(prog="model-server-worker", description="Model server worker")
    flags.add_argument("--sock-type", required=True, choices=["unix", "tcp"], help="how the server is reached")
    flags.add_argument("--sock-name", help="path of the unix socket")
    flags.add_argument("--host", help="address of the TCP socket")
    flags.add_argument("--port", help="port of the TCP socket")
    flags.add_argument("--metrics-config", metavar="FILE", help="a metrics.yaml")
    flags.add_argument("--async", action="store_true", dest="async_comm", help="hold several requests at a time")
    return flags


class ArgParser:
    """The parsers of the `torchserve` command and of its workers (`ts.arg_parser`)."""

    @staticmethod
    def ts_parser() -> argparse.ArgumentParser:
        return parser()

    @staticmethod
    def model_service_worker_args() -> argparse.ArgumentParser:
        return worker_parser()

    @staticmethod
    def extract_args(args: Sequence[str] | None = None) -> argparse.Namespace:
        """Parse these words, or those of this process."""
        return parser().parse_args(args or None)


def missing(arguments: argparse.Namespace, config: Path | None, temp: str | None) -> str | None:
    """The error for a file that the flags or variables name and that does not exist, in TorchServe's words."""
    if arguments.log_config and not Path(arguments.log_config).is_file():
        return f"--log-config file not found: {Path(arguments.log_config).resolve()}"
    if temp and not Path(temp).is_dir():
        return f"Invalid temp directory: {temp}, please check TEMP environment variable."
    if config is not None and not config.is_file():
        return f"--ts-config file not found: {config}"
    return None


def missing_folders(arguments: argparse.Namespace, store: str | None) -> str | None:
    """As `missing`, for folders that the config file may name instead; `store` is the model store."""
    if not store:
        return "Missing mandatory parameter --model-store"
    if not Path(store).is_dir():
        return f"--model-store directory not found: {store}"
    if arguments.workflow_store and not Path(arguments.workflow_store).is_dir():
        return f"--workflow-store directory not found: {arguments.workflow_store}"
    if arguments.cpp_log_config and not Path(arguments.cpp_log_config).is_file():
        return f"--cpp-log-config file not found: {Path(arguments.cpp_log_config).resolve()}"
    return None


if __name__ == "__main__":
    main()
