"""PrefixAffinity: a conversation goes to the worker that generated its beginning and still holds the blocks of it.

The server has no tokenizer, so prompts are compared by their bytes. A wrong guess costs a prefill, never an answer.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from typing import Protocol, TypeVar

import msgspec
from msgspec import Raw, Struct

from flambeau.serving.job import Job

FIRST_BYTES = 64  # shorter beginnings are not worth a choice
MAX_BYTES = 1 << 20  # of a prompt that are compared
MAX_BODY_BYTES = 4 << 20  # of a request; a larger one would hold up the event loop
STEP_SHARE = 8  # from one compared beginning to the next: this part of its length, and at least FIRST_BYTES
MAX_BEGINNINGS = 1 << 15
SLACK_SHARE = 4  # a worker may have this part of its places more jobs than another, for what it holds


class Sender(Protocol):
    """The part of a worker that the choice needs."""

    @property
    def places(self) -> int: ...

    @property
    def num_batches(self) -> int: ...


S = TypeVar("S", bound=Sender)


class GenerationPrompt(Struct):
    """The parts of a generation request that its prompt is made of, as they were encoded."""

    adapter: Raw = Raw()
    tools: Raw = Raw()
    prompts: list[str | list[int]] = []
    messages: list[Raw] | None = None


class PredictionPrompt(Struct):
    """The same of a prediction request in JSON."""

    data: Raw = Raw()
    prompt: Raw = Raw()
    body: Raw = Raw()
    messages: list[Raw] | None = None


_decode_generation = msgspec.msgpack.Decoder(GenerationPrompt).decode
_decode_prediction = msgspec.json.Decoder(PredictionPrompt).decode


def prompt_of(job: Job) -> bytes:
    """Bytes of which those of the next turn of a conversation are a continuation; empty if they are not known."""
    if job.kind not in ("generate", "predict") or job.fields is not None:
        return b""
    body = job.body
    if not FIRST_BYTES <= body.size_bytes <= MAX_BODY_BYTES:
        return b""
    content = body.content if body.segment is None else bytes(memoryview(body.segment.memory)[: body.size_bytes])
    try:
        if job.kind == "generate":
            asked = _decode_generation(content)
            turns = asked.messages or map(bytes_of, asked.prompts[:1])
            return b"\n".join([asked.adapter, asked.tools, *turns])
        found = _decode_prediction(content)
        return b"\n".join(found.messages or [found.data or found.prompt or found.body])
    except (
        msgspec.MsgspecError,
        RecursionError,
        UnicodeDecodeError,
        OverflowError,
    ):  # a plain text, or an invalid request
        return content if job.kind == "predict" else b""


def bytes_of(prompt: str | list[int]) -> bytes:
    return prompt.encode("utf-8", "surrogatepass") if isinstance(prompt, str) else array("q", prompt).tobytes()


def beginnings(prompt: bytes) -> Iterator[int]:
    """Hashes of ever longer beginnings of a prompt, at the same lengths for all prompts."""
    hashed, end, most = 0, FIRST_BYTES, min(len(prompt), MAX_BYTES)
    start = 0
    while end <= most:
        hashed = hash((hashed, prompt[start:end]))
        yield hashed
        start, end = end, end + max(FIRST_BYTES, end // STEP_SHARE)


def choose(workers: Sequence[S], matches: Sequence[int]) -> S:
    """The worker with the longest match that has not too many more jobs than the least busy one.

    Beyond that, load wins over affinity. Of equal matches the least busy worker is chosen, then the first.
    """
    least = min(worker.num_batches for worker in workers)
    near = [
        (match, worker)
        for match, worker in zip(matches, workers, strict=True)
        if worker.num_batches <= least + max(1, worker.places // SLACK_SHARE)
    ]
    return max(near, key=lambda one: (one[0], -one[1].num_batches))[1]


class PrefixAffinity:
    """Which worker got which beginnings of prompts, the most recent ones."""

    def __init__(self) -> None:
        self._holders: OrderedDict[int, list[Sender]] = OrderedDict()

    def pick(self, workers: Sequence[S], job: Job) -> S:
        """The worker for a job, of those that could take it; noted as the one that holds its prompt."""
        hashes = [*beginnings(prompt_of(job))]
        if not hashes:
            return choose(workers, [0] * len(workers))
        chosen = choose(workers, [self._match(worker, hashes) for worker in workers])
        self._note(chosen, hashes)
        return chosen

    def _match(self, worker: Sender, hashes: Sequence[int]) -> int:
        """How many of these beginnings the worker holds."""
        for number, one in enumerate(hashes):
            if worker not in self._holders.get(one, ()):
                return number
        return len(hashes)

    def _note(self, worker: Sender, hashes: Sequence[int]) -> None:
        for one in hashes:
            holders = self._holders.setdefault(one, [])
            if worker not in holders:
                holders.append(worker)
            self._holders.move_to_end(one)
        while len(self._holders) > MAX_BEGINNINGS:
            self._holders.popitem(last=False)

    def keep(self, workers: Collection[Sender]) -> None:
        """Forget the workers that are gone."""
        for one, holders in [*self._holders.items()]:
            alive = [worker for worker in holders if worker in workers]
            if alive:
                self._holders[one] = alive
            else:
                del self._holders[one]
