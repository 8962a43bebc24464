"""The pid file of the `torchserve` command, and the process it refers to."""

from __future__ import annotations

import os
import stat
import subprocess
import tempfile
from pathlib import Path

# Scripts search the process list for this word, and so does `torchserve --stop`.
SIGN = "org.pytorch.serve.ModelServer"
VARIABLE = "TS_PID_FILE"
MAX_BYTES = 100


class PidFile:
    """A file with the process id of a running server."""

    def __init__(self, named: str | None) -> None:
        self.path = Path(named or os.environ.get(VARIABLE) or Path(tempfile.gettempdir()) / ".model_server.pid")

    def read(self) -> int | None:
        """The id of the running server, or None. A file without a process is removed; other processes are ignored."""
        try:
            pid = int(self._text().split("\n", 1)[0])
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            pid = 0
        command = command_of(pid) if pid > 0 else None
        if command is None:
            print("Removing orphan pid file.")
            self._unlink()
            return None
        return pid if SIGN in command else None

    def write(self, pid: int) -> None:
        """Create the file, in place of an older one. A link is replaced, not followed: the folder may be shared."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            descriptor = os.open(self.path, flags, 0o644)
        except FileExistsError:
            self.path.unlink()
            descriptor = os.open(self.path, flags, 0o644)
        with open(descriptor, "w") as file:
            file.write(str(pid))

    def remove(self, pid: int) -> None:
        """Delete the file if it still holds this id; another server may have started since."""
        try:
            if self._text().strip() == str(pid):
                self.path.unlink()
        except OSError:
            pass

    def _text(self) -> str:
        """The start of the file; a link, a folder or a pipe is an OSError."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(f"{self.path} is not a plain file")
            return os.read(descriptor, MAX_BYTES).decode(errors="replace")
        finally:
            os.close(descriptor)

    def _unlink(self) -> None:
        try:
            self.path.unlink(missing_ok=True)
        except OSError as error:
            print(f"{self.path} cannot be removed ({error.strerror}); name another file with --pid-file or {VARIABLE}")


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
