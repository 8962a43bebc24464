"""serve: a server process started from a script, a notebook or a test, and its handle."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from flambeau.client.async_client import AsyncClient
from flambeau.client.client import Client
from flambeau.client.handler_capture import write_handler
from flambeau.errors import ServerNotStarted
from flambeau.http_client import fetch

Served = str | os.PathLike[str] | Callable[..., Any]

LOOPBACK = "127.0.0.1"
START_S = 120.0
STOP_S = 30.0
DRAIN_S = 5
POLL_S = 0.05
LAST_LINES = 30
PORT_TAKEN = "is in use by another process"
ATTEMPTS = 3  # another process may take a free port before the server does
# Of one server that another may have set for itself.
HIDDEN_VARIABLES = ("FLAMBEAU_URL", "FLAMBEAU_MANAGEMENT_URL")


def serve(
    *models: Served,
    name: str | None = None,
    env: Mapping[str, str] | None = None,
    start_timeout_s: float = START_S,
    **options: Any,
) -> LocalServer:
    """Start a server process for handlers, archives, model folders or other paths; returns when they are ready.

    A handler may be a class or a function that is defined here: `handle(data, context)`, or a function of one argument,
    the body of one request. The options are those of `flambeau serve`: `batch_size=4` is `--batch-size 4`. The server
    listens on a free port of this machine. It stops with the handle (`with`, `stop`) or with this process. Raises
    ServerNotStarted, with the last lines of the server or the worker, if a model cannot be loaded.
    """
    for attempt in range(1, ATTEMPTS + 1):
        server = LocalServer(models, name=name, env=env, options=options)
        try:
            return server.wait_ready(start_timeout_s)
        except ServerNotStarted as error:
            server.kill()
            if attempt == ATTEMPTS or options.get("port") or PORT_TAKEN not in error.cause:
                raise
        except BaseException:
            server.kill()
            raise
    raise AssertionError("unreachable")


class LocalServer:
    """A server process of this program: its address, a client, its output."""

    def __init__(
        self,
        models: Sequence[Served],
        *,
        name: str | None = None,
        env: Mapping[str, str] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="flambeau-serve-"))
        self._log = self._folder / "server.log"
        self._client: Client | None = None
        self._last_logs = ""
        chosen = {"host": LOOPBACK, "key_file": self._folder / "key_file.json", **(options or {})}
        chosen["port"] = chosen.get("port") or free_port()  # 0 is any free one, too
        self._key_file = Path(chosen["key_file"])
        self.url = address_of(chosen["host"], chosen["port"])  # of every API
        try:
            words, named = written(models, self._folder, name)
            given = {
                "management_port": chosen["port"],
                "metrics_port": chosen["port"],
                "name": named,
                "drain_timeout": DRAIN_S,
            }
            given |= chosen
            self.process = start_process([*words, *to_arguments(given)], self._log, env or {})
        except BaseException:
            shutil.rmtree(self._folder, ignore_errors=True)
            raise
        atexit.register(self.kill)

    # ---- its address and output ----

    @property
    def client(self) -> Client:
        """A client of this server."""
        if self._client is None:
            self._client = Client(self.url, management_url=self.url, key_file=self.key_file)
        return self._client

    @property
    def key_file(self) -> Path | None:
        """The file with the keys of the server; None if it needs none."""
        return self._key_file if self._key_file.exists() else None

    def async_client(self, **options: Any) -> AsyncClient:
        """A new client for the tasks of an event loop."""
        return AsyncClient(self.url, **{"management_url": self.url, "key_file": self.key_file, **options})

    @property
    def logs(self) -> str:
        """The output of the server and its workers so far."""
        try:
            return self._log.read_text(errors="replace")
        except FileNotFoundError:  # it has stopped
            return self._last_logs

    @property
    def is_running(self) -> bool:
        return self.process.poll() is None

    def __repr__(self) -> str:
        return f"<LocalServer {self.url or 'starting'}, pid {self.process.pid}{'' if self.is_running else ', stopped'}>"

    # ---- life cycle ----

    def wait_ready(self, timeout_s: float = START_S) -> Self:
        """Wait until every model can answer; raises ServerNotStarted with the cause if one cannot."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise ServerNotStarted(
                    f"the server exited with status {self.process.returncode}", cause=last_lines(self.logs)
                )
            if self._has_started():
                health = self.client.health()
                if health.is_ready:
                    return self
                raise ServerNotStarted(failure_text(health.models), cause=causes_of(health.models, self.logs))
            time.sleep(POLL_S)
        raise ServerNotStarted(f"the server was not ready after {timeout_s:g} s", cause=last_lines(self.logs))

    def _has_started(self) -> bool:
        """Whether the initial models have loaded or failed."""
        try:
            return fetch(self.url, "GET", "/startupz", timeout_s=5).status == 200
        except (OSError, HTTPException):
            return False

    def stop(self, timeout_s: float = STOP_S) -> int:
        """Answer the accepted requests, then stop; returns the exit status. A server that takes longer is killed."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                pass
        self.kill()
        return self.process.returncode

    def kill(self) -> None:
        """Stop at once."""
        atexit.unregister(self.kill)
        if self._client is not None:
            self._client.close()
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        if self._log.exists():
            self._last_logs = self.logs
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def free_port() -> int:
    """A port that nothing listens on at this moment."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        port: int = probe.getsockname()[1]
        return port


def address_of(host: str, port: int) -> str:
    """How this machine reaches a server that listens at `host`."""
    own = LOOPBACK if host in ("0.0.0.0", "::") else host
    return f"http://[{own}]:{port}" if ":" in own else f"http://{own}:{port}"


def written(models: Sequence[Served], folder: Path, name: str | None) -> tuple[list[str], str | None]:
    """The paths of models on the command line, and the name of a single handler; handlers are written to files."""
    words: list[str] = []
    for number, model in enumerate(models):
        if isinstance(model, str | os.PathLike):
            words.append(os.fspath(model))
            continue
        place = folder / f"handler-{number}"
        words.append(str(write_handler(model, place)))
        own = model.__name__.lower().removesuffix("_handler").removesuffix("handler") or "model"
        if len(models) == 1:
            name = name or own
        else:  # the name of a file is the name of its model
            words[-1] = str(Path(words[-1]).rename(place / f"{own}.py"))
    return words, name


def start_process(arguments: Sequence[str], log: Path, env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start a server that stops when this process has ended."""
    command = [sys.executable, "-m", "flambeau.cli.child", str(os.getpid()), "serve", *arguments]
    inherited = {key: value for key, value in os.environ.items() if key not in HIDDEN_VARIABLES}
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**inherited, "PYTHONPATH": os.pathsep.join(search_path()), **env},
            # Ctrl-C, and the interrupt of a notebook's cell, are for this process; `with` then stops the server.
            start_new_session=True,
        )


def search_path() -> list[str]:
    """Where this process finds modules, apart from the interpreter's own folders."""
    own = {os.path.realpath(path) for path in sysconfig.get_paths().values()}
    found = [os.path.abspath(entry) for entry in sys.path if not entry.endswith(".zip")]
    library = os.path.realpath(sysconfig.get_path("stdlib"))
    return [entry for entry in dict.fromkeys(found) if not is_inside(os.path.realpath(entry), {*own, library})]


def is_inside(path: str, folders: set[str]) -> bool:
    return any(path == folder or path.startswith(folder + os.sep) for folder in folders)


def to_arguments(options: Mapping[str, Any]) -> list[str]:
    """`batch_size=4, watch=True` as `--batch-size 4 --watch`; None leaves an option out."""
    words: list[str] = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if value is True or value is False:
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list | tuple):
            words += [word for item in value for word in (f"--{flag}", str(item))]
        elif value is not None:
            words += [f"--{flag}", str(value)]
    return words


def failure_text(models: Sequence[Mapping[str, Any]]) -> str:
    names = ", ".join(str(model.get("modelName")) for model in models)
    return f"{names or 'a model'} could not be loaded"


def causes_of(models: Sequence[Mapping[str, Any]], logs: str) -> str:
    """The last output of the workers that failed; without any, that of the server."""
    lines: list[str] = []
    for model in models:
        found = model.get("lastFailure") or model.get("reason") or ()
        lines += [found] if isinstance(found, str) else [*map(str, found)]
    return "\n".join(lines[-LAST_LINES:]) or last_lines(logs)


def last_lines(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-LAST_LINES:])
