"""TorchServeEvents: the server's events in the words of TorchServe's logs, which scripts wait for."""

from __future__ import annotations

import logging
import platform
import time

from flambeau.logs.line_formats import MODEL, LineFormat, printable
from flambeau.logs.writer import Logs
from flambeau.serving.crash_recovery import WorkerExit
from flambeau.serving.events import ServerEvents, WorkerRef

logger = logging.getLogger(__name__)

SLOW_START = "org.pytorch.serve.wlm.WorkerInitializationException: Backend worker did not respond in given time"


class TorchServeEvents(ServerEvents):
    """Writes TorchServe's lines word for word, some of them to the model log as if the worker had printed them."""

    def __init__(self, logs: Logs) -> None:
        self._logs = logs
        self.reports_batches = not logs.is_terminal
        self._states: dict[str, str] = {}  # worker → the state in its last "State change" line
        self._recovering: set[str] = set()  # workers that failed and have not loaded since
        self._explained: set[str] = set()  # workers whose load failure is in the model log
        self._batch_lines: dict[str, LineFormat] = {}  # worker → of the line for each batch

    def model_loaded(self, model: str) -> None:
        logger.info("Model %s loaded.", printable(model))

    # ---- workers ----

    def worker_starting(self, worker: WorkerRef) -> None:
        self._change(worker, "WORKER_STARTED")

    def worker_loaded(self, worker: WorkerRef, load_s: float) -> None:
        self._change(worker, "WORKER_MODEL_LOADED")
        if worker.name in self._recovering:
            self._recovering.remove(worker.name)
            logger.info("Auto recovery succeeded, reset recoveryStartTS", extra={"worker": worker.name})

    def worker_load_timed_out(self, worker: WorkerRef, timeout_s: float) -> None:
        logger.error("Backend worker error\n%s", SLOW_START)

    def worker_stalled(self, worker: WorkerRef, timeout_s: float, failures: int) -> None:
        text = "Backend worker did not respond in given time: worker %d of %s %s"
        logger.error(text, worker.id, worker.model, worker.version)
        logger.error("Number or consecutive unsuccessful inference %d", failures)

    def worker_exited(self, worker: WorkerRef, worker_exit: WorkerExit) -> None:
        extra = {"worker": worker.name}
        logger.info("%d Worker disconnected. %s", worker.id, self._state(worker), extra=extra)
        if worker_exit.while_loading:
            if not worker_exit.is_final:  # `worker_abandoned` writes the same words with the cause
                logger.error("Backend worker error", extra=extra)
            self._change(worker, "WORKER_ERROR")
        self._change(worker, "WORKER_STOPPED")
        if worker_exit.is_final:
            return
        if worker.name in self._recovering:
            logger.info("Auto recovery failed again", extra=extra)
        else:
            self._recovering.add(worker.name)
            logger.info("Auto recovery start timestamp: %d", time.time() * 1000, extra=extra)

    def worker_retried(self, worker: WorkerRef, worker_exit: WorkerExit, delay_s: float, *, attempt: int = 0) -> None:
        if worker.name in self._explained:
            self._explained.remove(worker.name)
        elif attempt:
            reason = worker_exit.reason.partition("\n")[0]
            logger.warning("%s: as before (attempt %d): %s", worker, attempt, reason)
        else:
            logger.warning("%s: %s", worker, worker_exit.cause)
        logger.info("Retry worker: %d in %g seconds.", worker.id, delay_s, extra={"worker": worker.name})

    def worker_abandoned(self, worker: WorkerRef, worker_exit: WorkerExit, *, is_repeated: bool) -> None:
        if not worker_exit.is_final:
            logger.error("%s: giving up: %s", worker, worker_exit.cause)
        elif not is_repeated:
            text = "Backend worker error: %s is not tried again: %s"
            logger.error(text, worker, worker_exit.reason, extra={"worker": worker.name})
        self._forget(worker)

    def worker_retired(self, worker: WorkerRef) -> None:
        self._change(worker, "WORKER_SCALED_DOWN")
        self._forget(worker)

    # ---- processes of workers ----

    def process_started(self, worker: str, pid: int) -> None:
        version = platform.python_version()
        self._print(worker, f"[PID]{pid}", "Torch worker started.", f"Python runtime: {version}")

    def load_failed(self, worker: str, message: str, traceback: str) -> None:
        self._print(worker, "Backend worker process died.", *(traceback or message).splitlines())
        if not self._logs.is_terminal:
            self._explained.add(worker)

    def batch_sent(self, worker: str) -> None:
        line = self._batch_lines.get(worker)
        if line is None:
            to_text = "Backend received inference at: {}".format
            line = self._batch_lines[worker] = LineFormat(MODEL, thread=f"{worker}-stdout", to_text=to_text)
        self._logs.add(line, ())

    def stream_cancelled(self, worker: str, request_id: str) -> None:
        logger.info("Connection to client got closed; Removing job: %s", request_id)

    def metric_rejected(self, worker: str, line: str) -> None:
        logger.error('Failed to parse metrics line: "%s".', line, extra={"worker": f"{worker}-stdout"})

    # ---- state ----

    def _state(self, worker: WorkerRef) -> str:
        return self._states.get(worker.name, "null")

    def _change(self, worker: WorkerRef, state: str) -> None:
        before = self._state(worker)
        if state != before:
            logger.info("%s State change %s -> %s", worker.name, before, state, extra={"worker": worker.name})
            self._states[worker.name] = state

    def _forget(self, worker: WorkerRef) -> None:
        self._states.pop(worker.name, None)
        self._recovering.discard(worker.name)
        self._explained.discard(worker.name)
        self._batch_lines.pop(worker.name, None)

    def _print(self, worker: str, *lines: str) -> None:
        """Write to the model log, unless it goes to a terminal."""
        if not self._logs.is_terminal:
            encoded = [line.encode("utf-8", "backslashreplace") for line in lines]
            self._logs.put(MODEL, logging.INFO, f"{worker}-stdout", MODEL, encoded)
