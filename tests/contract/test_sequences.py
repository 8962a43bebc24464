"""Stateful models: the requests of a sequence reach one worker, in order."""

from __future__ import annotations

import json
import os
import signal

from support.archives import pack_handler
from support.running import Load
from support.streams import Stream

ID = "ts_request_sequence_id"
NO_WORKER = 'Model "{}" has no worker to serve inference request.'


def serve(start, folder, handler="summing", **settings):
    settings = {
        "sequenceBatching": "true",
        "minWorkers": 1,
        "maxWorkers": 1,
        "batchSize": 4,
        "maxNumSequence": 4,
        "sequenceMaxIdleMSec": 60_000,
        "maxSequenceJobQueueSize": 10,
        **settings,
    }
    settings.setdefault("maxWorkers", settings["minWorkers"])
    config = "".join(f"{key}: {value}\n" for key, value in settings.items())
    return start(pack_handler(folder, handler, config=config)).wait_ready()


def add(server, sequence, order, model="summing"):
    return server.predict(model, order, headers={ID: sequence} if sequence else {})


def num_waiting(server):
    return server.describe("summing")["jobQueueStatus"]["pendingRequests"]


def test_sequences_keep_their_worker_and_their_state(start, tmp_path):
    server = serve(start, tmp_path, minWorkers=2, maxWorkers=2)
    pids = {}
    for number in range(1, 6):
        for sequence in ("one", "two", "three", "four"):
            reply = add(server, sequence, {"add": number}).json
            assert reply["sum"] == sum(range(number + 1))
            assert pids.setdefault(sequence, reply["pid"]) == reply["pid"]
    assert [*pids.values()].count(pids["one"]) == 2  # two sequences for each worker


def test_request_without_an_id_opens_a_sequence(start, tmp_path):
    server = serve(start, tmp_path)
    first = add(server, None, {"add": 5})
    sequence = first.headers[ID]
    assert sequence.startswith("ts-seq-")
    assert (first.json["sequence"], first.json["start"]) == (sequence, "true")
    again = add(server, sequence, {"add": 2}).json
    assert (again["sum"], again["start"]) == (7, None)


def test_batch_holds_one_request_of_each_sequence_and_order_is_kept(start, tmp_path):
    server = serve(start, tmp_path)
    note = tmp_path / "note"
    blocker = server.at_once(lambda order: add(server, "zero", order), [{"s": 2, "note": str(note)}])
    server.until(note.exists)
    futures = []
    for count, (sequence, value) in enumerate([(s, v) for v in (1, 10, 100) for s in ("a", "b")], start=1):
        futures += server.at_once(lambda order, sequence=sequence: add(server, sequence, order), [{"add": value}])
        server.until(lambda count=count: num_waiting(server) >= count or blocker[0].done())
    replies = [future.result().json for future in futures]
    assert [reply["sum"] for reply in replies] == [1, 1, 11, 11, 111, 111]
    assert all(reply["batch"] <= 2 for reply in replies)


def test_more_sequences_than_allowed_are_refused(start, tmp_path):
    server = serve(start, tmp_path, maxNumSequence=2)
    assert add(server, "a", {"add": 1}).status == 200
    assert add(server, "b", {"add": 1}).status == 200
    for sequence in ("c", None):
        refused = add(server, sequence, {"add": 1})
        assert refused.status == 503
        assert refused.json["type"] == "ServiceUnavailableException"
        assert refused.json["message"].startswith(NO_WORKER.format("summing"))
        assert "maxNumSequence" in refused.json["message"]
    assert add(server, "a", {"add": 1}).json["sum"] == 2


def test_full_sequence_queue_refuses_and_others_go_on(start, tmp_path):
    server = serve(start, tmp_path, maxSequenceJobQueueSize=1, minWorkers=2, maxWorkers=2)
    assert add(server, "a", {}).status == 200
    assert add(server, "b", {}).status == 200
    note = tmp_path / "note"
    gate = tmp_path / "gate"
    running = server.at_once(lambda order: add(server, "a", order), [{"until": str(gate), "note": str(note)}])
    server.until(note.exists)
    waiting = server.at_once(lambda order: add(server, "a", order), [{"add": 1}])
    server.until(lambda: num_waiting(server) == 1)
    refused = add(server, "a", {"add": 1})
    assert refused.status == 503
    assert "maxSequenceJobQueueSize allows" in refused.json["message"]
    assert add(server, "b", {"add": 1}).status == 200
    gate.touch()
    assert [future.result().status for future in running + waiting] == [200, 200]


def test_idle_sequence_ends_and_makes_room(start, tmp_path):
    server = serve(start, tmp_path, maxNumSequence=1, sequenceMaxIdleMSec=200)
    assert add(server, "a", {"add": 1}).status == 200
    reply = server.until(lambda: (r := add(server, "b", {"add": 1})).status == 200 and r)
    assert reply.json["sum"] == 1


def test_sequence_ends_some_time_after_its_start_though_it_is_used(start, tmp_path):
    server = serve(start, tmp_path, maxNumSequence=1, sequenceTimeoutMSec=700)
    assert add(server, "a", {"add": 1}).status == 200
    assert add(server, "b", {"add": 1}).status == 503
    with Load(lambda: add(server, "b", {"add": 1}), threads=3) as others:  # most likely one of them is there in time
        server.until(lambda: add(server, "a", {"add": 1}) and any(reply.status == 200 for reply in others.replies))


def test_handler_ends_sequences_by_a_header(start, tmp_path):
    server = serve(start, tmp_path, maxNumSequence=2)
    assert add(server, "a", {"add": 1}).status == 200
    assert add(server, "b", {"add": 1}).status == 200
    assert add(server, "c", {"add": 1}).status == 503
    ended = add(server, "a", {"add": 1, "end": "a; b ;unknown"})
    assert ended.headers["ts_request_sequence_end"] == "a; b ;unknown"
    assert add(server, "c", {"add": 1}).status == 200
    assert add(server, "d", {"add": 1}).status == 200


def test_worker_that_dies_takes_its_sequences_along_and_comes_back(start, tmp_path):
    server = serve(start, tmp_path, minWorkers=2, maxWorkers=2)
    lost = add(server, "a", {"add": 5}).json["pid"]
    kept = add(server, "b", {"add": 7}).json["pid"]
    assert lost != kept
    note = tmp_path / "note"
    dying = server.at_once(lambda order: add(server, "a", order), [{"s": 60, "note": str(note)}])
    server.until(note.exists)
    waiting = server.at_once(lambda order: add(server, "a", order), [{"add": 1}])
    server.until(lambda: num_waiting(server) == 1)
    os.kill(lost, signal.SIGKILL)
    died = dying[0].result()
    assert (died.status, died.json["message"].startswith("Worker died: ")) == (500, True)
    refused = waiting[0].result()
    assert refused.status == 503
    assert refused.json["message"].startswith(NO_WORKER.format("summing"))
    assert "worker that held this sequence has ended" in refused.json["message"]
    after = add(server, "b", {"add": 1}).json
    assert (after["sum"], after["pid"]) == (8, kept)
    server.until(lambda: len(server.worker_pids("summing")) == 2)
    assert add(server, "a", {"add": 1}).json["sum"] == 1  # a new sequence of the same name


def test_crashing_request_is_not_tried_again(start, tmp_path):
    server = serve(start, tmp_path)
    assert add(server, "a", {"exit": True}).status == 500
    assert server.until(lambda: add(server, "a", {"add": 3}).json.get("sum") == 3)
    assert server.describe("summing")["workers"][0]["restarts"] == 1


def test_failing_batch_is_not_run_twice(start, tmp_path):
    server = serve(start, tmp_path, maxBatchDelay=2000, batchSize=2)
    orders = [("a", {"add": 1}), ("b", {"add": 1, "raise": True})]
    futures = server.at_once(lambda pair: add(server, *pair), orders)
    assert [future.result().status for future in futures] == [503, 503]
    futures = server.at_once(lambda pair: add(server, *pair), [("a", {"add": 1}), ("b", {"add": 1})])
    first, second = [future.result().json["sum"] for future in futures]
    assert second == 2  # it was added, and failed then; once
    assert first in (1, 2)  # whichever came first in the batch


def test_client_that_leaves_does_not_disturb_its_sequence(start, tmp_path):
    server = serve(start, tmp_path)
    assert add(server, "a", {"add": 1}).json["sum"] == 1
    note = tmp_path / "note"
    gate = tmp_path / "gate"
    leaving = Stream(server, "summing", {"add": 1, "until": str(gate), "note": str(note)}, [(ID, "a")])
    server.until(note.exists)
    waiting = Stream(server, "summing", {"add": 100}, [(ID, "a")])
    server.until(lambda: num_waiting(server) == 1)
    leaving.leave()
    waiting.leave()
    server.until(lambda: num_waiting(server) == 0)
    gate.touch()
    assert add(server, "a", {"add": 1}).json["sum"] == 3


def test_describe_shows_the_settings_and_asks_the_handler_once(start, tmp_path):
    server = serve(start, tmp_path, handler="stepping", sequenceTimeoutMSec=5000)
    document = server.manage("GET", "/models/stepping?customized=true").json[0]
    assert document["stateful"] is True
    keys = ("sequenceMaxIdleMSec", "sequenceTimeoutMSec", "maxNumSequence", "maxSequenceJobQueueSize")
    assert [document[key] for key in keys] == [60_000, 5000, 4, 10]
    assert document["customizedMetadata"] == {"open": 0, "calls": 1, "rows": 1}


def test_scaling_down_ends_the_sequences_of_the_worker_that_goes(start, tmp_path):
    server = serve(start, tmp_path, minWorkers=2, maxWorkers=2)
    pids = {name: add(server, name, {"add": 1}).json["pid"] for name in ("a", "b")}
    assert pids["a"] != pids["b"]
    assert server.manage("PUT", "/models/summing?min_worker=1&max_worker=1&synchronous=true").status == 200
    sums = {name: server.until(lambda name=name: add(server, name, {"add": 1}).json.get("sum")) for name in pids}
    assert sorted(sums.values()) == [1, 2]


def test_tickets_of_a_sequence_are_those_of_its_worker(start, tmp_path):
    server = serve(start, tmp_path, minWorkers=2, maxWorkers=2, useJobTicket="true", batchSize=1)
    assert add(server, "a", {}).status == 200
    assert add(server, "b", {}).status == 200
    note, gate = tmp_path / "note", tmp_path / "gate"
    with_a = Stream(server, "summing", {"until": str(gate), "note": str(note)}, [(ID, "a")])
    server.until(note.exists)
    refused = add(server, "a", {})
    assert refused.json["message"].startswith(NO_WORKER.format("summing"))
    assert "useJobTicket" in refused.json["message"]
    assert add(server, "b", {}).status == 200
    gate.touch()
    with_a.leave()


# ---- with continuous batching ----


def test_request_of_a_sequence_joins_the_batch_in_which_another_of_it_still_runs(start, tmp_path):
    server = serve(start, tmp_path, handler="stepping", continuousBatching="true", batchSize=1)
    long = Stream(server, "stepping", {"n": 100_000, "pause": 0.002}, [(ID, "a")])
    first = long.line()
    second = add(server, "a", {"n": 2}, model="stepping")
    lines = [json.loads(line) for line in second.body.splitlines()]
    assert [line["batch"] for line in lines] == [2, 2]  # twice batchSize
    assert lines[0]["call"] > first["call"]
    long.leave()


def test_stream_of_a_sequence_ends_it_in_a_later_part(start, tmp_path):
    server = serve(start, tmp_path, handler="stepping", continuousBatching="true", batchSize=1, maxNumSequence=1)
    reply = add(server, "a", {"n": 1}, model="stepping")
    assert reply.headers[ID] == "a"
    assert add(server, "b", {"n": 1}, model="stepping").status == 503
    assert add(server, "a", {"n": 4, "end_step": 3}, model="stepping").status == 200
    assert add(server, "b", {"n": 1}, model="stepping").status == 200


def test_sequences_stay_with_their_worker_in_continuous_batches(start, tmp_path):
    server = serve(start, tmp_path, handler="stepping", continuousBatching="true", minWorkers=2, maxWorkers=2)
    pids = {}
    for _ in range(4):
        for sequence in ("a", "b", "c", "d"):
            line = json.loads(add(server, sequence, {"n": 2}, model="stepping").body.splitlines()[0])
            assert pids.setdefault(sequence, line["pid"]) == line["pid"]
    assert len(set(pids.values())) == 2
