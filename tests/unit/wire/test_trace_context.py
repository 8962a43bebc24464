from __future__ import annotations

import pytest

from flambeau.wire.trace_context import TraceParent, read_traceparent

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.mark.parametrize("flags", ["01", "03", "ff"])
def test_sampled_parent(flags):
    found = read_traceparent(f" 00-{TRACE}-{SPAN}-{flags} ")
    assert found == TraceParent(TRACE, SPAN, is_sampled=True)
    assert str(found) == f"00-{TRACE}-{SPAN}-01"


def test_parent_that_is_not_sampled():
    assert read_traceparent(f"00-{TRACE}-{SPAN}-00") == (TRACE, SPAN, False)


def test_later_versions_may_have_more_fields():
    assert read_traceparent(f"01-{TRACE}-{SPAN}-01-more") == (TRACE, SPAN, True)


@pytest.mark.parametrize(
    "value",
    [
        None,
        "",
        "x",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-01-more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}-01\n00",
    ],
)
def test_invalid_headers_are_ignored(value):
    assert read_traceparent(value) is None
