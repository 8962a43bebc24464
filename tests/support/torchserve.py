"""A server started by a `torchserve` command: ours, or TorchServe itself."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from support.running import SITE, RunningServer, free_ports, path

APIS = ("inference", "management", "metrics", "grpc_inference", "grpc_management")


class CommandServer(RunningServer):
    """Serves the archives of a folder, all by default, with its own config.properties."""

    def __init__(
        self,
        command: Sequence[str],
        folder: Path,
        store: Path,
        lines: Sequence[str],
        env: Mapping[str, str],
        *,
        models: str | None = "all",
    ) -> None:
        ports = dict(zip(APIS, free_ports(len(APIS)), strict=True))
        self.port, self.management_port, self.metrics_port = (ports[name] for name in APIS[:3])
        addresses = [
            f"{name}_port={port}" if name.startswith("grpc") else f"{name}_address=http://127.0.0.1:{port}"
            for name, port in ports.items()
        ]
        folder.mkdir()
        (folder / "config.properties").write_text("\n".join([*addresses, *lines, ""]))
        self.log_path = folder / "log"
        self._log = self.log_path.open("wb")
        words = ["--start", "--foreground", "--ncs", "--disable-token-auth", "--model-store", str(store)]
        self.process = subprocess.Popen(
            [*command, *words, *(["--models", models] if models else []), "--ts-config", "config.properties"],
            cwd=folder,
            env={**os.environ, "TMPDIR": str(folder), **env},
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def wait_for_models(self, models: Sequence[str], timeout: float = 60) -> CommandServer:
        """Wait until each model has a worker."""
        self.until(lambda: self._connects() and all(self._is_served(model) for model in models), timeout)
        return self

    def _is_served(self, model: str) -> bool:
        try:
            reply = self.manage("GET", f"/models/{model}")
        except OSError:  # this API opens later than the other
            return False
        return reply.status == 200 and any(worker["status"] == "READY" for worker in reply.json[0]["workers"])

    def stop(self, number: int = signal.SIGTERM, timeout: float = 60) -> int:
        """Stop the command and its processes."""
        try:
            if self.process.poll() is None:
                os.killpg(self.process.pid, number)
            return self.process.wait(timeout)
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
            self._log.close()


def torchserve_environment(venv: Path) -> dict[str, str]:
    """PATH and PYTHONPATH for TorchServe, without Flambeau."""
    return {"PATH": f"{venv / 'bin'}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(SITE)}


def our_environment() -> dict[str, str]:
    """PYTHONPATH for Flambeau's command."""
    return {"PYTHONPATH": path()}
