"""Generation: what a handler provides that makes its replies step by step, for many jobs at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from flambeau.errors import BadRequest, HandlerError
from flambeau.wire.messages import EngineReport, Part, Request
from flambeau.worker.inputs import Row
from flambeau.worker.loader import LoadedHandler

StepResult = Part | tuple[int, Exception]  # a part, or a job that failed alone
Send = Callable[[Sequence[StepResult]], None]


class Generation(Protocol):
    """What a handler's `generation()` returns. The worker calls it from one thread only."""

    places: int  # jobs it takes at a time
    abilities: Sequence[str]  # what front ends may ask for besides predictions: "generate", "chat", "tokenize", …
    max_length: int  # tokens of a prompt and its completion; 0: not known
    adapters: Sequence[str]  # names that requests may ask for besides the model itself
    on_results: Send | None  # set by the worker: takes the results of jobs that advance during a call of `handle`

    @property
    def has_work(self) -> bool:
        """Whether a step would produce anything."""

    def join(self, request: Request, row: Row) -> None:
        """Take a job, or raise to fail it. `request.state` is the state to resume from, if any."""

    def tokenize(self, request: Request, body: bytes | bytearray) -> bytes | None:
        """The reply to a job of kind `tokenize`; None: a later step has it. Only with that ability."""

    def step(self) -> Sequence[StepResult]:
        """Make the next parts. A part with `last`, or an exception, ends its job."""

    def cancel(self, job_id: int) -> None:
        """Free at once what a job holds; its client is gone."""

    def report(self) -> EngineReport | None:
        """The engine's load, with what was counted since the last call; None: not known."""

    def follow(self) -> None:
        """On a rank other than 0: compute what rank 0 computes, until rank 0 closes."""

    def close(self) -> None:
        """Free everything; no job is left."""


def cannot_follow() -> None:
    raise HandlerError("this handler's generation has no follow(): it runs on one rank only")


def cannot_tokenize(request: Request, body: bytes | bytearray) -> bytes | None:
    raise BadRequest("this model's handler does not tokenize texts; use a model with gpt_handler")


REQUIRED = ("places", "has_work", "join", "step", "cancel")
OPTIONAL: dict[str, Any] = {
    "abilities": (),
    "max_length": 0,
    "adapters": (),
    "on_results": None,
    "tokenize": cannot_tokenize,
    "report": lambda: None,
    "follow": cannot_follow,
    "close": lambda: None,
}


def has_generation(handler: object) -> bool:
    """Whether a handler offers to generate step by step."""
    return callable(getattr(handler, "generation", None))


def generation_of(loaded: LoadedHandler) -> Generation | None:
    """The handler's generation; None where it has none, or where an envelope needs whole replies."""
    if loaded.envelope or not has_generation(loaded.handler):
        return None
    found: Any = loaded.handler.generation()
    return None if found is None else complete(found)


def complete(found: Any) -> Generation:
    """A handler's own object with every member of `Generation`: the optional ones are added where they are missing."""
    if missing := [name for name in REQUIRED if not hasattr(found, name)]:
        raise HandlerError(
            f"generation() returned {type(found).__name__} without {', '.join(missing)}; it needs {', '.join(REQUIRED)}"
        )
    for name, default in OPTIONAL.items():
        if not hasattr(found, name):
            setattr(found, name, default)
    generation: Generation = found
    return generation
