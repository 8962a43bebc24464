"""ModelServer: a server process on free ports, with a simple client."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

from flambeau.http_client import HttpReply, fetch

START_S = 60.0
POLL_S = 0.02


class ModelServer:
    """A `flambeau serve` process; `log` holds its output."""

    start_timeout_s = START_S
    subcommand: tuple[str, ...] = ("serve",)
    python = sys.executable

    def __init__(self, log: Path, *arguments: str, env: Mapping[str, str] | None = None) -> None:
        self.port, self.management_port, self.metrics_port = free_ports(3)
        self.log_path = log
        ports = ["--port", self.port, "--management-port", self.management_port, "--metrics-port", self.metrics_port]
        command = [self.python, "-m", "flambeau.cli.main", *self.subcommand, *arguments, *map(str, ports)]
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(env or {})},
            )

    @property
    def url(self) -> str:
        """The address of the inference API."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def management_url(self) -> str:
        return f"http://127.0.0.1:{self.management_port}"

    @property
    def log(self) -> str:
        """The output of the server and its workers so far."""
        return self.log_path.read_text(errors="replace")

    # ---- requests ----

    def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        port: int | None = None,
        timeout: float = 60,
    ) -> HttpReply:
        """Send any request; to the inference API unless `port` names another."""
        return fetch(f"http://127.0.0.1:{port or self.port}", method, path, body, headers, timeout_s=timeout)

    def predict(
        self,
        model: str,
        body: Any = b"",
        *,
        content_type: str | None = None,
        version: str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float = 60,
    ) -> HttpReply:
        """Send a prediction request: bytes unchanged, other values as JSON."""
        if not isinstance(body, bytes | bytearray):
            body, content_type = json.dumps(body).encode(), content_type or "application/json"
        kind = {"Content-Type": content_type} if content_type else {}
        path = "/predictions/" + "/".join(quote(part, safe="/") for part in (model, version) if part)
        return self.request("POST", path, bytes(body), {**kind, **(headers or {})}, timeout=timeout)

    def manage(self, method: str, path: str, body: bytes | None = None, **options: Any) -> HttpReply:
        """Send a request to the management API."""
        return self.request(method, path, body, port=self.management_port, **options)

    def describe(self, model: str) -> dict[str, Any]:
        """The settings, workers and state of a model."""
        document: dict[str, Any] = self.manage("GET", f"/models/{model}").json[0]
        return document

    # ---- life cycle ----

    @property
    def is_ready(self) -> bool:
        """Whether every model is ready."""
        return self.request("GET", "/readyz").status == 200

    def wait_listening(self) -> Self:
        """Wait until the inference port accepts connections."""
        self.until(lambda: self._connects())
        return self

    def wait_ready(self) -> Self:
        """Wait until every model is ready."""
        self.until(lambda: self._connects() and self.is_ready)
        return self

    def wait_started(self) -> Self:
        """Wait until the initial models have loaded or failed."""
        self.until(lambda: self._connects() and self.request("GET", "/startupz").status == 200)
        return self

    def until(self, condition: Callable[[], Any], timeout: float | None = None) -> Any:
        """Wait for a condition and return its value; AssertionError with the server's log after `timeout` seconds."""
        limit_s = self.start_timeout_s if timeout is None else timeout
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"the server exited with {self.process.returncode}:\n{self.log}")
            if value := condition():
                return value
            time.sleep(POLL_S)
        raise AssertionError(f"the condition was not true within {limit_s:g} s:\n{self.log}")

    def _connects(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def stop(self, number: int = signal.SIGTERM, timeout: float = 60) -> int:
        """Stop the server and return its exit status; AssertionError if it takes longer than `timeout` seconds."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"the server did not stop in {timeout} s:\n{self.log}") from None


# Below the ports of outgoing connections (32768 and up on Linux, 49152 elsewhere) and of torch's rendezvous (29500).
PORTS = range(12_000, 29_000)


def ports_in(environment: Mapping[str, str]) -> Sequence[int]:
    """The ports of this test run: those of PYTEST_FLAMBEAU_PORTS, such as 12000-19999, if several run side by side."""
    if not (text := environment.get("PYTEST_FLAMBEAU_PORTS", "")):
        return PORTS
    first, _, last = text.partition("-")
    if not (first.isdecimal() and last.isdecimal() and 0 < int(first) <= int(last) < 1 << 16):
        raise ValueError(f"PYTEST_FLAMBEAU_PORTS is {text!r}; write two port numbers, such as 12000-19999")
    return range(int(first), int(last) + 1)


def share_of(ports: Sequence[int], environment: Mapping[str, str]) -> Sequence[int]:
    """The ports of this process. Each worker of pytest-xdist has its own, so that a server can restart on its port."""
    number = environment.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    count = environment.get("PYTEST_XDIST_WORKER_COUNT", "")
    return ports[int(number) :: int(count)] if number.isdecimal() and count.isdecimal() else ports


# In random order; a port is used again only after all others.
_OWN = share_of(ports_in(os.environ), os.environ)
_CANDIDATES = itertools.cycle(random.SystemRandom().sample(_OWN, len(_OWN)))


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on at this moment."""
    return list(itertools.islice(filter(_is_free, _CANDIDATES), count))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As servers do, so that a connection in TIME_WAIT does not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
