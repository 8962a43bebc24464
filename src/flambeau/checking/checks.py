"""The checks, in the order an author wants to read them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import cycle, islice

from flambeau.checking.calling import Caller, Outcome, first_line, one_line
from flambeau.checking.compare import first_difference
from flambeau.checking.leaks import check_growth
from flambeau.checking.samples import Sample, hostile_samples
from flambeau.checking.verdict import Level, Verdict
from flambeau.worker.stages import size_text

ADVICE = "raise PredictionException(…, 400) to tell the client why"


class CallFailed(Exception):
    """A good request failed where it should only be repeated."""


class Checks:
    """Runs a handler on good and bad requests and judges what it does."""

    def __init__(self, caller: Caller, samples: Sequence[Sample], batch_size: int, max_response_bytes: int) -> None:
        self._caller = caller
        self._samples = samples
        self._batch_size = batch_size
        self._max_bytes = max_response_bytes
        self._expected: dict[str, bytes] = {}  # the answers to samples sent alone
        self._unsteady: set[str] = set()  # samples that are answered differently each time
        self._call_s = 0.0
        self._is_batched_well = True

    def run(self) -> Iterator[Verdict]:
        """Every check; after samples that are not answered there is nothing to compare with."""
        yield from self._alone()
        if len(self._expected) < len(self._samples):
            return
        yield self._size()
        yield self._determinism()
        yield from self._batches()
        yield from self._hostile()
        yield self._growth()

    # ---- good requests ----

    def _alone(self) -> Iterator[Verdict]:
        for sample in self._samples:
            outcome = self._caller.call([sample])
            if outcome.error is None and outcome.status < 400:
                self._expected[sample.name] = outcome.replies[0]
            else:
                yield Verdict("problem", f"sample {sample.name}", outcome.reason)
        if self._expected:
            text = f"{len(self._expected)} of {len(self._samples)} samples are answered"
            yield Verdict("ok" if len(self._expected) == len(self._samples) else "note", "alone", text)

    def _size(self) -> Verdict:
        largest = self._caller.worker.largest_part_bytes
        if largest > self._max_bytes:
            limit = f"more than max_response_size, {size_text(self._max_bytes)}"
            return Verdict(
                "problem", "size", f"the largest answer has {size_text(largest)}, {limit}: stream it in parts"
            )
        return Verdict("ok", "size", f"the largest answer has {size_text(largest)}")

    def _determinism(self) -> Verdict:
        text = ""
        for sample in self._samples:
            outcome = self._caller.call([sample])
            self._call_s = max(self._call_s, outcome.seconds)
            if outcome.error is not None:
                return Verdict("problem", "twice", f"{sample.name} is answered once, and not again: {outcome.reason}")
            if found := first_difference(self._expected[sample.name], outcome.replies[0]):
                self._unsteady.add(sample.name)
                text = text or f"{sample.name} is answered differently the second time: {found}"
        return (
            Verdict("note", "twice", text) if text else Verdict("ok", "twice", "the same request has the same answer")
        )

    def _batches(self) -> Iterator[Verdict]:
        size = self._batch_size
        if size < 2:
            yield Verdict("note", "batch", "not looked at: the batch size is 1")
            return
        batch = [*islice(cycle(self._samples), size)]
        sizes = [[*islice(cycle(self._samples), start, start + count)] for start, count in enumerate(range(1, size))]
        yield self._batch("batch", f"{size} at once", [batch])
        yield self._batch("order", f"{size} at once, in reverse", [batch[::-1]])
        yield self._batch("mixed sizes", f"batches of 1 to {size}", [*sizes, batch, *sizes[::-1]])

    def _batch(self, what: str, how: str, batches: Sequence[Sequence[Sample]]) -> Verdict:
        for batch in batches:
            outcome = self._caller.call(batch)
            if outcome.error is not None:
                return Verdict("problem", what, f"{len(batch)} at once fail: {outcome.reason}")
            for i, (sample, reply) in enumerate(zip(batch, outcome.replies, strict=True)):
                if found := self._difference(sample, reply, f"[{i}]"):
                    self._is_batched_well = False
                    return Verdict("problem", what, f"{sample.name} alone and in a batch of {len(batch)}: {found}")
        if self._unsteady:
            return Verdict("note", what, f"{how} are answered; what changes each time could not be compared")
        return Verdict("ok", what, f"{how} are answered as one by one")

    def _difference(self, sample: Sample, reply: bytes, path: str = "") -> str | None:
        if sample.name in self._unsteady:
            return None
        return first_difference(self._expected[sample.name], reply, path)

    # ---- bad requests ----

    def _hostile(self) -> Iterator[Verdict]:
        steady = [sample for sample in self._samples if sample.name not in self._unsteady] or [*self._samples]
        good, other = steady[0], steady[-1]
        for bad in hostile_samples(good):
            outcome = self._caller.call([bad])
            level, text = judge_hostile(outcome)
            if not outcome.is_deadly and (harm := self._harm(bad, good, other)):
                level, text = "problem", harm
            yield Verdict(level, bad.name, text)

    def _harm(self, bad: Sample, good: Sample, other: Sample) -> str | None:
        """What a bad request does to the good ones after it and beside it."""
        if found := self._harm_to(good, self._caller.call([good])):
            return f"after it, {found}"
        if self._batch_size < 2:
            return None
        batch = [good, bad, other][: self._batch_size]
        outcomes = self._caller.call_each(batch)
        if len(outcomes) < len(batch):
            return f"in a batch, {outcomes[0].reason}"
        for sample, outcome in zip(batch, outcomes, strict=True):
            if sample is not bad and (found := self._harm_to(sample, outcome, is_batched=True)):
                return f"beside it in a batch, {found}"
        return None

    def _harm_to(self, good: Sample, outcome: Outcome, *, is_batched: bool = False) -> str | None:
        if outcome.error is not None or outcome.status >= 400:
            return f"{good.name} fails: {outcome.reason}"
        if is_batched and not self._is_batched_well:
            return None  # that is not the bad request's doing
        found = self._difference(good, outcome.replies[0])
        return f"{good.name} is answered differently: {found}" if found else None

    # ---- many requests ----

    def _growth(self) -> Verdict:
        turns = cycle([[sample] for sample in self._samples])

        def call() -> None:
            if (outcome := self._caller.call(next(turns))).error is not None:
                raise CallFailed(outcome.reason)

        try:
            return check_growth(call, self._call_s)
        except CallFailed as error:
            return Verdict("problem", "memory", f"a sample that was answered before fails after many calls: {error}")


def judge_hostile(outcome: Outcome) -> tuple[Level, str]:
    """Whether a bad request was dealt with: an answer, a clean refusal, an accident, or the worker's end."""
    if outcome.is_deadly:
        return "problem", outcome.reason
    if outcome.error is None:
        return ("ok", "answered") if outcome.status < 500 else ("note", f"{outcome.reason}; {ADVICE}")
    if 400 <= outcome.status < 500:
        reason = str(getattr(outcome.error, "message", outcome.error))  # a PredictionException's text has the code, too
        return "ok", f"refused with {outcome.status}: {one_line(reason)}"
    return "note", f"answers {outcome.status} ({first_line(outcome.error)}); {ADVICE}"
