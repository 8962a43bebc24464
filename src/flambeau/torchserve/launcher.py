"""Starts and stops a `torchserve` server from a script, and registers models (`ts.launcher`)."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from queue import Full, Queue
from typing import IO, Any

COMMAND = [sys.executable, "-m", "flambeau.torchserve.command"]
MANAGEMENT = "http://localhost:8081"
STARTED = "Model server started"
LAST_LINES = 20
MAX_LINES = 1000


@dataclass(frozen=True, slots=True)
class Response:
    """An HTTP response with the attributes of `requests.Response`."""

    status_code: int
    content: bytes

    @property
    def text(self) -> str:
        return self.content.decode(errors="replace")

    @property
    def ok(self) -> bool:
        return self.status_code < 400

    def json(self) -> Any:
        return json.loads(self.content)

    def raise_for_status(self) -> None:
        if not self.ok:
            raise RuntimeError(f"the server answered {self.status_code}: {self.text.strip()}")


def stop(wait: bool = True) -> None:
    subprocess.run([*COMMAND, "--stop", *(["--foreground"] if wait else [])], check=False)


def start(
    model_store: str | Path | None = None,
    snapshot_file: str | Path | None = None,
    no_config_snapshots: bool = False,
    plugin_folder: str | Path | None = None,
    disable_token: bool = False,
    models: str | None = None,
    enable_model_api: bool = False,
) -> Queue[str | None]:
    """Stop the running server, start a new one and wait until it has started.

    The queue receives the lines that the server prints later.
    """
    stop()
    values = {
        "--model-store": model_store,
        "--plugins-path": plugin_folder,
        "--ts-config": snapshot_file,
        "--models": models,
    }
    switches = {
        "--no-config-snapshots": no_config_snapshots,
        "--disable-token-auth": disable_token,
        "--enable-model-api": enable_model_api,
    }
    words = [word for flag, value in values.items() if value for word in (flag, str(value))]
    words += [flag for flag, is_on in switches.items() if is_on]
    process = subprocess.Popen(
        [*COMMAND, "--start", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    assert process.stdout is not None
    echo_until_started(process.stdout)
    process.wait()  # the command returns at once; the server inherits its output
    lines: Queue[str | None] = Queue(MAX_LINES)
    threading.Thread(target=pass_on, args=(process.stdout, lines), daemon=True).start()
    return lines


def echo_until_started(output: Iterable[str]) -> None:
    """Print the server's output until it has started; raise if it ends before."""
    last: deque[str] = deque(maxlen=LAST_LINES)
    for line in output:
        print(line.strip())
        last.append(line)
        if STARTED in line:
            return
    raise RuntimeError(f"the server did not start:\n{''.join(last)}")


def pass_on(output: IO[str], lines: Queue[str | None]) -> None:
    """Print each line and put it into the queue; None marks the end."""
    with output:
        for line in output:
            print(line.strip())
            put(line, lines)
    put(None, lines)


def put(line: str | None, lines: Queue[str | None]) -> None:
    """Add a line; a full queue drops its oldest one."""
    while True:
        try:
            return lines.put_nowait(line)
        except Full:
            lines.get()


def register_model_with_params(params: Mapping[str, str] | Iterable[tuple[str, str]]) -> Response:
    """Register a model with the server on this machine."""
    words = urllib.parse.urlencode([*params.items()] if isinstance(params, Mapping) else [*params])
    request = urllib.request.Request(f"{MANAGEMENT}/models?{words}", method="POST")
    try:
        with urllib.request.urlopen(request) as response:
            return Response(response.status, response.read())
    except urllib.error.HTTPError as error:
        with error:
            return Response(error.code, error.read())


def register_model(model_name: str, url: str) -> Response:
    """Register a model with one worker and wait until it is ready."""
    given = {"model_name": model_name, "url": url, "initial_workers": "1", "synchronous": "true"}
    return register_model_with_params(given)
