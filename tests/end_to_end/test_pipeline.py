"""`pipeline: true`: the next batch is prepared while the current one is computed."""

from __future__ import annotations

import pytest

from support.archives import pack_handler
from support.running import RunningServer

pytest.importorskip("torch")

STAGES = {"prepare_s": 0.05, "compute_s": 0.05}
MODELS = {
    "plain": "minWorkers: 1\nmaxWorkers: 1",
    "staged": "pipeline: true\nminWorkers: 1\nmaxWorkers: 1",
    "batched": "pipeline: true\nbatchSize: 4\nmaxBatchDelay: 200\nminWorkers: 1\nmaxWorkers: 1",
}
FORGETFUL = """
from flambeau.handlers.base import BaseHandler


class Forgetful(BaseHandler):
    def initialize(self, context):
        pass

    def preprocess(self, data):
        self.sizes = [len(row) for row in data]
        return data
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pipeline")
    models = [pack_handler(folder, "staged", name=name, config=config) for name, config in MODELS.items()]
    forgetful = folder / "forgetful"
    forgetful.mkdir()
    (forgetful / "handler.py").write_text(FORGETFUL)
    (forgetful / "model-config.yaml").write_text("handler: handler.py\npipeline: true\nmaxRetryTimeoutInSec: 1\n")
    running = RunningServer(folder / "log", *map(str, [*models, forgetful]))
    yield running.wait_started()
    running.stop(timeout=40)


def answers(server, model, bodies) -> list:
    server.predict(model, {"number": 0})
    return [future.result() for future in server.at_once(lambda body: server.predict(model, body), bodies)]


def num_overlaps(replies) -> int:
    """How many requests were prepared while another was computed."""
    prepared, computed = spans(replies, "x-prepared"), spans(replies, "x-computed")
    return sum(any(a < end and start < b for start, end in computed) for a, b in prepared)


def spans(replies, name) -> list[tuple[float, ...]]:
    return [tuple(map(float, reply.headers[name].split())) for reply in replies]


def test_stages_overlap_and_answers_stay_with_their_requests(server):
    bodies = [{"number": n, **STAGES} for n in range(12)]
    assert num_overlaps(answers(server, "plain", bodies)) == 0
    replies = answers(server, "staged", bodies)
    assert [reply.json for reply in replies] == [2 * n for n in range(12)]
    assert all(reply.headers["x-seen"] == reply.headers["x-request-id"] for reply in replies)
    assert num_overlaps(replies) >= 9  # all but the first, and what came late on a busy machine


def test_bad_request_in_a_batch_fails_alone(server):
    bodies = [{"number": n, "bad": n == 2, **STAGES} for n in range(12)]
    replies = answers(server, "batched", bodies)
    assert [reply.status for reply in replies] == [400 if n == 2 else 200 for n in range(12)]
    assert replies[2].message == "it says that it is bad"
    assert [reply.json for reply in replies if reply.status == 200] == [2 * n for n in range(12) if n != 2]


def test_describe_goes_through(server):
    assert server.manage("GET", "/models/staged?customized=true").status == 200


def test_handler_that_keeps_state_is_refused_with_the_line(server):
    failure = server.failure("forgetful")
    assert "line 10" in failure
    assert "self.sizes" in failure


def test_crash_costs_only_the_request_that_caused_it(server):
    bodies = [{"number": n, "exit": n == 3, **STAGES} for n in range(8)]
    replies = answers(server, "staged", bodies)
    assert [reply.status for reply in replies] == [500 if n == 3 else 200 for n in range(8)]


def test_exit_in_preprocess_is_reported_at_once(server):
    reply = server.predict("batched", {"number": 1, "leave": True})
    assert reply.status == 500
    assert "exited with code 3" in reply.cause
