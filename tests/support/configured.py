"""A server with any settings, also those that only a configuration file can name."""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from flambeau.config.server import Address, ServerConfig
from support.running import Reply, RunningServer, free_ports, path

PROGRAM = """
import sys
from dataclasses import replace
from pathlib import Path, PosixPath
from flambeau.cli.lifecycle import run_server
from flambeau.cli.serve import InitialModelLoader, ModelOverrides, find_models
from flambeau.config.server import *

found = [model for path in sys.argv[2:] for model in find_models(Path(path), ModelOverrides())]
models = [replace(model, is_required=False) for model in found]
run_server(eval(sys.argv[1]), InitialModelLoader(models, ModelOverrides()))
"""


class ConfiguredServer(RunningServer):
    """Serves models with these settings, on ports of its own unless they name addresses."""

    def __init__(
        self,
        folder: Path,
        *models: Path | str,
        env: Mapping[str, str] | None = None,
        max_files: int | None = None,
        **settings: Any,
    ) -> None:
        self.port, self.management_port, self.metrics_port = free_ports(3)
        ports = {"inference": self.port, "management": self.management_port, "metrics": self.metrics_port}
        addresses = {name: Address(port=port) for name, port in ports.items()}
        config = replace(ServerConfig(**addresses), **settings)
        self.port, self.management_port = config.inference.port, config.management.port
        self.log_path = folder / "server.log"
        limit = ["sh", "-c", f'ulimit -n {max_files}; exec "$@"', "sh"] if max_files else []
        with self.log_path.open("wb") as output:
            self.process = subprocess.Popen(
                [*limit, sys.executable, "-c", PROGRAM, repr(config), *map(str, models)],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": path(), **(env or {})},
            )

    def __enter__(self) -> ConfiguredServer:
        return self.wait_ready()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def register(self, url: str, **parameters: Any) -> Reply:
        """Register a model."""
        return self._post("/models", {"url": url, **parameters})

    def register_workflow(self, url: str, **parameters: Any) -> Reply:
        """Register a workflow."""
        return self._post("/workflows", {"url": url, **parameters})

    def _post(self, where: str, parameters: Mapping[str, Any]) -> Reply:
        body = json.dumps(parameters).encode()
        return self.manage("POST", where, body, headers={"Content-Type": "application/json"}, timeout=120)


def problem(reply: Reply) -> tuple[int, str, str]:
    """Status, type and text of an error answer."""
    document = reply.json
    assert document["code"] == reply.status
    return reply.status, document["type"], document["message"]


def trusting() -> ssl.SSLContext:
    """A client's context that takes any certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
