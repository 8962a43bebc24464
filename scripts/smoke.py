#!/usr/bin/env python3
"""Install a wheel in a clean environment and serve a handler with it: `python scripts/smoke.py dist/*.whl`."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import venv
from pathlib import Path

COMMANDS = ("flambeau", "torchserve", "torch-model-archiver", "torch-workflow-archiver")
PREDICT = """
from importlib.metadata import metadata
from pathlib import Path
from flambeau.testing.server import ModelServer

extras = metadata("flambeau").get_all("Provides-Extra")
assert "dev" not in extras, extras
handler = Path("shout.py")
handler.write_text("def handle(data, context):\\n    return data and [row['body'].decode().upper() for row in data]\\n")
server = ModelServer(Path("server.log"), "shout.py")
try:
    assert server.wait_ready().predict("shout", b"hello").text == "HELLO", server.log
finally:
    server.stop()
"""


def main() -> None:
    wheel = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as folder:
        venv.create(Path(folder, "venv"), with_pip=True)
        bin_folder = Path(folder, "venv", "bin")
        subprocess.run([bin_folder / "pip", "install", "--quiet", "--disable-pip-version-check", wheel], check=True)
        for command in COMMANDS:
            subprocess.run([bin_folder / command, "--help"], check=True, stdout=subprocess.DEVNULL)
        subprocess.run([bin_folder / "python", "-c", PREDICT], check=True, cwd=folder)
    print(f"{wheel.name}: installed, served and answered")


if __name__ == "__main__":
    main()
