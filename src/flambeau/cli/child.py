"""`python -m flambeau.cli.child PID …`: the command, which stops when the process that started it has ended."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

from flambeau.cli.main import main

POLL_S = 0.5
GRACE_S = 30.0  # to drain, before the process is killed


def stop_with(parent: int, poll_s: float = POLL_S) -> None:
    """Wait until `parent` is no longer the parent of this process, then stop it."""
    while os.getppid() == parent:
        time.sleep(poll_s)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE_S)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    threading.Thread(target=stop_with, args=(int(sys.argv.pop(1)),), daemon=True, name="parent watch").start()
    main()
