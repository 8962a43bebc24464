"""One server at a time: started alone, watched, and stopped with everything it started."""

import http.client
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path
from types import TracebackType

import machine
from assets import MODEL_NAME
from peers import HOST, Launch
from workloads import Body

START_LIMIT_S = 60


class ServerFailed(Exception):
    """The server did not start, or exited."""


def find_ports(count: int = 5) -> int:
    """The first of `count` neighboring ports nobody listens on, below those the system hands out by itself."""
    for _ in range(200):
        first = random.randrange(20_000, 30_000)
        if all(_is_free(port) for port in range(first, first + count)):
            return first
    raise ServerFailed("no free ports between 20000 and 30000")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True


class Server:
    """A running server; leaving the `with` block stops it and all its workers."""

    def __init__(self, launch: Launch, folder: Path):
        self.launch = launch
        self._folder = folder
        # The environment is inherited, so orphans can be recognized even after their parents are gone.
        self._mark = f"FLAMBEAU_BENCHMARK={uuid.uuid4().hex}"

    def __enter__(self) -> "Server":
        environment = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed server does not compile itself at every start
        environment |= {"TMPDIR": str(self._folder), **self.launch.environment}
        name, _, value = self._mark.partition("=")
        environment[name] = value
        with (self._folder / "server.log").open("wb") as log:
            self.started = time.perf_counter()
            self._process = subprocess.Popen(
                self.launch.command,
                env=environment,
                cwd=self._folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that Ctrl-C reaches us first
            )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is not None and issubclass(kind, Exception):
            lines = (self._folder / "server.log").read_text(errors="replace").splitlines()
            print("\n".join(["  last lines of the server's log:", *lines[-15:]]), file=sys.stderr)
        self.stop()

    def wait_listening(self) -> float:
        """Seconds from the start of the process to an open port."""
        while True:
            try:
                socket.create_connection((HOST, self.launch.port), timeout=1).close()
                return time.perf_counter() - self.started
            except OSError as error:
                self._check_alive(f"not listening: {error}")
            time.sleep(0.002)

    def wait_answer(self, body: Body, data: bytes) -> tuple[float, str]:
        """Seconds from the start of the process to the first good answer, and that answer."""
        while True:
            try:
                status, text = self.post(body, data)
            except (OSError, http.client.HTTPException) as error:
                status, text = 0, repr(error)
            if status == 200:
                return time.perf_counter() - self.started, text
            self._check_alive(f"status {status}: {text[:200]}")
            time.sleep(0.01)

    def wait_workers(self, count: int) -> None:
        """Returns once the management API reports so many workers ready; the first answer needs only one."""
        deadline = time.monotonic() + START_LIMIT_S
        while (ready := self._ready_workers()) < count:
            if time.monotonic() > deadline:
                raise ServerFailed(f"{ready} of {count} workers ready after {START_LIMIT_S} s")
            time.sleep(0.1)

    def _ready_workers(self) -> int:
        connection = http.client.HTTPConnection(HOST, self.launch.port + 1, timeout=10)
        try:
            connection.request("GET", f"/models/{MODEL_NAME}")
            workers = json.loads(connection.getresponse().read())[0]["workers"]
            return sum(worker["status"] == "READY" for worker in workers)
        finally:
            connection.close()

    def post(self, body: Body, data: bytes) -> tuple[int, str]:
        """One request on a connection of its own."""
        connection = http.client.HTTPConnection(HOST, self.launch.port, timeout=10)
        try:
            connection.request("POST", self.launch.path, data, {"Content-Type": body.content_type})
            response = connection.getresponse()
            return response.status, response.read().decode(errors="replace")
        finally:
            connection.close()

    def _check_alive(self, state: str) -> None:
        if self._process.poll() is not None:
            raise ServerFailed(f"the server ended with status {self._process.returncode}")
        if time.perf_counter() - self.started > START_LIMIT_S:
            raise ServerFailed(f"no good answer in {START_LIMIT_S} s, {state}")

    def processes(self) -> dict[int, machine.Process]:
        """The server and its workers."""
        return machine.family(self._process.pid, self._mark)

    def stop(self) -> None:
        """Sends SIGTERM to the server, then to the remaining processes, then SIGKILL."""
        self._signal([self._process.pid], signal.SIGTERM)
        try:
            self._process.wait(timeout=8)
        except subprocess.TimeoutExpired:
            pass
        # TorchServe's launcher goes without its Java process; a good server has taken its workers along.
        if self._is_gone_within(1):
            return
        self._signal(self.processes(), signal.SIGTERM)
        if self._is_gone_within(8):
            return
        print("  the server did not stop when asked, killing it", file=sys.stderr)
        self._signal(self.processes(), signal.SIGKILL)
        self._is_gone_within(5)

    def _is_gone_within(self, limit_s: float) -> bool:
        deadline = time.monotonic() + limit_s
        while self._process.poll() is None or self.processes():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    @staticmethod
    def _signal(pids: "list[int] | dict[int, machine.Process]", number: signal.Signals) -> None:
        for pid in pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass
