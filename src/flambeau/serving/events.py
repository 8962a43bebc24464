"""ServerEvents: what happens to models and workers, written to the log."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from flambeau.logs.line_formats import printable
from flambeau.serving.crash_recovery import WorkerExit

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerRef:
    """The identity of a worker: it stays the same when its process is replaced."""

    id: int
    model: str
    version: str

    @property
    def name(self) -> str:
        """Its name in logs and metrics."""
        return f"W-{self.id}-{self.model}_{self.version}"

    def __str__(self) -> str:
        return printable(f"worker {self.id} of model {self.model} version: {self.version}")


class ServerEvents:
    """One method for each event. A subclass can word the events differently.

    Records carry `event`, the name of the method, `worker`, the name of the worker, and `model` where it is known.
    """

    reports_batches = False  # whether `batch_sent` is called, once for each batch

    # ---- models ----

    def model_loaded(self, model: str) -> None:
        """A model can be used: a worker has loaded it, or it is registered without workers."""
        logger.info("model %s is loaded", printable(model), extra={"event": "model_loaded", "model": model})

    # ---- workers ----

    def worker_starting(self, worker: WorkerRef) -> None:
        self._log(logging.DEBUG, "worker_starting", worker, "%s starts", worker)

    def worker_loaded(self, worker: WorkerRef, load_s: float) -> None:
        self._log(logging.INFO, "worker_loaded", worker, "%s loaded its model in %.1f s", worker, load_s)

    def worker_load_timed_out(self, worker: WorkerRef, timeout_s: float) -> None:
        text = "%s did not load its model within %g s (startupTimeout)"
        self._log(logging.ERROR, "worker_load_timed_out", worker, text, worker, timeout_s)

    def worker_stalled(self, worker: WorkerRef, timeout_s: float, failures: int) -> None:
        """A worker made no progress for too long; `failures` counts those in a row, with this one."""
        text = "%s did not answer within %g s (responseTimeout)"
        self._log(logging.ERROR, "worker_stalled", worker, text, worker, timeout_s)

    def worker_slow(self, worker: WorkerRef, words: str) -> None:
        """A worker takes much longer than usual, and may be at work."""
        self._log(logging.WARNING, "worker_slow", worker.name, "%s is %s", worker, words)

    def worker_hung(self, worker: WorkerRef, words: str) -> None:
        """A worker can make no progress and is replaced."""
        self._log(logging.ERROR, "worker_hung", worker.name, "%s is replaced: %s", worker, words)

    def worker_exited(self, worker: WorkerRef, worker_exit: WorkerExit) -> None:
        """A worker exited unexpectedly. `worker_retried` or `worker_abandoned` follows."""
        self._log(logging.DEBUG, "worker_exited", worker, "%s exited: %s", worker, worker_exit.reason)

    def worker_retried(self, worker: WorkerRef, worker_exit: WorkerExit, delay_s: float, *, attempt: int = 0) -> None:
        """A worker restarts. With `attempt`, so many failed in a row and the log has this cause already."""
        if attempt:
            text = "%s exited and restarts in %g s, as before (attempt %d): %s"
            reason = worker_exit.reason.partition("\n")[0]
            self._log(logging.WARNING, "worker_retried", worker, text, worker, delay_s, attempt, reason)
            return
        text = "%s exited and restarts in %g s: %s"
        self._log(logging.WARNING, "worker_retried", worker, text, worker, delay_s, worker_exit.cause)

    def worker_abandoned(self, worker: WorkerRef, worker_exit: WorkerExit, *, is_repeated: bool) -> None:
        """A worker is not restarted. `is_repeated`: another worker of the model failed for the same final reason."""
        if worker_exit.is_final:
            if not is_repeated:
                text = "%s is not tried again: %s"
                self._log(logging.ERROR, "worker_abandoned", worker, text, worker, worker_exit.reason)
        else:
            text = "%s is not restarted any more: %s"
            self._log(logging.ERROR, "worker_abandoned", worker, text, worker, worker_exit.cause)

    def worker_retired(self, worker: WorkerRef) -> None:
        self._log(logging.INFO, "worker_retired", worker, "%s is stopped", worker)

    # ---- processes of workers: `worker` is a name, with the rank where there are several ----

    def process_started(self, worker: str, pid: int) -> None:
        self._log(logging.INFO, "process_started", worker, "%s runs as process %d", printable(worker), pid)

    def load_failed(self, worker: str, message: str, traceback: str) -> None:
        """The model could not be loaded; the worker exits next. The traceback is empty if the message suffices."""

    def batch_sent(self, worker: str) -> None:
        """Called only if `reports_batches` is set."""

    def stream_cancelled(self, worker: str, request_id: str) -> None:
        """The client of a continuous batch disconnected."""
        self._log(logging.DEBUG, "stream_cancelled", worker, "request %s: its client disconnected", request_id)

    def metric_rejected(self, worker: str, line: str) -> None:
        """A worker printed a metrics line that cannot be parsed."""
        text = '%s printed an invalid metrics line: "%s"'
        self._log(logging.ERROR, "metric_rejected", worker, text, printable(worker), line)

    @staticmethod
    def _log(level: int, event: str, worker: WorkerRef | str, text: str, *arguments: object) -> None:
        extra = {"event": event, "worker": worker}
        if isinstance(worker, WorkerRef):
            extra |= {"worker": worker.name, "model": worker.model}
        logger.log(level, text, *arguments, extra=extra)
