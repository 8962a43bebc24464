"""The worker's loop: receives the server's messages and hands them to the mode that runs the jobs."""

from __future__ import annotations

from collections.abc import Sequence

from flambeau.wire.messages import Cancel, Ready, Run, Stop, ToWorker
from flambeau.worker.model import LoadedModel
from flambeau.worker.outbox import Channel, Outbox
from flambeau.worker.runner import BatchRunner


class Mode:
    """How a worker runs its jobs. The loop calls `run` and `cancel` for messages, and `step` while there is work."""

    def __init__(self, model: LoadedModel, runner: BatchRunner, outbox: Outbox) -> None:
        self._model = model
        self._runner = runner
        self._outbox = outbox

    @property
    def has_work(self) -> bool:
        """Whether jobs wait for the next step; False in modes without steps."""
        return False

    def ready(self) -> Ready:
        """What the server needs to know before it sends jobs."""
        return Ready(can_share_memory=self._model.can_share_memory, abilities=[*self._model.abilities])

    def serve(self, loop: WorkerLoop) -> None:
        """Drive the loop until it ends."""
        loop.run()

    def run(self, run: Run) -> None:
        raise NotImplementedError

    def cancel(self, job_ids: Sequence[int]) -> None:
        raise NotImplementedError

    def step(self) -> None:
        raise NotImplementedError


class WorkerLoop:
    """The only place that tells Run, Cancel and Stop apart."""

    def __init__(self, channel: Channel, mode: Mode) -> None:
        self.channel = channel
        self.is_stopping = False
        self._mode = mode

    def run(self) -> None:
        """Handle messages until the server sends Stop, and finish what was begun; or until the server is gone."""
        receive, mode = self.channel.receive, self._mode
        while not self.is_stopping and (message := receive()) is not None:
            self.handle(message)
            while mode.has_work:
                self.handle_arrived()
                mode.step()

    def handle_arrived(self) -> None:
        """Handle every message that has arrived, without waiting."""
        arrived = self.channel.poll()
        while arrived:
            self.handle(arrived.popleft())

    def handle(self, message: ToWorker) -> None:
        if type(message) is Run:
            self._mode.run(message)
        elif type(message) is Cancel:
            self._mode.cancel(message.job_ids)
        elif type(message) is Stop:
            self.is_stopping = True
