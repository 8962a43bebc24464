"""How each server is started: its command line, files and environment."""

import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from assets import MODEL_NAME

HOST = "127.0.0.1"
BEFORE = "FLAMBEAU_BEFORE_PYTHON"  # the Python of an environment with an earlier version, to compare with
JOB_QUEUE_SIZE = 1000
MAX_REQUEST_BYTES = 104_857_600

# On two cores Java's common pool has one thread, and TorchServe then starts an operating-system thread per batch.
TUNED_JAVA = "vmargs=-Djava.util.concurrent.ForkJoinPool.common.parallelism=2\n"

TUNED_LOGS = """\
<?xml version="1.0" encoding="UTF-8"?>
<Configuration>
  <Appenders><Console name="console"><PatternLayout pattern="%m%n"/></Console></Appenders>
  <Loggers><Root level="error"><AppenderRef ref="console"/></Root></Loggers>
</Configuration>
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """A ready command: what to run, what to add to the environment, and where it will listen."""

    command: list[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    port: int

    @property
    def path(self) -> str:
        return f"/predictions/{MODEL_NAME}"

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}{self.path}"


class Peer(Protocol):
    """A server that can be measured."""

    @property
    def name(self) -> str: ...

    def is_installed(self) -> bool: ...

    def launch(self, archive: Path, folder: Path, port: int) -> Launch:
        """The command that serves the archive on `port`; `folder` takes the files it needs."""


@dataclass(frozen=True, slots=True)
class Flambeau:
    """This project, in the environment of the given Python."""

    python: Path
    name: str = "flambeau"

    def is_installed(self) -> bool:
        return ask(self.python, "import flambeau.cli.main") is not None

    def launch(self, archive: Path, folder: Path, port: int) -> Launch:
        command = [str(self.python), "-m", "flambeau.cli.main", "serve", str(archive)]
        command += ["--port", str(port), "--management-port", str(port + 1), "--metrics-port", str(port + 2)]
        command += ["--job-queue-size", str(JOB_QUEUE_SIZE), "--max-request-size", str(MAX_REQUEST_BYTES)]
        return Launch(command=command, port=port)


@dataclass(frozen=True, slots=True)
class ObservedFlambeau(Flambeau):
    """The same with an open console and traces of one request in a hundred."""

    name: str = "flambeau-observed"

    def launch(self, archive: Path, folder: Path, port: int) -> Launch:
        plain = Flambeau.launch(self, archive, folder, port)
        script = Path(__file__).with_name("observed.py")
        return Launch(command=[str(self.python), str(script), str(port + 1), *plain.command], port=port)


@dataclass(frozen=True, slots=True)
class TorchServe:
    """The `torchserve` command of a virtual environment, as shipped or tuned for a small machine."""

    venv: Path
    is_tuned: bool
    label: str = "torchserve"

    @property
    def name(self) -> str:
        return f"{self.label}-tuned" if self.is_tuned else self.label

    def is_installed(self) -> bool:
        return (self.venv / "bin" / "torchserve").exists()

    def launch(self, archive: Path, folder: Path, port: int) -> Launch:
        config, logs = folder / "config.properties", folder / "log4j2.xml"
        config.write_text(self._properties(port))
        command = [str(self.venv / "bin" / "torchserve"), "--start", "--foreground", "--ncs"]
        command += ["--disable-token-auth", "--enable-model-api", "--ts-config", str(config)]
        command += ["--model-store", str(archive.parent), "--models", f"{MODEL_NAME}={archive.name}"]
        if self.is_tuned:
            logs.write_text(TUNED_LOGS)
            command += ["--log-config", str(logs)]
        environment = {
            "PATH": f"{self.venv / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": "",
            "TEMP": str(folder),
            "LOG_LOCATION": str(folder / "logs"),
            "METRICS_LOCATION": str(folder / "logs"),
        }
        return Launch(command=command, environment=environment, port=port)

    def _properties(self, port: int) -> str:
        properties = (
            f"inference_address=http://{HOST}:{port}\n"
            f"management_address=http://{HOST}:{port + 1}\n"
            f"metrics_address=http://{HOST}:{port + 2}\n"
            f"grpc_inference_port={port + 3}\n"
            f"grpc_management_port={port + 4}\n"
            f"job_queue_size={JOB_QUEUE_SIZE}\n"
            f"max_request_size={MAX_REQUEST_BYTES}\n"
            f"max_response_size={MAX_REQUEST_BYTES}\n"
        )
        return properties + (TUNED_JAVA if self.is_tuned else "")


PEERS: dict[str, Callable[[Path, Path], Peer]] = {
    "flambeau": lambda python, _: Flambeau(python),
    "flambeau-observed": lambda python, _: ObservedFlambeau(python),
    "flambeau-before": lambda _python, _venv: Flambeau(Path(os.environ.get(BEFORE, BEFORE)), "flambeau-before"),
    # Flambeau under TorchServe's command line, with the logs that TorchServe writes by default.
    "flambeau-torchserve": lambda python, _: TorchServe(
        python.parent.parent, is_tuned=False, label="flambeau-torchserve"
    ),
    "torchserve": lambda _, venv: TorchServe(venv, is_tuned=False),
    "torchserve-tuned": lambda _, venv: TorchServe(venv, is_tuned=True),
}


def ask(python: Path, code: str) -> str | None:
    """What a Python prints for a line of code, or None when it fails."""
    try:
        answer = subprocess.run([python, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=60)
    except OSError:
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None
