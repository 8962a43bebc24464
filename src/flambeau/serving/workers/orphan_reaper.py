"""The reaper process: kills the workers with their children when the server is gone, however it ended.

python -I -S orphan_reaper.py    (stdin: a line `+PID` for each worker that starts, `-PID` for each that has exited)

It runs as a file, without the package, so that it starts in milliseconds and stays small.
"""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):  # a service manager may signal every process
        signal.signal(number, signal.SIG_IGN)
    groups: set[int] = set()
    for line in sys.stdin:
        if line[-1] != "\n":
            break  # the server died while it wrote: half a number would be that of another group
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    for group in groups:
        try:
            os.killpg(group, signal.SIGKILL)
        except OSError:
            pass  # nobody is left in it


if __name__ == "__main__":
    main()
