"""The pid file of the `torchserve` command, and the process it names."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path

# Scripts and other tools look for this word in the list of processes, and so do we.
SIGN = "org.pytorch.serve.ModelServer"
VARIABLE = "TS_PID_FILE"


class PidFile:
    """One line with the id of a running server."""

    def __init__(self, named: str | None) -> None:
        self.path = Path(named or os.environ.get(VARIABLE) or Path(tempfile.gettempdir()) / ".model_server.pid")

    def read(self) -> int | None:
        """The id of the running server; an orphan file is removed, a process that is none of ours is left alone."""
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
        """Name this process as the server."""
        self.path.write_text(str(pid))

    def remove(self, pid: int) -> None:
        """Delete the file if it still names this process; another server may have come since."""
        try:
            if self.path.read_text().strip() == str(pid):
                self.path.unlink()
        except OSError:
            pass


def command_of(pid: int) -> str | None:
    """The command line of a process; None when there is none, or when it has ended and nobody has noticed."""
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
