"""`pipeline: true`: the next batch is prepared while the current one is computed."""

from __future__ import annotations

import pytest

from support.archives import pack_handler

pytest.importorskip("torch")

STAGES = {"prepare_s": 0.05, "compute_s": 0.05}


def answers(server, bodies) -> list:
    server.predict("staged", {"number": 0})
    return [future.result() for future in server.at_once(lambda body: server.predict("staged", body), bodies)]


def num_overlaps(replies) -> int:
    """How many requests were prepared while another was computed."""

    def spans(name):
        return [tuple(map(float, reply.headers[name].split())) for reply in replies]

    prepared, computed = spans("x-prepared"), spans("x-computed")
    return sum(any(a < end and start < b for start, end in computed) for a, b in prepared)


def test_stages_overlap_and_answers_stay_with_their_requests(start, tmp_path):
    bodies = [{"number": n, **STAGES} for n in range(12)]
    (tmp_path / "plain").mkdir()
    plain = start(pack_handler(tmp_path / "plain", "staged")).wait_ready()
    assert num_overlaps(answers(plain, bodies)) == 0
    pipelined = start(pack_handler(tmp_path, "staged", config="pipeline: true")).wait_ready()
    replies = answers(pipelined, bodies)
    assert [reply.json for reply in replies] == [2 * n for n in range(12)]
    assert all(reply.headers["x-seen"] == reply.headers["x-request-id"] for reply in replies)
    assert num_overlaps(replies) >= 9  # all but the first, and what came late on a busy machine


def test_bad_request_in_a_batch_fails_alone(start, tmp_path):
    config = "pipeline: true\nbatchSize: 4\nmaxBatchDelay: 200\nminWorkers: 1\nmaxWorkers: 1"
    server = start(pack_handler(tmp_path, "staged", config=config)).wait_ready()
    bodies = [{"number": n, "bad": n == 2, **STAGES} for n in range(12)]
    replies = answers(server, bodies)
    assert [reply.status for reply in replies] == [400 if n == 2 else 200 for n in range(12)]
    assert replies[2].message == "it says that it is bad"
    assert [reply.json for reply in replies if reply.status == 200] == [2 * n for n in range(12) if n != 2]


def test_crash_costs_only_the_request_that_caused_it(start, tmp_path):
    server = start(pack_handler(tmp_path, "staged", config="pipeline: true")).wait_ready()
    bodies = [{"number": n, "exit": n == 3, **STAGES} for n in range(8)]
    replies = answers(server, bodies)
    assert [reply.status for reply in replies] == [500 if n == 3 else 200 for n in range(8)]


def test_describe_goes_through(start, tmp_path):
    server = start(pack_handler(tmp_path, "staged", config="pipeline: true")).wait_ready()
    assert server.manage("GET", "/models/staged?customized=true").status == 200


def test_handler_that_keeps_state_is_refused_with_the_line(start, tmp_path):
    code = (
        "from flambeau.handlers.base import BaseHandler\n\n\n"
        "class Forgetful(BaseHandler):\n"
        "    def initialize(self, context):\n"
        "        pass\n\n"
        "    def preprocess(self, data):\n"
        "        self.sizes = [len(row) for row in data]\n"
        "        return data\n"
    )
    folder = tmp_path / "forgetful"
    folder.mkdir()
    (folder / "handler.py").write_text(code)
    (folder / "MAR-INF").mkdir()
    (folder / "model-config.yaml").write_text("pipeline: true\nmaxRetryTimeoutInSec: 1\n")
    (folder / "MAR-INF" / "MANIFEST.json").write_text(
        '{"model": {"modelName": "forgetful", "handler": "handler.py", "configFile": "model-config.yaml"}}'
    )
    server = start(folder).wait_started()
    assert "preprocess (line 9) changes self.sizes" in server.log


def test_exit_in_preprocess_is_told_at_once(start, tmp_path):
    server = start(pack_handler(tmp_path, "staged", config="pipeline: true")).wait_ready()
    reply = server.predict("staged", {"number": 1, "leave": True})
    assert reply.status == 500
    assert "exited with code 3" in reply.cause
