"""A server with a ServerConfig of the test's own: for settings that no flag of `flambeau serve` has."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from flambeau.config.server import ServerConfig
from support.running import HANDLERS, RunningServer, path

PROGRAM = """
{prelude}
from pathlib import PosixPath
from flambeau.cli.serve import Plan, Wishes, start
from flambeau.config.logs import set_up_server_logs
from flambeau.config.server import *
from flambeau.errors import FlambeauError
set_up_server_logs("info")
try:
    start({config!r}, [Plan(path=PosixPath({handler!r}), name="{name}", handler="{name}.py")], Wishes())
except FlambeauError as error:
    raise SystemExit(f"error: {{error}}")
"""


class ConfiguredServer(RunningServer):
    """Serves one handler of this folder; `prelude` is run first."""

    def __init__(self, folder: Path, config: ServerConfig, *, handler: str = "orders", prelude: str = "") -> None:
        self.port, self.management_port = config.inference.port, config.management.port
        self.log_path = folder / "server.log"
        where = str(HANDLERS / f"{handler}.py")
        program = PROGRAM.format(prelude=prelude, config=config, handler=where, name=handler)
        command: Sequence[str] = [sys.executable, "-c", program]
        environment = {**os.environ, "PYTHONPATH": path()}
        with self.log_path.open("wb") as output:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=folder
            )
