"""HostWatcher: reads the state of the host every so often, by itself or through a command of the operator's."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shlex
from collections.abc import Callable, Sequence

from flambeau.config.server import MetricsConfig
from flambeau.metrics.log_lines import parse_line
from flambeau.metrics.system import HostWatch, Reading
from flambeau.serving import reaping
from flambeau.serving.telemetry import Telemetry

logger = logging.getLogger(__name__)

FIRST_S = 0.3  # the processors' load needs a moment between two looks
COMMAND_TIMEOUT_S = 60.0
MAX_OUTPUT_BYTES = 1 << 20
CHUNK_BYTES = 64 << 10


class HostWatcher:
    """Keeps a task that reads the host's state; a reading that fails is logged, and the next one tried."""

    def __init__(self, config: MetricsConfig, telemetry: Telemetry, worker_pids: Callable[[], Sequence[int]]) -> None:
        self._config = config
        self._telemetry = telemetry
        self._worker_pids = worker_pids
        self._host = HostWatch()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin, if the configuration wants it."""
        if self._config.system:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """Read no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        await asyncio.sleep(min(FIRST_S, self._config.interval_s))
        while True:
            try:
                self._telemetry.add_readings(await self._read())
            except (OSError, ValueError, TimeoutError) as error:
                logger.error("the system metrics could not be read: %s", error)
            await asyncio.sleep(self._config.interval_s)

    async def _read(self) -> list[Reading]:
        if not self._config.system_command:
            return await asyncio.to_thread(self._host.read)
        lines = await self._ask(shlex.split(self._config.system_command))
        return understand(lines)

    async def _ask(self, words: Sequence[str]) -> list[str]:
        """Run the command, tell it the workers' process ids, and take what it prints."""
        process = await asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(COMMAND_TIMEOUT_S):
                output = await self._converse(process)
        except TimeoutError:
            raise TimeoutError(f"{words[0]} did not end within {COMMAND_TIMEOUT_S:g} s") from None
        finally:
            await reaping.end(process)
        if len(output) > MAX_OUTPUT_BYTES:
            raise ValueError(f"{words[0]} printed more than {MAX_OUTPUT_BYTES} bytes")
        return output.decode("utf-8", "replace").splitlines()

    async def _converse(self, process: asyncio.subprocess.Process) -> bytes:
        """Tell a command the workers, and take what it prints until it ends or has printed too much."""
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(ConnectionError):  # it need not listen
            process.stdin.write((",".join(map(str, self._worker_pids())) + "\n").encode())
            await process.stdin.drain()
        process.stdin.close()
        output = b""
        while len(output) <= MAX_OUTPUT_BYTES and (chunk := await process.stdout.read(CHUNK_BYTES)):
            output += chunk
        if len(output) <= MAX_OUTPUT_BYTES and (status := await process.wait()):
            raise OSError(f"the command ended with status {status}")
        return output


def understand(lines: Sequence[str]) -> list[Reading]:
    """What a command printed: one metric a line, an empty line, then workers' memory, which is read elsewhere."""
    readings: list[Reading] = []
    for line in lines:
        if not line.strip():
            break
        if (sample := parse_line(line)) is not None:
            name, _, unit, value, dimensions, _ = sample
            device = next((text for key, text in dimensions if key.lower() in ("device_id", "deviceid")), None)
            readings.append((name, unit, value, device))
        else:
            logger.warning("the system metrics command printed a line that is no metric: %.200s", line)
    return readings
