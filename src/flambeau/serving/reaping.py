"""The end of a command whose output nobody wants any more."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

REAP_S = 5.0
CHUNK_BYTES = 64 * 1024


async def end(process: asyncio.subprocess.Process) -> None:
    """Kill a command that leads its own session, with whatever it has started, and wait until it is gone.

    asyncio says that it has ended only once its output has been read to the end.
    """
    assert process.stdout is not None
    with contextlib.suppress(OSError):  # nobody is left
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(TimeoutError):  # somebody who left the session may hold the pipe open
        async with asyncio.timeout(REAP_S):
            while await process.stdout.read(CHUNK_BYTES):
                pass
            await process.wait()
