"""HostMetricsReader: reads the metrics of the host periodically, or those that a command prints."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shlex
from collections.abc import Callable, Sequence

from flambeau.config.server import MetricsConfig
from flambeau.metrics.log_lines import parse_line
from flambeau.metrics.system import HostReader, Reading
from flambeau.serving import subprocesses
from flambeau.serving.telemetry import Telemetry

logger = logging.getLogger(__name__)

FIRST_S = 0.3  # the CPU load needs an interval between two readings
COMMAND_TIMEOUT_S = 60.0
MAX_OUTPUT_BYTES = 1 << 20
CHUNK_BYTES = 64 << 10


class HostMetricsReader:
    """A task that reads the host's state; a failed reading is logged, and the next one follows."""

    def __init__(self, config: MetricsConfig, telemetry: Telemetry, worker_pids: Callable[[], Sequence[int]]) -> None:
        self._config = config
        self._telemetry = telemetry
        self._worker_pids = worker_pids
        self._host = HostReader()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the task, if the configuration enables it."""
        if self._config.system:
            self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
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
        lines = await self._run_command(shlex.split(self._config.system_command))
        return parse_output(lines)

    async def _run_command(self, words: Sequence[str]) -> list[str]:
        """Run the command with the workers' process ids on stdin, and return its output."""
        process = await asyncio.create_subprocess_exec(
            *words,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(COMMAND_TIMEOUT_S):
                output = await self._communicate(process)
        except TimeoutError:
            raise TimeoutError(f"{words[0]} did not end within {COMMAND_TIMEOUT_S:g} s") from None
        finally:
            await subprocesses.kill(process)
        if len(output) > MAX_OUTPUT_BYTES:
            raise ValueError(f"{words[0]} printed more than {MAX_OUTPUT_BYTES} bytes")
        return output.decode("utf-8", "replace").splitlines()

    async def _communicate(self, process: asyncio.subprocess.Process) -> bytes:
        """Write the process ids and read the output, up to MAX_OUTPUT_BYTES."""
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(ConnectionError):  # the command may ignore its stdin
            process.stdin.write((",".join(map(str, self._worker_pids())) + "\n").encode())
            await process.stdin.drain()
        process.stdin.close()
        output = b""
        while len(output) <= MAX_OUTPUT_BYTES and (chunk := await process.stdout.read(CHUNK_BYTES)):
            output += chunk
        if len(output) <= MAX_OUTPUT_BYTES and (status := await process.wait()):
            raise OSError(f"the command ended with status {status}")
        return output


def parse_output(lines: Sequence[str]) -> list[Reading]:
    """Parse the output: one metric per line, then an empty line; what follows it is ignored."""
    readings: list[Reading] = []
    for line in lines:
        if not line.strip():
            break
        if (sample := parse_line(line)) is not None:
            name, _, unit, value, dimensions, _ = sample
            device = next((text for key, text in dimensions if key.lower() in ("device_id", "deviceid")), None)
            readings.append((name, unit, value, device))
        else:
            logger.warning("the system metrics command printed a line that is not a metric: %.200s", line)
    return readings
