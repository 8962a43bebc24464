from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from flambeau.wire.messages import Request
from flambeau.worker import request_scope
from flambeau.worker.request_scope import log_fields, scoped, scoped_async

TRACE = "0af7651916cd43dd8448eb211c80319c"
SAMPLED, UNSAMPLED = (("traceparent", f"00-{TRACE}-b7ad6b7169203331-{flags}") for flags in ("01", "00"))
ENTER = request_scope._requests.set


def context(*headers):
    return SimpleNamespace(requests=[Request(i, f"r{i}", [one], b"") for i, one in enumerate(headers)])


def fields(data, context):
    return log_fields()


def test_a_call_has_the_ids_of_its_requests_and_the_next_code_has_none():
    handle = scoped(fields, ENTER, only_traced=False)
    assert handle([], context(("x", "y"), SAMPLED)) == {"request_id": "r0,r1", "trace_id": TRACE}
    assert handle([], context(UNSAMPLED)) == {"request_id": "r0", "trace_id": TRACE}
    assert handle([], context(("x", "y"))) == {"request_id": "r0"}
    assert log_fields() == {}


@pytest.mark.parametrize(("header", "found"), [(SAMPLED, ["r0"]), (UNSAMPLED, []), (("x", "y"), [])])
def test_only_traced_requests_have_a_scope_without_json_logs(header, found):
    handle = scoped(fields, ENTER, only_traced=True)
    assert [value for name, value in handle([], context(header)).items() if name == "request_id"] == found


def stream(data, context):
    for _ in range(2):
        yield log_fields()["request_id"]


def test_generators_run_in_the_scope_of_their_call():
    handle = scoped(stream, ENTER, only_traced=False)
    first, second = handle([], context(("x", "y"))), handle([], context(("x", "y"), ("x", "y")))
    assert [next(first), next(second), *first, *second] == ["r0", "r0,r1", "r0", "r0,r1"]
    listed = scoped(lambda data, context: [stream(data, context), "plain"], ENTER, only_traced=False)
    found, plain = listed([], context(("x", "y")))
    assert ([*found], plain) == (["r0", "r0"], "plain")


def test_closing_a_generator_closes_the_handlers():
    closed = []

    def open_ended(data, context):
        try:
            while True:
                yield 1
        finally:
            closed.append(log_fields()["request_id"])

    chunks = scoped(open_ended, ENTER, only_traced=False)([], context(("x", "y")))
    assert next(chunks) == 1
    chunks.close()
    assert closed == ["r0"]


async def test_tasks_do_not_share_a_scope():
    async def later(data, context):
        await asyncio.sleep(0)
        return log_fields()["request_id"]

    handle = scoped_async(later, ENTER, only_traced=False)

    async def call(*headers):
        return await handle([], context(*headers))

    both = asyncio.gather(asyncio.create_task(call(SAMPLED)), asyncio.create_task(call(SAMPLED, SAMPLED)))
    assert await both == ["r0", "r0,r1"]
    assert log_fields() == {}
