"""Replies that are kept, and requests that wait for the reply of the same one."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from flambeau.config.model import ModelConfig
from flambeau.errors import DeadlinePassed, WorkerDied
from flambeau.serving.dispatcher_factory import contradictions
from flambeau.serving.job import RequestBody
from flambeau.serving.response_cache import MAX_BODY, OVERHEAD, ResponseCache, cache_directives, response_cache
from flambeau.wire.messages import Part
from support.jobs import BrokenListener, Listener, new_job


class Cached:
    """A cache, and a model that computes what it does not answer."""

    def __init__(self, max_bytes: int = 10_000, headers: tuple[str, ...] | None = None) -> None:
        self.now, self.computed = 0.0, []
        self.cache = ResponseCache(max_bytes, 60, headers, compute=self.computed.append, now=lambda: self.now)

    def ask(self, body: bytes = b"x", *, receiver=None, **options):
        job = new_job(receiver, body=RequestBody(body), **options)
        if (entry := self.cache.find(job)) is not None:
            self.cache.answer(job, entry)
        elif not self.cache.join(job):
            self.computed.append(job)
        return job

    async def keep(self, body: bytes = b"x", reply: bytes = b"y", **options):
        job = self.ask(body, **options)
        assert self.computed.pop() is job
        await self.reply(job, reply)
        return job

    async def reply(self, job, body: bytes = b"y", *, status: int = 200, headers=None):
        job.deliver([Part(job.id, body, status=status, headers=headers)])
        await asyncio.sleep(0)

    def results(self):
        return {name: number for name, number in self.cache.counts.items() if number}


def reply_of(job):
    [part] = job.receiver.parts
    return part.body, dict(part.headers or ()).get("x-flambeau-cache")


async def test_the_same_request_has_the_kept_reply_until_it_is_too_old():
    cached = Cached()
    first = await cached.keep()
    assert [part.body for part in first.receiver._receiver.parts] == [b"y"]
    cached.now = 59.0
    again = cached.ask()
    assert reply_of(again) == (b"y", "hit")
    assert dict(again.receiver.parts[0].headers)["age"] == "59"
    assert again.is_over
    cached.now = 60.0
    assert not cached.ask().is_over
    assert cached.results() == {"hit": 1, "miss": 2}


@pytest.mark.parametrize(
    "other",
    [
        {"body": b"z"},
        {"kind": "explain"},
        {"headers": [("accept", "text/plain")]},
        {"url_path": "more"},
        {"query": "a=1"},
        {"envelope": "body"},
        {"fields": [("a", 1)]},
        {"tenant": SimpleNamespace(name="other", release=lambda *_, **__: None)},
    ],
    ids=lambda other: next(iter(other)),
)
async def test_requests_differ_in_all_that_a_handler_sees(other):
    cached = Cached()
    await cached.keep()
    job = new_job(body=RequestBody(other.pop("body", b"x")), kind=other.pop("kind", "predict"))
    for name, value in other.items():
        setattr(job, name, value)
    assert cached.cache.find(job) is None
    assert cached.cache.find(new_job(body=RequestBody(b"x"))) is not None


async def test_headers_of_the_transport_do_not_count_nor_do_those_that_are_not_named():
    cached = Cached()
    await cached.keep(headers=[("X-Request-Id", "1"), ("Host", "a"), ("Accept", "b")])
    assert cached.ask(headers=[("host", "b"), ("traceparent", "00"), ("accept", "b")]).is_over
    named = Cached(headers=("accept",))
    await named.keep(headers=[("Accept", "b"), ("x-time", "1")])
    assert named.ask(headers=[("accept", "b"), ("x-time", "2")]).is_over
    assert not named.ask(headers=[("accept", "c"), ("x-time", "2")]).is_over


async def test_requests_that_arrive_together_are_computed_once():
    cached = Cached()
    first, second, third = (cached.ask() for _ in range(3))
    assert (cached.computed, cached.cache.num_joined) == ([first], 2)
    third.cancel()
    assert cached.cache.num_joined == 1
    await cached.reply(first)
    assert reply_of(second) == (b"y", "joined")
    assert (third.receiver.parts, cached.cache.num_joined) == ([], 0)
    assert cached.results() == {"joined": 2, "miss": 1}


@pytest.mark.parametrize("end", ["fail", "stream", "status", "no-store", "cookie", "vary", "abandon"])
async def test_those_that_wait_are_computed_if_the_reply_cannot_be_kept(end):
    cached = Cached()
    first, *others = (cached.ask() for _ in range(3))
    cached.computed.clear()
    if end == "fail":
        first.fail(WorkerDied(cause=""))
    elif end == "stream":
        first.deliver([Part(first.id, b"y", last=False)])
        first.deliver([Part(first.id, b"y")])
    elif end == "abandon":  # another version takes it
        first.computation.abandon()
        first.deliver([Part(first.id, b"y")])
    else:
        headers = {
            "no-store": [("Cache-Control", "no-store")],
            "cookie": [("set-cookie", "a=b")],
            "vary": [("vary", "*")],
        }.get(end)
        first.deliver([Part(first.id, b"y", status=201 if end == "status" else 200, headers=headers)])
    await asyncio.sleep(0)
    assert cached.computed == others
    assert not any(job.is_over for job in others)
    assert (cached.cache.size_bytes, cached.cache.num_joined) == (0, 0)
    assert cached.cache.find(new_job(body=RequestBody(b"x"))) is None


async def test_if_the_client_of_a_request_goes_only_one_of_those_that_wait_is_computed():
    cached = Cached()
    first, second, third, last = (cached.ask() for _ in range(4))
    first.cancel()
    await asyncio.sleep(0)
    assert (cached.computed, cached.cache.num_joined) == ([first, second], 2)
    third.cancel()
    assert cached.cache.num_joined == 1
    await cached.reply(second)
    assert reply_of(last) == (b"y", "joined")
    assert (third.receiver.parts, cached.cache.num_joined) == ([], 0)
    assert reply_of(cached.ask()) == (b"y", "hit")


async def test_one_that_expires_is_no_reason_to_compute_one_after_the_other():
    cached = Cached()
    first, *others = (cached.ask() for _ in range(3))
    first.expire(DeadlinePassed(""))
    await asyncio.sleep(0)
    assert cached.computed == [first, *others]


async def test_a_newer_reply_is_not_replaced_by_one_that_was_begun_before():
    cached = Cached()
    old, joined = cached.ask(), cached.ask()
    new = cached.ask(headers=[("cache-control", "no-cache")])
    later = cached.ask()
    assert cached.computed == [old, new]
    await cached.reply(new, b"new")
    assert reply_of(later) == (b"new", "joined")
    await cached.reply(old, b"old")
    assert reply_of(joined) == (b"old", "joined")
    assert reply_of(cached.ask()) == (b"new", "hit")
    assert cached.results() == {"hit": 1, "joined": 2, "miss": 2}


async def test_those_that_waited_for_one_whose_client_goes_wait_for_a_newer_one():
    cached = Cached()
    old, waiting = cached.ask(), cached.ask()
    new = cached.ask(headers=[("cache-control", "no-cache")])
    old.cancel()
    await asyncio.sleep(0)
    assert (cached.computed, cached.cache.num_joined) == ([old, new], 1)
    await cached.reply(new, b"new")
    assert reply_of(waiting) == (b"new", "joined")


@pytest.mark.parametrize(
    ("named", "headers", "is_kept"),
    [
        (None, [("Vary", "Accept, X-Language")], True),
        (None, [("vary", "Accept,User-Agent")], False),
        (None, [("vary", "accept"), ("vary", "accept-encoding")], False),
        (None, [("Content-Encoding", "gzip")], False),
        (("accept-encoding",), [("content-encoding", "gzip"), ("vary", "Accept-Encoding")], True),
        (("accept-encoding",), [("vary", "accept")], False),
    ],
)
async def test_a_reply_that_depends_on_headers_that_do_not_count_is_not_kept(named, headers, is_kept):
    cached = Cached(headers=named)
    first, joined = cached.ask(), cached.ask()
    await cached.reply(first, headers=headers)
    assert (joined.is_over, cached.ask().is_over) == (is_kept, is_kept)


async def test_a_receiver_that_fails_does_not_disturb_the_others():
    cached = Cached()
    first, broken, last = cached.ask(), cached.ask(receiver=BrokenListener()), cached.ask()
    await cached.reply(first)
    assert reply_of(last) == (b"y", "joined")
    assert "could not be delivered" in str(broken.receiver.errors[0])


async def test_one_that_cannot_be_computed_does_not_keep_the_others_waiting():
    cached = Cached()

    def fail_once(job):
        cached.computed.append(job)
        if len(cached.computed) == 2:
            raise RuntimeError("no worker takes it")

    cached.cache._compute = fail_once
    first, broken, last = (cached.ask() for _ in range(3))
    first.cancel()
    for _ in range(2):
        await asyncio.sleep(0)
    assert cached.computed == [first, broken, last]
    assert "could not be delivered" in str(broken.receiver._receiver.errors[0])
    assert (broken.is_over, last.is_over, cached.cache.num_joined) == (True, False, 0)


async def test_the_reply_that_was_not_used_for_longest_leaves_first():
    cached = Cached(max_bytes=2 * (OVERHEAD + 10))
    for body in (b"a", b"b"):
        await cached.keep(body, b"0123456789")
    assert cached.ask(b"a").is_over
    await cached.keep(b"c", b"0123456789")
    assert cached.cache.size_bytes == 2 * (OVERHEAD + 10)
    assert [cached.ask(body).is_over for body in (b"a", b"c", b"b")] == [True, True, False]
    await cached.keep(b"large", b"0" * 3 * OVERHEAD)
    assert not cached.ask(b"large").is_over


async def test_directives_of_the_client_and_of_the_handler():
    cached = Cached()
    first = await cached.keep(headers=[("cache-control", "no-store")])
    assert first.computation is None
    assert not cached.ask(headers=[("cache-control", "no-store")]).is_over
    await cached.keep()
    fresh = cached.ask(headers=[("cache-control", "no-cache")])
    assert not fresh.is_over
    await cached.reply(fresh, b"newer", headers=[("cache-control", "max-age=5")])
    assert reply_of(cached.ask()) == (b"newer", "hit")
    cached.now = 5.0
    assert not cached.ask().is_over
    assert cache_directives([("Cache-Control", 'Max-Age="3", private')]) == {"max-age": "3", "private": ""}


async def test_large_requests_and_replies_copies_and_other_kinds_are_not_kept():
    cached = Cached(max_bytes=10 * MAX_BODY)
    for options in ({"body": b"0" * (MAX_BODY + 1)}, {"kind": "generate"}, {"kind": "describe"}):
        first = cached.ask(**options)
        await cached.reply(first)
        assert first.computation is None
        assert not cached.ask(**options).is_over
    await cached.keep(b"x", b"0" * (MAX_BODY + 1))
    assert not cached.ask(b"x").is_over
    await cached.keep(b"y")
    copy = new_job(body=RequestBody(b"y"))
    copy.is_copy = True
    assert cached.cache.find(copy) is None


async def test_bodies_in_shared_memory_are_the_same_as_others():
    cached = Cached()
    await cached.keep(b"xyz")
    segment = SimpleNamespace(memory=memoryview(b"xyz and more"))
    job = new_job(Listener(), body=RequestBody.shared(segment, 3, lambda segment: None))
    assert cached.cache.find(job) is not None


def test_a_cache_is_made_where_replies_depend_on_requests_alone(caplog):
    settings = ModelConfig().with_options({"responseCacheMb": 1, "responseCacheHeaders": [" Accept "]})
    made = response_cache(settings, compute=lambda job: None, watch=False)
    assert made is not None
    assert (made._kept.max_bytes, made._max_age_s, made._headers) == (1 << 20, 300, ("accept",))
    assert response_cache(ModelConfig(), compute=lambda job: None, watch=False) is None
    assert response_cache(settings, compute=lambda job: None, watch=True) is None
    assert "--watch" in caplog.text
    never = settings.with_options({"responseCacheInSec": 0})
    assert response_cache(never, compute=lambda job: None, watch=False) is None
    assert [*contradictions(never)] == ["responseCacheMb has no effect with responseCacheInSec: 0"]
    assert settings.with_options({"responseCacheInSec": -1}).response_cache_s == 300
    continuous = settings.with_options({"continuousBatching": True})
    assert response_cache(continuous, compute=lambda job: None, watch=False) is None


@pytest.mark.parametrize("names", ["accept", [1], {"accept": 1}])
def test_headers_that_are_no_list_of_names_are_ignored_with_a_warning(names, caplog):
    config = ModelConfig().with_options({"responseCacheHeaders": names})
    assert config.response_cache_headers is None
    assert "responseCacheHeaders must be a list of names" in caplog.text
