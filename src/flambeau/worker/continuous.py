"""RunningBatch: a batch that goes on, call after call of the handler, while requests join and leave it."""

from __future__ import annotations

import os
import time
from typing import Any

from flambeau.wire.channel import WorkerChannel
from flambeau.wire.messages import Cancel, Request, Run, Stop, ToWorker
from flambeau.worker.context import Context
from flambeau.worker.inputs import Row, types_of
from flambeau.worker.replier import Replier
from flambeau.worker.replies import check_result, stream_goes_on
from flambeau.worker.runner import Runner, is_stream


class RunningBatch:
    """The requests of the next call: those whose reply goes on, and those that have joined since.

    The server sends no more of them than there are places, so a call takes whatever is here.
    """

    def __init__(self, channel: WorkerChannel, runner: Runner, replier: Replier) -> None:
        self._channel = channel
        self._runner = runner
        self._replier = replier
        self._going_on: list[Request] = []
        self._joining: list[Request] = []
        self._is_stopping = False

    def run(self) -> None:
        """Call the handler as long as there is a request; until the server says stop or is gone."""
        while True:
            if not self._going_on and not self._joining:
                if self._is_stopping or (message := self._channel.receive()) is None:
                    return
                self._take(message)
            arrived = self._channel.poll()
            while arrived:
                self._take(arrived.popleft())
            if self._going_on or self._joining:
                self._step()

    def _take(self, message: ToWorker) -> None:
        if type(message) is Run:
            if message.jobs[0].kind != "predict":  # explained or described alone, between two steps
                self._runner.run(message)
            else:
                self._replier.open(message.jobs)
                self._joining += message.jobs
        elif type(message) is Cancel:
            self._replier.note_cancelled(message.job_ids)
            refuse = self._replier.refuse_cancelled
            self._going_on = [request for request in self._going_on if not refuse(request)]
            self._joining = [request for request in self._joining if not refuse(request)]
            self._replier.forget_cancelled(message.job_ids)
        elif type(message) is Stop:
            self._is_stopping = True

    def _step(self) -> None:
        """One call: whoever joins brings its data, whoever goes on an empty row."""
        context = self._runner.context
        requests: list[Request] = [*self._going_on]
        rows: list[Row] = [{} for _ in requests]
        types: list[dict[str, str] | None] = [{} for _ in requests]
        for request in self._joining:
            if (row := self._runner.read(request)) is not None:
                requests.append(request)
                rows.append(row)
                types.append(types_of(row))
        self._going_on, self._joining = [], []
        if not requests:
            return
        context.begin(requests, types)
        try:
            began = time.perf_counter()
            self._reply(context, self._runner.handle(rows, context), began)
        except Exception as error:  # what the handler keeps of the others cannot be trusted either
            self._going_on = []
            self._replier.fail(requests, error)
        self._replier.send_samples(context)

    def _reply(self, context: Context, result: Any, began: float) -> None:
        """Send what the handler returned; those who are not finished stay for the next call."""
        if is_stream(result) or (isinstance(result, list) and any(map(is_stream, result))):
            self._runner.reply(context, result, began)  # generators, which are run to their end
            return
        values = check_result(result, len(context.requests))
        lasts = [not stream_goes_on(context, i, value) for i, value in enumerate(values)]
        self._replier.send_step(context, values, lasts)
        self._going_on = [request for request, last in zip(context.requests, lasts, strict=True) if not last]
        os.sched_yield()  # the kernel likes to wake the server on this very core: let it send the parts now
