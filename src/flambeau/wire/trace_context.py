"""The `traceparent` header of W3C Trace Context: which trace a request belongs to, and whether it is recorded."""

from __future__ import annotations

import re
from typing import NamedTuple

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
# version, trace id, span id, flags; later versions may append fields. Ids of zeros are invalid.
_HEADER = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1


class TraceParent(NamedTuple):
    """The span that a request comes from."""

    trace_id: str
    span_id: str
    is_sampled: bool

    def __str__(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-0{int(self.is_sampled)}"


def read_traceparent(value: str | None) -> TraceParent | None:
    """The header's content; None if it is missing or invalid, which W3C says to ignore."""
    found = _HEADER.fullmatch(value.strip()) if value else None
    if found is None or (found[4] and found[0].startswith("00")):
        return None
    return TraceParent(found[1], found[2], bool(int(found[3], 16) & _SAMPLED))
