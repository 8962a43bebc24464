"""Ends commands that the server has started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

REAP_S = 5.0
CHUNK_BYTES = 64 * 1024


async def kill(process: asyncio.subprocess.Process) -> None:
    """Kill a command that leads its own session, with its children, and wait until it is gone.

    asyncio reports the end only after the output has been read to the end.
    """
    assert process.stdout is not None
    with contextlib.suppress(OSError):  # no process is left
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(TimeoutError):  # a child that left the session may hold the pipe open
        async with asyncio.timeout(REAP_S):
            while await process.stdout.read(CHUNK_BYTES):
                pass
            await process.wait()
