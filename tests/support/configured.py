"""A real server with any settings at all, also those that have no flag."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support.running import RunningServer, free_ports, path

PROGRAM = """
import json, sys
from pathlib import Path
from flambeau.cli import serve
from flambeau.config.logs import set_up_server_logs
from flambeau.config.server import Address, ServerConfig

ports, settings, models = json.loads(sys.argv[1])
for key, value in settings.items():
    if key.endswith(("_store", "_folder")):
        settings[key] = Path(value)
    elif isinstance(value, list):
        settings[key] = tuple(value)
inference, management, metrics = (Address(port=port) for port in ports)
set_up_server_logs("info")
config = ServerConfig(inference=inference, management=management, metrics=metrics, **settings)
serve.start(config, [serve.Plan(path=Path(m), is_required=False) for m in models], serve.Wishes())
"""


class ConfiguredServer(RunningServer):
    """A server process with the settings of a ServerConfig; `models` are paths."""

    def __init__(self, log: Path, settings: Mapping[str, Any], models: list[Path], env: Mapping[str, str]) -> None:
        ports = free_ports(3)
        self.port, self.management_port, self.metrics_port = ports
        self.log_path = log
        given = json.dumps([ports, settings, models], default=str)
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", PROGRAM, given],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": path(), **env},
            )

    def register(self, url: str, **parameters: Any) -> Any:
        """Register a model."""
        return self._post("/models", {"url": url, **parameters})

    def register_workflow(self, url: str, **parameters: Any) -> Any:
        """Register a workflow."""
        return self._post("/workflows", {"url": url, **parameters})

    def _post(self, where: str, parameters: Mapping[str, Any]) -> Any:
        body = json.dumps(parameters).encode()
        return self.manage("POST", where, body, headers={"Content-Type": "application/json"}, timeout=60)


def problem(reply: Any) -> tuple[int, str, str]:
    """Status, type and text of an error answer."""
    document = reply.json
    assert document["code"] == reply.status
    return reply.status, document["type"], document["message"]
