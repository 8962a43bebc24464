"""ModelServer: a real server process on ports of its own, with a plain client."""

from __future__ import annotations

import http.client
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

START_S = 60.0
POLL_S = 0.02
# Below those that connections get (32768 and up on Linux, 49152 elsewhere) and those where ranks meet (29500 and up).
PORTS = range(12_000, 29_000)


@dataclass(frozen=True)
class Reply:
    """What the server answered."""

    status: int
    headers: Mapping[str, str]  # names in lower case
    body: bytes

    @property
    def text(self) -> str:
        """The body as text."""
        return self.body.decode()

    @property
    def json(self) -> Any:
        """The body as the JSON it is."""
        return json.loads(self.body)

    @property
    def message(self) -> str:
        """What an error answer says."""
        return str(self.json["message"])

    @property
    def cause(self) -> str:
        """What lies behind an error answer: the handler's traceback, or how its worker ended."""
        return "\n".join(self.json.get("cause", []))


class ModelServer:
    """One `flambeau serve` process; its output is in `log`."""

    start_timeout_s = START_S
    subcommand: tuple[str, ...] = ("serve",)

    def __init__(self, log: Path, *arguments: str, env: Mapping[str, str] | None = None) -> None:
        self.port, self.management_port, self.metrics_port = free_ports(3)
        self.log_path = log
        ports = ["--port", self.port, "--management-port", self.management_port, "--metrics-port", self.metrics_port]
        command = [sys.executable, "-m", "flambeau.cli.main", *self.subcommand, *arguments, *map(str, ports)]
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
        """The inference address."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def management_url(self) -> str:
        """The management address."""
        return f"http://127.0.0.1:{self.management_port}"

    @property
    def log(self) -> str:
        """Everything the server and its workers have printed."""
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
    ) -> Reply:
        """Send any request, to the inference API unless another port is named."""
        connection = http.client.HTTPConnection("127.0.0.1", port or self.port, timeout=timeout)
        try:
            connection.request(method, path, body, dict(headers or {}))
            response = connection.getresponse()
            return Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    def predict(
        self,
        model: str,
        body: Any = b"",
        *,
        content_type: str | None = None,
        version: str | None = None,
        headers: Mapping[str, str] | None = None,
        timeout: float = 60,
    ) -> Reply:
        """Ask a model: bytes are sent as they are, anything else as JSON."""
        if not isinstance(body, bytes | bytearray):
            body, content_type = json.dumps(body).encode(), content_type or "application/json"
        kind = {"Content-Type": content_type} if content_type else {}
        path = "/predictions/" + "/".join(quote(part, safe="/") for part in (model, version) if part)
        return self.request("POST", path, bytes(body), {**kind, **(headers or {})}, timeout=timeout)

    def manage(self, method: str, path: str, body: bytes | None = None, **options: Any) -> Reply:
        """Call the management API."""
        return self.request(method, path, body, port=self.management_port, **options)

    def describe(self, model: str) -> dict[str, Any]:
        """A model's settings, workers and state."""
        document: dict[str, Any] = self.manage("GET", f"/models/{model}").json[0]
        return document

    # ---- life ----

    @property
    def is_ready(self) -> bool:
        """Whether every model answers."""
        return self.request("GET", "/readyz").status == 200

    def wait_listening(self) -> Self:
        """Wait until it takes connections."""
        self.until(lambda: self._connects())
        return self

    def wait_ready(self) -> Self:
        """Wait until every model answers."""
        self.until(lambda: self._connects() and self.is_ready)
        return self

    def wait_started(self) -> Self:
        """Wait until the models named at start have loaded or failed."""
        self.until(lambda: self._connects() and self.request("GET", "/startupz").status == 200)
        return self

    def until(self, condition: Callable[[], Any], timeout: float | None = None) -> Any:
        """Wait for something to hold; fail with the server's log when it does not."""
        limit_s = self.start_timeout_s if timeout is None else timeout
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"the server exited with {self.process.returncode}:\n{self.log}")
            if value := condition():
                return value
            time.sleep(POLL_S)
        raise AssertionError(f"it did not come true in {limit_s:g} s:\n{self.log}")

    def _connects(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def stop(self, number: int = signal.SIGTERM, timeout: float = 60) -> int:
        """Stop the server and return its exit status; it must not take long."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"the server did not stop in {timeout} s:\n{self.log}") from None


def share_of(ports: Sequence[int], environment: Mapping[str, str]) -> Sequence[int]:
    """This process's own ports: pytest-xdist's workers have some each, as a server that restarts leaves its alone."""
    number = environment.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    count = environment.get("PYTEST_XDIST_WORKER_COUNT", "")
    return ports[int(number) :: int(count)] if number.isdecimal() and count.isdecimal() else ports


# Each process begins somewhere else, and uses none twice before all others.
_OWN = share_of(PORTS, os.environ)
_CANDIDATES = itertools.cycle(random.SystemRandom().sample(_OWN, len(_OWN)))


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on just now, and which the system gives to no outgoing connection."""
    return list(itertools.islice(filter(_is_free, _CANDIDATES), count))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: one that has ended is no obstacle
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def to_arguments(options: Mapping[str, Any]) -> list[str]:
    """`batch_size=4, watch=True` as the words `--batch-size 4 --watch`; None leaves an option out."""
    words: list[str] = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if value is True or value is False:
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif value is not None:
            words += [f"--{flag}", str(value)]
    return words
