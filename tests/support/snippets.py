"""Code in README and docs, and a shell to run it in."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)


def snippets(file: str, language: str) -> list[str]:
    return [code for kind, code in FENCE.findall((ROOT / file).read_text()) if kind == language]


def run(command: str, folder: Path, timeout: float = 140, **env: str) -> subprocess.CompletedProcess[str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    shell = ["bash", "-euo", "pipefail", "-c", command]
    return subprocess.run(
        shell, cwd=folder, env={**os.environ, **env, "PATH": path}, capture_output=True, text=True, timeout=timeout
    )
