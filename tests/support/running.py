"""A real server process, and a plain client for it."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HANDLERS = Path(__file__).parent / "handlers"
SITE = Path(__file__).parent / "site"
START_S = 20.0


@dataclass(frozen=True)
class Reply:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def message(self) -> str:
        return str(self.json["message"])

    @property
    def cause(self) -> str:
        return "\n".join(self.json.get("cause", []))


class RunningServer:
    """One `flambeau serve` process on ports of its own."""

    def __init__(self, log: Path, *arguments: str, env: Mapping[str, str] | None = None) -> None:
        self.port, self.management_port, self.metrics_port = free_ports(3)
        self.log_path = log
        ports = ["--port", self.port, "--management-port", self.management_port, "--metrics-port", self.metrics_port]
        command = [sys.executable, "-m", "flambeau.cli.main", "serve", *arguments, *map(str, ports)]
        self._log = log.open("wb")
        self.process = subprocess.Popen(
            command, stdout=self._log, stderr=subprocess.STDOUT, env={**os.environ, "PYTHONPATH": path(), **(env or {})}
        )

    @property
    def log(self) -> str:
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
        timeout: float = 30,
    ) -> Reply:
        connection = http.client.HTTPConnection("127.0.0.1", port or self.port, timeout=timeout)
        try:
            connection.request(method, path, body, dict(headers or {}))
            response = connection.getresponse()
            return Reply(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    def predict(self, model: str, body: Any = b"", *, kind: str | None = None, **options: Any) -> Reply:
        """Send a body: bytes as they are, anything else as JSON."""
        headers = dict(options.pop("headers", {}))
        if not isinstance(body, bytes):
            body, kind = json.dumps(body).encode(), kind or "application/json"
        if kind:
            headers["Content-Type"] = kind
        return self.request("POST", f"/predictions/{model}", body, headers, **options)

    def manage(self, method: str, path: str, body: bytes | None = None, **options: Any) -> Reply:
        return self.request(method, path, body, port=self.management_port, **options)

    def describe(self, model: str) -> dict[str, Any]:
        document: dict[str, Any] = self.manage("GET", f"/models/{model}").json[0]
        return document

    def worker_pids(self, model: str) -> list[int]:
        return [worker["pid"] for worker in self.describe(model)["workers"] if worker["status"] == "READY"]

    def at_once(self, call: Callable[..., Reply], bodies: list[Any]) -> list[Future[Reply]]:
        """Call with each body, all at a time."""
        pool = ThreadPoolExecutor(len(bodies))
        futures = [pool.submit(call, body) for body in bodies]
        pool.shutdown(wait=False)
        return futures

    # ---- life ----

    def wait_listening(self) -> RunningServer:
        self.until(lambda: self._connects())
        return self

    def wait_ready(self) -> RunningServer:
        self.until(lambda: self._connects() and self.request("GET", "/readyz").status == 200)
        return self

    def wait_started(self) -> RunningServer:
        self.until(lambda: self._connects() and self.request("GET", "/startupz").status == 200)
        return self

    def until(self, condition: Callable[[], Any], timeout: float = START_S) -> Any:
        """Wait for something to hold; fail with the server's log when it does not."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise AssertionError(f"the server exited with {self.process.returncode}:\n{self.log}")
            if value := condition():
                return value
            time.sleep(0.02)
        raise AssertionError(f"it did not come true in {timeout} s:\n{self.log}")

    def _connects(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def stop(self, number: int = signal.SIGTERM, timeout: float = 20) -> int:
        """Stop the server and return its exit status; it must not take long."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise AssertionError(f"the server did not stop in {timeout} s:\n{self.log}") from None
        finally:
            self._log.close()


def path() -> str:
    """What the processes that tests start find modules on: see support/site."""
    return os.pathsep.join([str(SITE), *filter(None, [os.environ.get("PYTHONPATH")])])


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on just now."""
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


class Load:
    """Steady traffic from threads, with every answer kept."""

    def __init__(self, call: Callable[[], Reply], threads: int) -> None:
        self.replies: list[Reply] = []
        self.errors: list[Exception] = []
        self._call = call
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run) for _ in range(threads)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.replies.append(self._call())
            except Exception as error:
                self.errors.append(error)
