"""Requests with an Idempotency-Key: what runs once, what waits, and what is sent again."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from flambeau.config.server import ErrorStyle
from flambeau.errors import DeadlinePassed, InvalidInput, JobFailed, QueueFull, WorkerDied
from flambeau.frontend.http import idempotency
from flambeau.frontend.http.errors import respond_error
from flambeau.frontend.http.idempotency import MAX_KEY, SLICE_BYTES, IdempotentExchange, IdempotentReplies
from flambeau.frontend.http.router import ANYTHING, Router, unknown_path
from flambeau.serving.job import RequestBody
from support.http_exchanges import FakeConnection

FULL = QueueFull("full", retry_after_s=3)
FORM = "multipart/form-data; boundary="


class Endpoint:
    """Notes its exchanges; a key is checked if there are keys."""

    def __init__(self):
        self.exchanges, self.tenants = [], {}

    def __call__(self, exchange, segments):
        exchange.take_body().release()
        exchange.on_gone = lambda: self.exchanges.remove(exchange)
        self.exchanges.append(exchange)

    def check(self, exchange, segments):
        exchange.tenant = self.tenants.get(exchange.header("authorization"))


class Served:
    """A router with one endpoint, and the requests to it."""

    def __init__(self, max_bytes=100_000):
        self.now, self.endpoint = 0.0, Endpoint()
        self.replies = IdempotentReplies(max_bytes, 600, lambda: self.now)
        routes = {"predictions": self.endpoint, "metrics": self.endpoint, ANYTHING: unknown_path}
        self.router = Router(routes, style=ErrorStyle(), repeats=self.replies)

    def ask(self, key="k", *, body=b"x", target="/predictions/m", method="POST", headers=(), timeout=None):
        connection = FakeConnection()
        arrived = asyncio.get_running_loop().time()
        exchange = IdempotentExchange(connection, method, target, [*headers], "1.1", arrived, key)
        exchange.body, exchange.timeout = RequestBody(body), timeout
        self.router.handle(exchange)
        return SimpleNamespace(exchange=exchange, connection=connection)

    @property
    def running(self):
        return [exchange for exchange in self.endpoint.exchanges if not exchange.is_started]

    def answer(self, body=b"y", status=200, **options):
        [exchange] = self.running
        exchange.respond(status, body, **options)

    def fail(self, error):
        [exchange] = self.running
        respond_error(exchange, error, ErrorStyle())


def seen(request):
    return request.connection.status, request.connection.body


def is_replayed(request):
    return b"\r\nIdempotency-Replayed: true\r\n" in request.connection.sent


@pytest.fixture
def served():
    return Served()


async def test_a_finished_reply_is_sent_again_with_a_header_that_says_so(served):
    first = served.ask()
    served.answer(b"made", 201, headers=[("content-type", "text/x")], phrase="Made")
    again = served.ask()
    assert seen(first) == seen(again) == (201, b"made")
    assert again.connection.sent.startswith(b"HTTP/1.1 201 Made\r\n")
    assert b"content-type: text/x\r\n" in again.connection.sent
    assert (is_replayed(first), is_replayed(again)) == (False, True)
    assert len(served.endpoint.exchanges) == 1


async def test_the_same_request_waits_while_the_first_runs(served):
    requests = [served.ask() for _ in range(5)]
    assert len(served.running) == 1
    served.answer()
    await asyncio.sleep(0)
    assert [seen(request) for request in requests] == [(200, b"y")] * 5
    assert [is_replayed(request) for request in requests] == [False, True, True, True, True]


@pytest.mark.parametrize("is_answered", [False, True])
@pytest.mark.parametrize("other", [{"body": b"z"}, {"target": "/predictions/n"}, {"target": "/predictions/m?a=1"}])
async def test_the_same_key_with_another_request_is_422(served, is_answered, other):
    served.ask()
    if is_answered:
        served.answer()
    refused = served.ask(**other)
    assert refused.connection.status == 422
    assert b"'k'" in refused.connection.body


@pytest.mark.parametrize("key", ["", "k" * (MAX_KEY + 1)])
async def test_a_key_of_invalid_length_is_400(served, key):
    assert served.ask(key).connection.status == 400
    assert not served.endpoint.exchanges


async def test_a_key_of_the_greatest_length_is_taken(served):
    served.ask("k" * MAX_KEY)
    assert len(served.running) == 1


@pytest.mark.parametrize("other", [{"method": "PUT"}, {"target": "/metrics"}])
async def test_other_methods_and_paths_have_no_use_for_the_header(served, other):
    for _ in range(2):
        served.ask("", **other)
    assert len(served.running) == 2


async def test_without_a_cache_the_header_has_no_effect(served):
    served.router = Router(served.router.routes, style=ErrorStyle())
    for _ in range(2):
        served.ask("")
    assert len(served.running) == 2


async def test_each_caller_has_keys_of_its_own(served):
    served.endpoint.tenants = {name: SimpleNamespace(name=name, rates=lambda now: ()) for name in ("ann", "bob")}
    ann = served.ask(headers=[("authorization", "ann")])
    served.answer(b"ann's")
    bob = served.ask(headers=[("authorization", "bob")])
    assert len(served.running) == 1
    served.answer(b"bob's")
    assert (seen(ann)[1], seen(bob)[1]) == (b"ann's", b"bob's")


@pytest.mark.parametrize("error", [JobFailed("failed"), InvalidInput("bad", status=400)])
async def test_errors_of_the_handler_are_sent_again(served, error):
    first = served.ask()
    served.fail(error)
    again = served.ask()
    assert seen(first) == seen(again)
    assert is_replayed(again)


async def test_a_status_that_the_handler_has_set_is_sent_again(served):
    served.ask()
    served.running[0].job = SimpleNamespace(started=True, times=None)
    served.answer(b"later", 503)
    assert seen(served.ask()) == (503, b"later")


@pytest.mark.parametrize("error", [FULL, WorkerDied(cause="killed")])
async def test_what_no_handler_answered_goes_to_those_that_wait_and_is_not_kept(served, error):
    requests = [served.ask() for _ in range(3)]
    served.fail(error)
    await asyncio.sleep(0)
    assert len({seen(request) for request in requests}) == 1
    assert not any(is_replayed(request) for request in requests)
    served.ask()
    assert len(served.running) == 1


async def test_after_a_time_out_one_of_those_that_wait_runs(served):
    first, *others = [served.ask() for _ in range(3)]
    served.fail(DeadlinePassed("late"))
    await asyncio.sleep(0)
    assert first.connection.status == 408
    assert served.running == [others[0].exchange]
    served.answer()
    await asyncio.sleep(0)
    assert [seen(request) for request in others] == [(200, b"y")] * 2


async def test_one_that_waits_has_its_own_time_limit(served):
    first = served.ask()
    hasty = served.ask(timeout="0.01")
    while not hasty.connection.events:
        await asyncio.sleep(0.005)
    assert hasty.connection.status == 408
    served.answer()
    await asyncio.sleep(0)
    assert (seen(first), hasty.connection.events.count("finished")) == ((200, b"y"), 1)
    assert served.ask(timeout="soon").connection.status == 200  # it does not wait


async def test_work_goes_on_for_others_after_its_client_has_disconnected(served):
    first, other = served.ask(), served.ask()
    first.exchange.drop()
    assert len(served.running) == 1
    served.answer()
    await asyncio.sleep(0)
    assert seen(other) == (200, b"y")
    assert is_replayed(served.ask())


async def test_work_is_cancelled_once_nobody_waits(served):
    first, other = served.ask(), served.ask()
    first.exchange.drop()
    other.exchange.drop()
    assert not served.running
    served.ask().exchange.drop()
    assert not served.running
    served.ask()
    assert len(served.running) == 1


async def test_work_that_has_ended_is_not_cancelled_by_the_last_one_that_disconnects(served):
    first, other = served.ask(), served.ask()
    ends = []
    first.exchange.trace = SimpleNamespace(traceparent="", end=lambda attributes, error: ends.append(error))
    first.exchange.drop()
    served.answer()
    other.exchange.drop()
    await asyncio.sleep(0)
    assert (ends, other.connection.events) == ([""], [])
    assert is_replayed(served.ask())


async def test_one_that_waits_and_disconnects_changes_nothing(served):
    first, other = served.ask(), served.ask()
    other.exchange.drop()
    served.answer()
    await asyncio.sleep(0)
    assert (seen(first), other.connection.events) == ((200, b"y"), [])


async def test_a_stream_is_not_repeated_while_or_after_it_runs(served):
    first, waiting = served.ask(), served.ask()
    [exchange] = served.running
    exchange.start(200)
    during = served.ask()
    exchange.send([b"a"], ends=True)
    after = served.ask()
    assert [request.connection.status for request in (first, waiting, during, after)] == [200, 409, 409, 409]
    assert b"stream" in after.connection.body
    assert served.ask(body=b"z").connection.status == 422


@pytest.mark.parametrize("end", ["abort", "error", "disconnect"])
async def test_a_stream_that_has_not_ended_well_may_run_again(served, end):
    exchange = served.ask().exchange
    exchange.start(200)
    if end == "abort":
        exchange.abort()
    elif end == "disconnect":
        exchange.drop()
    else:
        exchange.note_error(WorkerDied(cause="killed"))
        exchange.send([b"error"], ends=True)
    served.ask()
    assert len(served.running) == 1


async def test_a_client_that_comes_back_before_its_stream_has_begun_gets_the_stream(served):
    first, again = served.ask(), served.ask()
    [exchange] = served.running
    first.exchange.drop()
    exchange.start(200)
    await asyncio.sleep(0)
    assert exchange not in served.endpoint.exchanges
    assert served.running == [again.exchange]


async def test_replies_are_kept_for_a_time_and_up_to_a_size(served):
    served = Served(max_bytes=3000)
    for key in ("a", "b", "c"):
        served.ask(key)
        served.answer(bytes(600))
    assert is_replayed(served.ask("b"))
    served.ask("a")
    assert len(served.running) == 1
    served.now = 600.0
    served.ask("b")
    assert len(served.running) == 2


async def test_a_large_body_is_compared_too(served):
    large = bytes(3 * SLICE_BYTES)
    first, again, other = (served.ask(body=body) for body in (large, large, large[:-1] + b"x"))
    while not other.connection.events:
        await asyncio.sleep(0)
    served.answer()
    await asyncio.sleep(0)
    assert [request.connection.status for request in (first, again, other)] == [200, 200, 422]


async def test_a_form_is_the_same_with_another_boundary(served):
    for boundary in ("one", '"two"'):
        mark = boundary.strip('"')
        body = f"--{mark}\r\ncontent-disposition: form-data; name=a\r\n\r\n1\r\n--{mark}--\r\n".encode()
        request = served.ask(body=body, headers=[("content-type", FORM + boundary)])
        if boundary == "one":
            served.answer()
    assert is_replayed(request)


async def test_only_so_many_wait_for_one(served, monkeypatch):
    monkeypatch.setattr(idempotency, "MAX_WAITING", 2)
    requests = [served.ask() for _ in range(4)]
    assert requests[3].connection.status == 409
    served.answer()
    await asyncio.sleep(0)
    assert [request.connection.status for request in requests[:3]] == [200, 200, 200]


async def test_an_endpoint_that_fails_at_once_leaves_nothing_behind(served):
    def fail(exchange, segments):
        raise ZeroDivisionError

    served.router.routes = {"predictions": fail}
    assert [served.ask().connection.status for _ in range(2)] == [500, 500]
