"""Which worker gets the next turn of a conversation."""

from __future__ import annotations

import json
from dataclasses import dataclass

import pytest

from flambeau.serving.job import RequestBody
from flambeau.serving.scheduling import prefix_affinity
from flambeau.serving.scheduling.batch_dispatcher import BatchDispatcher
from flambeau.serving.scheduling.batch_policy import BatchLimits
from flambeau.serving.scheduling.prefix_affinity import PrefixAffinity, beginnings, choose, prompt_of
from flambeau.serving.scheduling.queue import JobQueue
from flambeau.wire.generation import Adapter, Generate, encode_request
from flambeau.wire.messages import Part
from flambeau.wire.shared_memory import SegmentPool
from support.jobs import new_job, new_worker


@dataclass(eq=False)
class Worker:
    num_batches: int = 0
    places: int = 16


def message(text, role="user"):
    return {"role": role, "content": text}


def chat(*messages, **more):
    return new_job(kind="generate", body=RequestBody(encode_request(Generate(messages=[*messages], **more))))


def predict(document):
    return new_job(body=RequestBody(json.dumps(document).encode()))


FIRST = message("Tell me of the sea, " * 10)
ANSWER = message("It is wide. " * 50, "assistant")
NEXT = message("And of the sky?")


def is_continued(one, other):
    return prompt_of(other).startswith(prompt_of(one)) and len(prompt_of(one)) > prefix_affinity.FIRST_BYTES


def test_next_turn_continues_the_prompt_of_a_chat():
    assert is_continued(chat(FIRST), chat(FIRST, ANSWER, NEXT))
    assert is_continued(chat(FIRST, stream=True, tools=[{"a": 1}]), chat(FIRST, ANSWER, tools=[{"a": 1}]))
    assert is_continued(predict({"messages": [FIRST], "seed": 1}), predict({"messages": [FIRST, ANSWER, NEXT]}))


def test_chats_with_other_tools_or_adapters_do_not_continue_each_other():
    assert not is_continued(chat(FIRST), chat(FIRST, ANSWER, tools=[{"a": 1}]))
    assert not is_continued(chat(FIRST), chat(FIRST, ANSWER, adapter=Adapter("a")))


def complete(prompt):
    return new_job(kind="generate", body=RequestBody(encode_request(Generate(prompts=[prompt]))))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (complete("word " * 100), complete("word " * 120)),
        (complete([7, 70_000] * 100), complete([7, 70_000] * 120)),
        (predict({"data": "word " * 100, "seed": 1}), predict({"data": "word " * 120})),
        (predict({"seed": 1, "prompt": "word " * 100}), predict({"prompt": "word " * 120})),
        (new_job(body=RequestBody(b"word " * 100)), new_job(body=RequestBody(b"word " * 120))),
    ],
    ids=["text", "token ids", "JSON", "JSON in another order", "plain text"],
)
def test_longer_prompt_begins_like_the_shorter_one(one, other):
    first, second = [*beginnings(prompt_of(one))], [*beginnings(prompt_of(other))]
    assert first == second[: len(first)]
    assert first


def test_large_body_is_read_from_shared_memory():
    segment = SegmentPool().take(200_000)
    text = json.dumps({"data": "x" * 150_000}).encode()
    segment.memory[: len(text)] = text
    job = new_job(body=RequestBody.shared(segment, len(text), lambda given: None))
    assert prompt_of(job) == b'"' + b"x" * 150_000 + b'"'


@pytest.mark.parametrize(
    "job",
    [
        new_job(kind="describe", body=RequestBody(b"x" * 100)),
        new_job(kind="generate", body=RequestBody(b"\xc1" * 100)),
        new_job(body=RequestBody(b"short")),
        predict({"data": "short"}),
    ],
    ids=["another kind", "malformed", "short", "short JSON"],
)
def test_other_jobs_have_no_prompt_to_compare(job):
    assert [*beginnings(prompt_of(job))] == []


def test_beginnings_of_a_long_prompt_are_few_and_the_same_for_its_continuation():
    long = [*beginnings(b"a" * 100_000)]
    longer = [*beginnings(b"a" * 100_000 + b"b" * 50_000)]
    assert 10 < len(long) < len(longer) < 100
    assert longer[: len(long)] == long
    assert len({*longer}) == len(longer)


def test_longest_match_wins_within_the_bound_and_load_beyond_it():
    idle, busy = Worker(0), Worker(4)
    assert choose([idle, busy], [1, 5]) is busy
    busy.num_batches = 5
    assert choose([idle, busy], [1, 5]) is idle


def test_bound_is_one_job_where_there_are_few_places():
    idle, busy = Worker(0, places=2), Worker(1, places=2)
    assert choose([idle, busy], [0, 3]) is busy
    busy.num_batches = 2
    assert choose([idle, busy], [0, 3]) is idle


def test_of_equal_matches_the_least_busy_worker_wins_then_the_first():
    one, two, three = Worker(1), Worker(0), Worker(0)
    assert choose([one, two, three], [2, 2, 2]) is two
    assert choose([one, two, three], [0, 0, 0]) is two


def test_conversation_stays_with_its_worker_and_a_full_one_loses_it():
    one, two = Worker(), Worker()
    affinity = PrefixAffinity()
    assert affinity.pick([two], chat(FIRST)) is two
    assert affinity.pick([one, two], chat(FIRST, ANSWER, NEXT)) is two
    two.num_batches = 9
    assert affinity.pick([one, two], chat(FIRST, ANSWER, NEXT)) is one
    two.num_batches = 0
    one.num_batches = 1
    assert affinity.pick([one, two], chat(FIRST, ANSWER, NEXT)) is two  # both hold it


def test_conversations_with_one_system_prompt_spread_when_there_is_load():
    workers = [Worker(places=8) for _ in range(3)]
    affinity = PrefixAffinity()
    system = message("You are a sailor. " * 20, "system")
    for number in range(24):
        affinity.pick(workers, chat(system, message(f"{number} " * 40))).num_batches += 1
    assert max(worker.num_batches for worker in workers) <= 10
    assert min(worker.num_batches for worker in workers) >= 6


def test_worker_that_is_gone_is_forgotten():
    one, two = Worker(), Worker()
    affinity = PrefixAffinity()
    affinity.pick([two], chat(FIRST))
    affinity.keep([one])
    assert affinity._holders == {}
    assert affinity.pick([one, two], chat(FIRST)) is one


def test_old_beginnings_are_forgotten(monkeypatch):
    monkeypatch.setattr(prefix_affinity, "MAX_BEGINNINGS", 10)
    affinity = PrefixAffinity()
    for number in range(20):
        affinity.pick([Worker()], chat(message(f"{number} " * 100)))
    assert len(affinity._holders) == 10


async def test_dispatcher_sends_the_next_turn_to_the_same_worker():
    workers = [new_worker(is_concurrent=True, places=8) for _ in range(2)]
    dispatcher = BatchDispatcher(JobQueue(100), workers, BatchLimits(), num_cores=4)
    jobs = [chat(message("Something else entirely, " * 10)), chat(FIRST)]
    for job in jobs:  # the second worker is less busy when the second job comes
        dispatcher.add(job)
    assert [worker.num_batches for worker in workers] == [1, 1]
    for job, worker in zip(jobs, workers, strict=True):
        worker._receive([Part(job.id, b"")])
    dispatcher.add(chat(FIRST, ANSWER, NEXT))
    assert [worker.num_batches for worker in workers] == [0, 1]
    dispatcher.close()
