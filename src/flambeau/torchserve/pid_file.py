"""The pid file of the `torchserve` command, and the process it refers to."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

# Scripts search the process list for this word, and so does `torchserve --stop`.
SIGN = "org.pytorch.serve.ModelServer"
VARIABLE = "TS_PID_FILE"


class PidFile:
    """A file with the process id of a running server."""

    def __init__(self, named: str | None) -> None:
        self.path = Path(named or os.environ.get(VARIABLE) or Path(tempfile.gettempdir()) / ".model_server.pid")

    def read(self) -> int | None:
        """The id of the running server, or None. A file without a process is removed; other processes are ignored."""
        try:
            pid = int(self.path.read_text().split("\n", 1)[0])
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            pid = 0
        command = command_of(pid) if pid > 0 else None
        if command is None:
            print("Removing orphan pid file.")
            self.path.unlink(missing_ok=True)
            return None
        return pid if SIGN in command else None

    def write(self, pid: int) -> None:
        self.path.write_text(str(pid))

    def remove(self, pid: int) -> None:
        """Delete the file if it still holds this id; another server may have started since."""
        try:
            if self.path.read_text().strip() == str(pid):
                self.path.unlink()
        except OSError:
            pass


def command_of(pid: int) -> str | None:
    """The command line of a process; None if there is no such process, or only a zombie."""
    folder = Path(f"/proc/{pid}")
    if not Path("/proc/self/stat").exists():
        words = subprocess.run(
            ["ps", "-o", "stat=,command=", "-p", str(pid)], capture_output=True, text=True, check=False
        )
        state, _, command = words.stdout.strip().partition(" ")
        return command if state and not state.startswith("Z") else None
    try:
        state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except PermissionError:
        return ""
    except OSError:
        return None
    return None if state in "ZX" else command
