"""Stateful models over StreamPredictions2."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from support.archives import pack_handler
from support.grpc_calls import Client, grpc_flags, request

CONFIG = """
sequenceBatching: true
minWorkers: 2
maxWorkers: 2
batchSize: 4
maxNumSequence: 8
sequenceMaxIdleMSec: 60000
maxSequenceJobQueueSize: 10
"""


@pytest.fixture
def client(start, tmp_path):
    flags = grpc_flags()
    start(pack_handler(tmp_path, "running_sums", config=CONFIG), *flags).wait_ready()
    made = Client(int(flags[1]), int(flags[3]))
    yield made
    made.close()


def test_the_requests_of_a_sequence_are_added_up_in_order(client):
    def add_up(sequence):
        requests = [
            request("running_sums", inputs={"data": str(n).encode()}, sequence_id=sequence) for n in range(1, 9)
        ]
        replies = [*client.inference.StreamPredictions2(iter(requests), timeout=30)]
        assert {reply.sequence_id for reply in replies} == {sequence}
        return [reply.prediction.decode().split() for reply in replies]

    with ThreadPoolExecutor(6) as pool:
        for answers in pool.map(add_up, [f"sequence-{number}" for number in range(6)]):
            assert [int(total) for total, _ in answers] == [1, 3, 6, 10, 15, 21, 28, 36]
            assert len({worker for _, worker in answers}) == 1


def test_a_sequence_without_a_name_gets_one_that_its_next_requests_can_use(client):
    start = request("running_sums", inputs={"data": b"5", "ts_request_sequence_start": b"true"})
    (first,) = client.inference.StreamPredictions2(iter([start]), timeout=30)
    again = request("running_sums", inputs={"data": b"2"}, sequence_id=first.sequence_id)
    (second,) = client.inference.StreamPredictions2(iter([again]), timeout=30)
    assert [int(reply.prediction.split()[0]) for reply in (first, second)] == [5, 7]
