"""A command of Flambeau in a terminal, as a person uses it."""

from __future__ import annotations

import os
import pty
import re
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

TIMEOUT_S = 60.0
CONTROL = re.compile(r"\x1b\[[?0-9;]*[A-Za-z]|\r")  # what moves the cursor


class Terminal:
    """Runs `flambeau WORDS` with a pseudo terminal; the block waits for its end."""

    def __init__(self, *words: str, folder: Path, env: Mapping[str, str]) -> None:
        self._leader, follower = pty.openpty()
        self.seen = ""
        command = [sys.executable, "-m", "flambeau", *words]
        self.process = subprocess.Popen(
            command, stdin=follower, stdout=follower, stderr=follower, cwd=folder, env={**os.environ, **env}
        )
        os.close(follower)

    def __enter__(self) -> Self:
        self.wait_for("> $")
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.process.wait(TIMEOUT_S)
        finally:
            self.process.kill()
            self.process.wait()
            os.close(self._leader)

    def type(self, text: str, until: str = "") -> None:
        """Type a text; then wait for another text, and for a prompt after it."""
        self.seen = ""
        os.write(self._leader, text.encode())
        if until:
            self.wait_for(f"{re.escape(until)}.*\n> $")

    def wait_for(self, pattern: str) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while re.search(pattern, CONTROL.sub("", self.seen), re.DOTALL) is None:
            if time.monotonic() > deadline or not self._read():
                raise AssertionError(f"{pattern!r} was not shown:\n{self.seen!r}")

    def _read(self) -> bool:
        """Read what is shown; False if the command has ended."""
        if not select.select([self._leader], [], [], 1)[0]:
            return True
        try:
            self.seen += os.read(self._leader, 65536).decode(errors="replace")
        except OSError:  # the other end is closed
            return False
        return True
