"""The checks of `flambeau check`, in the order an author reads them."""

from __future__ import annotations

import io
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import Any, Literal

from flambeau.handler_checks.guarded_call import (
    CallOutcome,
    GuardedCaller,
    Sample,
    malformed_samples,
)
from flambeau.handler_checks.memory_growth import GrowthReport, measure_growth
from flambeau.worker.code_places import first_line, shorten
from flambeau.worker.handler_mistakes import explain_split
from flambeau.worker.stage_timings import size_text

ADVICE = "raise PredictionException(…, 400) to tell the client why"

Level = Literal["ok", "note", "problem"]
# Floating-point results may change by this much with the batch size.
RELATIVE_TOLERANCE, ABSOLUTE_TOLERANCE = 1e-4, 1e-5
MAX_SHOWN = 40


@dataclass(frozen=True, slots=True)
class Verdict:
    """The finding of one check."""

    level: Level
    what: str
    text: str


class CallFailed(Exception):
    """A sample that was answered before failed when it was repeated."""


class HandlerChecks:
    """Runs a handler on good and malformed requests and yields a verdict for each check."""

    def __init__(
        self, caller: GuardedCaller, samples: Sequence[Sample], batch_size: int, max_response_bytes: int
    ) -> None:
        self._caller = caller
        self._samples = samples
        self._batch_size = batch_size
        self._max_bytes = max_response_bytes
        self._expected: dict[str, bytes] = {}  # replies to samples that were sent alone
        self._unsteady: set[str] = set()  # samples whose reply changes from call to call
        self._call_s = 0.0
        self._is_batched_well = True

    def run(self) -> Iterator[Verdict]:
        """Run every check; stop after the first if a sample has no reply to compare with."""
        yield from self._alone()
        if len(self._expected) < len(self._samples):
            return
        yield self._size()
        yield self._determinism()
        yield from self._batches()
        yield from self._malformed()
        yield self._memory()

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
                return Verdict("problem", "twice", f"{sample.name} fails when it is sent again: {outcome.reason}")
            if found := first_difference(self._expected[sample.name], outcome.replies[0]):
                self._unsteady.add(sample.name)
                text = text or f"{sample.name} is answered differently the second time: {found}"
        return Verdict("note", "twice", text) if text else Verdict("ok", "twice", "equal requests get equal answers")

    def _batches(self) -> Iterator[Verdict]:
        size = self._batch_size
        if size < 2:
            yield Verdict("note", "batch", "not checked: the batch size is 1")
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
                # Alone the samples have succeeded.
                text = explain_split(outcome.error, len(batch), outcome.reason, has_succeeded=True)
                return Verdict("problem", what, text)
            for i, (sample, reply) in enumerate(zip(batch, outcome.replies, strict=True)):
                if found := self._difference(sample, reply, f"[{i}]"):
                    self._is_batched_well = False
                    return Verdict("problem", what, f"{sample.name} alone and in a batch of {len(batch)}: {found}")
        if self._unsteady:
            return Verdict("note", what, f"{how} are answered; answers that change each time were not compared")
        return Verdict("ok", what, f"{how} get the same answers as one by one")

    def _difference(self, sample: Sample, reply: bytes, path: str = "") -> str | None:
        if sample.name in self._unsteady:
            return None
        return first_difference(self._expected[sample.name], reply, path)

    # ---- malformed requests ----

    def _malformed(self) -> Iterator[Verdict]:
        steady = [sample for sample in self._samples if sample.name not in self._unsteady] or [*self._samples]
        good, other = steady[0], steady[-1]
        for bad in malformed_samples(good):
            outcome = self._caller.call([bad])
            level, text = rate_malformed(outcome)
            if not outcome.ends_worker and (harm := self._harm(bad, good, other)):
                level, text = "problem", harm
            yield Verdict(level, bad.name, text)

    def _harm(self, bad: Sample, good: Sample, other: Sample) -> str | None:
        """How a malformed request affects the good ones after it and in its batch."""
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

    def _harm_to(self, good: Sample, outcome: CallOutcome, *, is_batched: bool = False) -> str | None:
        if outcome.error is not None or outcome.status >= 400:
            return f"{good.name} fails: {outcome.reason}"
        if is_batched and not self._is_batched_well:
            return None  # batching itself changes the reply, not the malformed request
        found = self._difference(good, outcome.replies[0])
        return f"{good.name} is answered differently: {found}" if found else None

    # ---- many requests ----

    def _memory(self) -> Verdict:
        turns = cycle([[sample] for sample in self._samples])

        def call() -> None:
            if (outcome := self._caller.call(next(turns))).error is not None:
                raise CallFailed(outcome.reason)

        try:
            report = measure_growth(call, self._call_s)
        except CallFailed as error:
            return Verdict("problem", "memory", f"a sample that was answered before fails after many calls: {error}")
        if report is None:
            return Verdict("note", "memory", f"growth was not checked: one call takes {self._call_s:.1f} s")
        return rate_growth(report)


def rate_malformed(outcome: CallOutcome) -> tuple[Level, str]:
    if outcome.ends_worker:
        return "problem", outcome.reason
    if outcome.error is None:
        return ("ok", "answered") if outcome.status < 500 else ("note", f"{outcome.reason}; {ADVICE}")
    if 400 <= outcome.status < 500:
        # str() of a PredictionException holds the code too; its `message` does not.
        reason = str(getattr(outcome.error, "message", outcome.error))
        return "ok", f"rejected with {outcome.status}: {shorten(reason)}"
    return "note", f"answers {outcome.status} ({first_line(outcome.error)}); {ADVICE}"


def rate_growth(report: GrowthReport) -> Verdict:
    growth, calls = report.growth, f"over {report.num_calls} calls"
    if growth.is_leak:
        found = []
        if growth.resident_bytes:
            found.append(f"{size_text(round(growth.resident_bytes))} of memory")
        if number := max(growth.objects, growth.blocks):
            types = ", ".join(report.grown_types)
            found.append(f"{number:.1f} objects" + (f" (mostly {types})" if growth.objects and types else ""))
        return Verdict("problem", "memory", f"each call keeps {' and '.join(found)}, {calls}")
    if not report.knows_resident_bytes:
        return Verdict(
            "note", "memory", f"no Python object is kept {calls}; this system does not report resident memory"
        )
    return Verdict("ok", "memory", f"does not grow {calls}")


def first_difference(expected: bytes, actual: bytes, path: str = "") -> str | None:
    """Where two replies differ, as `[2].scores.cat: 0.41 vs 0.73`; None if they are equal."""
    if expected == actual:
        return None
    return difference(decode(expected), decode(actual), path)


def decode(reply: bytes) -> Any:
    """A reply as a value: JSON, a saved tensor, text, or the bytes themselves."""
    try:
        return json.loads(reply)
    except (ValueError, RecursionError):
        pass
    torch = sys.modules.get("torch")
    if torch is not None and reply.startswith(b"PK"):
        try:  # torch saves a view with its whole storage, so equal tensors may have different bytes
            return torch.load(io.BytesIO(reply), weights_only=True).tolist()
        except Exception:  # a zip file that is no tensor
            return reply
    try:
        return reply.decode()
    except UnicodeDecodeError:
        return reply


def difference(one: Any, other: Any, path: str) -> str | None:
    """The first difference between two values, depth first."""
    if is_number(one) and is_number(other):
        return None if is_close(one, other) else f"{path or 'it'}: {one} vs {other}"
    if isinstance(one, dict) and isinstance(other, dict):
        return mapping_difference(one, other, path)
    if isinstance(one, list) and isinstance(other, list):
        pairs = enumerate(zip(one, other, strict=False))
        found = (difference(a, b, f"{path}[{i}]") for i, (a, b) in pairs)
        inner = next((text for text in found if text), None)
        return inner or (None if len(one) == len(other) else f"{path or 'it'}: {len(one)} items vs {len(other)}")
    if type(one) is type(other) and one == other:
        return None
    return f"{path or 'it'}: {shown(one)} vs {shown(other)}"


def mapping_difference(one: dict[str, Any], other: dict[str, Any], path: str) -> str | None:
    for key in [*one, *(key for key in other if key not in one)]:
        inner = f"{path}.{key}"
        if key not in other or key not in one:
            left, right = ("present", "missing") if key in one else ("missing", "present")
            return f"{inner}: {left} vs {right}"
        if found := difference(one[key], other[key], inner):
            return found
    return None


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_close(one: float, other: float) -> bool:
    """Equal within the tolerance; NaN equals NaN."""
    if math.isnan(one) or math.isnan(other):
        return math.isnan(one) and math.isnan(other)
    return one == other or math.isclose(one, other, rel_tol=RELATIVE_TOLERANCE, abs_tol=ABSOLUTE_TOLERANCE)


def shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"
