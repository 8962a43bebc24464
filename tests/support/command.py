"""The `torchserve` command in a folder of its own: store, temporary folder, ports and config.properties."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from support.running import Reply, free_ports, lines_with, path

MODULE = [sys.executable, "-m", "flambeau.torchserve.command"]
LISTENERS = (
    "inference_address",
    "management_address",
    "metrics_address",
    "grpc_inference_port",
    "grpc_management_port",
)


class Command:
    """Runs the command as a script would; `stop_all` ends what it has started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store, self.log_path = folder / "store", folder / "log"
        self.environment: dict[str, str] = {"TMPDIR": str(folder / "tmp"), "PYTHONPATH": path()}
        for name in ("store", "tmp"):
            (folder / name).mkdir()
        numbers = free_ports(len(LISTENERS))
        self.port, self.management_port, self.metrics_port = numbers[:3]
        self.listeners = [
            f"{key}={number}" if key.endswith("port") else f"{key}=http://127.0.0.1:{number}"
            for key, number in zip(LISTENERS, numbers, strict=True)
        ]
        self.configure()

    def configure(self, *lines: str, file: str = "config.properties") -> Path:
        """Write a config file: the ports, no keys unless the lines say otherwise, and these lines."""
        config = self.folder / file
        config.write_text("\n".join([*self.listeners, "disable_token_authorization=true", *lines, ""]))
        return config

    def run(self, *words: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Run the command to its end, with its output."""
        return subprocess.run([*MODULE, *words], capture_output=True, text=True, timeout=100, **self._where(env))

    def start(self, *words: str, env: Mapping[str, str] | None = None) -> int:
        """Start in the background, with the server's output in the log."""
        with self.log_path.open("ab") as log:
            return subprocess.run(
                [*MODULE, "--start", "--model-store", "store", *words],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                timeout=60,
                **self._where(env),
            ).returncode

    def started(self, *words: str, env: Mapping[str, str] | None = None) -> Command:
        """Start in the background and wait for `Model server started.`, as scripts do."""
        self.log_path.unlink(missing_ok=True)
        assert self.start(*words, env=env) == 0
        self.until(lambda: "Model server started." in self.log)
        return self

    def stop_all(self) -> None:
        """Stop a running server."""
        if self.pid_file.exists():
            self.run("--stop", "--foreground")

    def _where(self, env: Mapping[str, str] | None) -> dict[str, Any]:
        return {"cwd": self.folder, "env": {**os.environ, **self.environment, **(env or {})}}

    # ---- looking ----

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def logged(self, *keys: str, level: str | None = None) -> list[str]:
        return lines_with(self.log, *keys, level=level)

    @property
    def pid_file(self) -> Path:
        return self.folder / "tmp" / ".model_server.pid"

    def snapshots(self, kind: str = "") -> list[Path]:
        return sorted((self.folder / "logs" / "config").glob(f"*{kind}.cfg"))

    def until(self, condition: Callable[[], Any], timeout: float = 60) -> Any:
        """Wait until a condition holds; fail with the log after the timeout."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if value := condition():
                return value
            time.sleep(0.02)
        raise AssertionError(f"it did not come true in {timeout:g} s:\n{self.log}")

    def call(
        self,
        method: str,
        target: str,
        body: bytes | None = None,
        *,
        port: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        """Send a request to the inference API, or to another port."""
        url = f"http://127.0.0.1:{port or self.port}{target}"
        try:
            request = urllib.request.Request(url, body, dict(headers or {}), method=method)
            with urllib.request.urlopen(request, timeout=60) as answer:
                return Reply(answer.status, dict(answer.headers), answer.read())
        except urllib.error.HTTPError as error:
            with error:
                return Reply(error.code, dict(error.headers), error.read())

    def manage(self, method: str, target: str, *, headers: Mapping[str, str] | None = None) -> Reply:
        return self.call(method, target, port=self.management_port, headers=headers)

    def models(self) -> list[str]:
        return [model["modelName"] for model in self.manage("GET", "/models").json["models"]]

    def describe(self, model: str) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.manage("GET", f"/models/{model}").body)[0]
        return document
