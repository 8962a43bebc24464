"""MicroBatching: splits a batch, so that one piece is prepared while another is computed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Event, Thread, local
from typing import TYPE_CHECKING, Any

from flambeau.errors import ConfigError

if TYPE_CHECKING:
    from flambeau.worker.context import Context

HANDLER_METHODS = ["preprocess", "inference", "postprocess"]
LOOK_EVERY_S = 0.5  # how often an idle thread checks its event


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One piece: its index, its batch, and its value so far or its error."""

    index: int
    batch: int
    value: Any = None
    error: BaseException | None = None


Pieces = SimpleQueue[MicroBatch | None]


@dataclass(frozen=True, slots=True)
class WorkerThread:
    """A thread of one stage, and the event that ends it."""

    event: Event
    thread: Thread


def execute_call(
    in_queue: Pieces, out_queue: Pieces, handle: Callable[[Any], Any], thread_local_data: local, event: Event
) -> None:
    """Move pieces through one stage until the event is set; failed pieces are passed on."""
    while not event.is_set():
        try:
            piece = in_queue.get(timeout=LOOK_EVERY_S)
        except Empty:
            continue
        if piece is None:  # unblocks a thread that should end
            continue
        if piece.error is None:
            thread_local_data.micro_batch_idx = piece.index
            try:
                piece = MicroBatch(piece.index, piece.batch, handle(piece.value))
            except BaseException as error:  # the caller of the batch raises it
                piece = MicroBatch(piece.index, piece.batch, error=error)
        out_queue.put(piece)


class MicroBatching:
    """Replaces a handler's `handle`: `self.handle = MicroBatching(self, micro_batch_size=4)`."""

    def __init__(
        self, parent_handler: Any, micro_batch_size: int = 1, parallelism: Mapping[str, int] | None = None
    ) -> None:
        self.handler = parent_handler
        self.micro_batch_size = max(1, int(micro_batch_size))
        self.thread_groups: dict[str, list[WorkerThread]] = {name: [] for name in HANDLER_METHODS}
        self._parallelism: dict[str, int] = {}
        self._queues: list[Pieces] = [SimpleQueue() for _ in range(len(HANDLER_METHODS) + 1)]
        self._local = local()
        self._batch = 0
        self.parallelism = parallelism or {}

    @property
    def parallelism(self) -> dict[str, int]:
        """Threads per stage; the default is one."""
        return dict(self._parallelism)

    @parallelism.setter
    def parallelism(self, wanted: Mapping[str, int]) -> None:
        for name, count in wanted.items():
            if name not in HANDLER_METHODS:
                raise ConfigError(f"micro batching has no stage {name!r}; stages: {', '.join(HANDLER_METHODS)}")
            if type(count) is not int or count < 1:
                raise ConfigError(f"micro batching: {name} needs at least one thread, not {count!r}")
        self._parallelism = {name: wanted.get(name, 1) for name in HANDLER_METHODS}
        self._update_threads()

    def get_micro_batch_idx(self) -> int:
        """The index of the micro batch that this thread works on; valid only inside a stage."""
        index: int = self._local.micro_batch_idx
        return index

    def shutdown(self) -> None:
        """End all threads; the object cannot be called afterwards."""
        self._parallelism = dict.fromkeys(HANDLER_METHODS, 0)
        self._update_threads()

    def __call__(self, data: Sequence[Any], context: Context) -> Any:
        """Answer a batch, as the handler's own `handle` would."""
        began = time.perf_counter()
        handler = self.handler
        handler.context = context
        if handler._is_describe():
            return [handler.describe_handle()]
        if handler._is_explain():
            output = handler.explain_handle(handler.preprocess(data), data)
        else:
            output = self.handle(data)
        context.metrics.add_time("HandlerTime", round((time.perf_counter() - began) * 1000, 2), None, "ms")
        return output

    def handle(self, data: Sequence[Any]) -> list[Any]:
        """Send a batch through the stages piece by piece; raises the error of the first failed piece."""
        if not all(self._parallelism.values()):
            raise RuntimeError("micro batching was shut down")
        self._batch += 1
        starts = range(0, len(data), self.micro_batch_size)
        for index, start in enumerate(starts):
            self._queues[0].put(MicroBatch(index, self._batch, data[start : start + self.micro_batch_size]))
        done: dict[int, MicroBatch] = {}
        while len(done) < len(starts):
            piece = self._queues[-1].get()
            if piece is not None and piece.batch == self._batch:  # pieces of an interrupted batch are dropped
                done[piece.index] = piece
        pieces = [done[index] for index in range(len(starts))]
        for piece in pieces:
            if piece.error is not None:
                raise piece.error
        return [result for piece in pieces for result in piece.value]

    def _update_threads(self) -> None:
        for number, name in enumerate(HANDLER_METHODS):
            group, before, behind = self.thread_groups[name], self._queues[number], self._queues[number + 1]
            surplus, group[self._parallelism[name] :] = group[self._parallelism[name] :], []
            for worker in surplus:
                worker.event.set()
            for _ in surplus:
                before.put(None)
            for worker in surplus:
                worker.thread.join()
            while len(group) < self._parallelism[name]:
                group.append(self._start(name, before, behind))

    def _start(self, name: str, before: Pieces, behind: Pieces) -> WorkerThread:
        event = Event()
        arguments = (before, behind, lambda value: getattr(self.handler, name)(value), self._local, event)
        thread = Thread(target=execute_call, args=arguments, name=f"micro-batching-{name}", daemon=True)
        thread.start()
        return WorkerThread(event, thread)
