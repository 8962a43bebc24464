"""Workers that die, hang or lose their clients while they generate."""

from __future__ import annotations

import http.client
import json
import os
import signal
import threading
from contextlib import closing
from pathlib import Path

import pytest
import yaml

from flambeau.examples.storyteller import FOLDER
from support.language_models import ONE_THREAD, write_language_model
from support.running import RunningServer
from support.streams import Stream


def counted(count):
    return "".join(f"{i} " for i in range(count))


def kill_worker(server: RunningServer, model: str = "counting") -> None:
    os.kill(server.worker_pids(model)[0], signal.SIGKILL)


def read_some(stream, size=4):
    """The first bytes of a reply, as soon as they are there."""
    return (stream.response or stream.begin()).read(size)


def rest_of(stream):
    """The rest of a reply."""
    try:
        return (stream.response or stream.begin()).read()
    finally:
        stream.leave()


def test_stream_whose_worker_is_killed_is_broken_off(start):
    server = start("counting.py").wait_ready()
    stream = Stream(server, "counting", {"n": 100_000, "pause": 0.002})
    read_some(stream)
    kill_worker(server)
    assert stream.is_broken_off()
    assert server.predict("counting", {"n": 2}).text == counted(2)


def test_stream_of_events_whose_worker_is_killed_ends_with_an_error_event(start):
    server = start("counting.py").wait_ready()
    stream = Stream(server, "counting", {"n": 100_000, "pause": 0.002, "events": True})
    read_some(stream)
    kill_worker(server)
    events = rest_of(stream).decode().split("\n\n")
    assert events[-1] == ""
    assert events[-2].startswith("event: error\ndata: ")
    error = json.loads(events[-2].partition("data: ")[2])["error"]
    assert error["code"] == 500
    assert error["message"].startswith("Worker died: ")
    assert any("SIGKILL" in line for line in error["cause"])


def test_reply_of_which_nothing_was_sent_is_made_again(start):
    server = start("counting.py").wait_ready()
    [reply] = server.at_once(
        lambda order: server.predict("counting", order), [{"n": 150, "pause": 0.005, "whole": True}]
    )
    server.until(lambda: customized(server)["open"] == 1)
    kill_worker(server)
    assert reply.result().text == counted(150)


def test_streams_that_can_go_on_do_so_together_after_their_worker_was_killed(start):
    server = start("counting.py").wait_ready()
    order = {"n": 300, "pause": 0.003, "resume": True}
    streams = [Stream(server, "counting", order) for _ in range(3)]
    firsts = [read_some(stream) for stream in streams]
    before = server.worker_pids("counting")
    kill_worker(server)
    texts = [first + rest_of(stream) for first, stream in zip(firsts, streams, strict=True)]
    assert [text.decode() for text in texts] == [counted(300)] * 3
    assert server.worker_pids("counting") != before
    assert customized(server)["most"] == 3


def test_stream_that_ends_its_worker_by_itself_is_not_resumed_for_ever(start):
    server = start("counting.py").wait_ready()
    stream = Stream(server, "counting", {"n": 9, "exit": 4, "resume": True})
    with pytest.raises(http.client.IncompleteRead) as caught:
        rest_of(stream)
    assert caught.value.partial.decode() == counted(4)
    assert server.predict("counting", {"n": 2}).text == counted(2)


def test_stream_survives_three_deaths_and_no_fourth(start):
    server = start("counting.py").wait_ready()
    stream = Stream(server, "counting", {"n": 100_000, "pause": 0.001, "resume": True})
    for _ in range(4):
        read_some(stream, 2000)
        before = server.until(lambda: server.worker_pids("counting"))
        kill_worker(server)
    assert before
    assert stream.is_broken_off()


def test_worker_gets_no_more_jobs_than_it_has_places_for(start):
    server = start("counting.py").wait_ready()
    replies = server.at_once(lambda order: server.predict("counting", order), [{"n": 30, "pause": 0.002}] * 10)
    assert [reply.result().text for reply in replies] == [counted(30)] * 10
    assert customized(server)["most"] == 3


def test_worker_that_generates_is_not_taken_for_silent_however_long_a_reply_takes(start):
    server = start("counting.py", "--response-timeout", "2").wait_ready()
    orders = [{"n": 40, "pause": 0.1, "whole": True}, {"n": 30, "pause": 0.1, "whole": True}]
    replies = server.at_once(lambda order: server.predict("counting", order), orders)
    assert [reply.result().text for reply in replies] == [counted(40), counted(30)]
    assert server.describe("counting")["workers"][0]["restarts"] == 0


def test_worker_that_is_stuck_is_replaced_and_its_clients_get_an_error(start):
    server = start("counting.py", "--response-timeout", "1").wait_ready()
    stream = Stream(server, "counting", {"n": 9, "hang": 3})
    assert stream.is_broken_off()
    assert server.predict("counting", {"n": 2}).text == counted(2)
    assert "responseTimeout" in server.failure("counting")


def test_clients_that_vanish_free_their_places_at_once(start):
    server = start("counting.py").wait_ready()
    streams = [Stream(server, "counting", {"n": 100_000, "pause": 0.001}) for _ in range(3)]
    for stream in streams:
        read_some(stream)
        stream.leave()
    assert server.predict("counting", {"n": 3}).text == counted(3)
    server.until(lambda: customized(server) == {"most": 3, "open": 0, "cancelled": 3})


def test_server_that_stops_lets_streams_come_to_their_end(start):
    server = start("counting.py").wait_ready()
    stream = Stream(server, "counting", {"n": 200, "pause": 0.004})
    first = read_some(stream)
    stopping = threading.Thread(target=server.stop)
    stopping.start()
    assert (first + rest_of(stream)).decode() == counted(200)
    stopping.join()


def customized(server):
    return server.manage("GET", "/models/counting?customized=true").json[0]["customizedMetadata"]


# ---- a real model ----


@pytest.fixture
def gpt(start, tmp_path):
    """A server of a tiny language model whose streams go on."""
    write_language_model(tmp_path / "gpt" / "checkpoint")
    handler = {"name": "gpt_handler", "model_path": "checkpoint", "compile": False, "max_new_tokens": 120}
    config = {"resume": True, "handler": {**handler, "num_blocks": 200}}
    (tmp_path / "gpt" / "model-config.yaml").write_text(yaml.safe_dump(config))
    server = start(tmp_path / "gpt", env=ONE_THREAD)
    server.start_timeout_s = 60
    return server.wait_ready()


def test_texts_go_on_exactly_where_they_stopped_when_their_worker_is_killed(gpt):
    orders = [{"data": "To be, or", "stream": True, "seed": seed, "ignore_eos": True} for seed in range(3)]
    orders[2]["temperature"] = 0.0
    orders.append({**orders[0], "allowed_token_ids": [*range(100, 120)], "no_repeat_ngram_size": 2})
    orders.append({**orders[1], "bad_words": ["to"], "typical_p": 0.9, "xtc_probability": 0.5, "dry_multiplier": 2.0})
    whole = [rest_of(Stream(gpt, "gpt", order)) for order in orders]
    assert len({*whole}) == 5
    [pid] = gpt.worker_pids("gpt")
    streams = [Stream(gpt, "gpt", order) for order in orders]
    firsts = [read_some(stream, 1) for stream in streams]
    os.kill(pid, signal.SIGKILL)
    rests = [rest_of(stream) for stream in streams]
    assert [first + rest for first, rest in zip(firsts, rests, strict=True)] == whole
    assert gpt.describe("gpt")["workers"][0]["restarts"] == 1


def test_ids_go_on_and_those_of_the_prompt_come_once_when_their_worker_is_killed(gpt):
    order = {"model": "gpt", "prompt": "To be, or", "max_tokens": 120, "seed": 3, "ignore_eos": True, "stream": True}

    def ids_of(*, kills: bool) -> tuple[list[list[int]], list[int]]:
        with closing(http.client.HTTPConnection("127.0.0.1", gpt.port, timeout=60)) as connection:
            body = json.dumps({**order, "return_token_ids": True})
            connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
            response = connection.getresponse()
            first = response.readline()
            if kills:
                os.kill(gpt.worker_pids("gpt")[0], signal.SIGKILL)
            lines = [
                line.removeprefix(b"data: ") for line in (first + response.read()).split(b"\n") if b'"choices"' in line
            ]
        choices = [json.loads(line)["choices"][0] for line in lines]
        prompts = [choice["prompt_token_ids"] for choice in choices if "prompt_token_ids" in choice]
        return prompts, [token for choice in choices for token in choice["token_ids"]]

    prompts, ids = ids_of(kills=False)
    assert (len(prompts), len(ids)) == (1, 120)
    assert ids_of(kills=True) == (prompts, ids)
    assert gpt.describe("gpt")["workers"][0]["restarts"] == 1


# ---- the model that comes with the server ----

NUM_CLIENTS, NUM_TEXTS = 200, 8


@pytest.fixture
def storyteller(start, tmp_path):
    draft = {"draft_model_path": str(FOLDER / "draft"), "speculative": True, "speculate_k": 4}
    handler = {"name": "gpt_handler", "model_path": str(FOLDER / "target"), **draft, "compile": False}
    config = {"handler": {**handler, "num_blocks": 1024, "max_num_seqs": 64}, "jobQueueSize": 500}
    (tmp_path / "bard").mkdir()
    (tmp_path / "bard" / "model-config.yaml").write_text(yaml.safe_dump(config))
    server = start(tmp_path / "bard", env=ONE_THREAD)
    server.start_timeout_s = 60
    return server.wait_ready()


def resident_bytes(pid):
    pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def recite(server, i):
    return Stream(
        server, "bard", {"data": "Once upon a time", "max_new_tokens": 24, "seed": i % NUM_TEXTS, "stream": True}
    )


def visit(server, i):
    """The text of client i; every fourth one leaves after a few bytes."""
    stream = recite(server, i)
    if i % 4 != 3:
        return rest_of(stream)
    read_some(stream, 5)
    stream.leave()
    return None


def test_of_200_clients_a_quarter_vanishes_and_the_others_get_what_they_get_alone(storyteller):
    alone = [rest_of(recite(storyteller, i)) for i in range(NUM_TEXTS)]
    sizes = []
    for _ in range(2):
        visitors = storyteller.at_once(lambda i: visit(storyteller, i), [*range(NUM_CLIENTS)])
        texts = [visitor.result() for visitor in visitors]
        assert texts == [alone[i % NUM_TEXTS] if i % 4 != 3 else None for i in range(NUM_CLIENTS)]
        storyteller.until(lambda: described(storyteller)["blocks_used"] == 0)
        sizes.append(resident_bytes(storyteller.worker_pids("bard")[0]))
    assert sizes[1] < sizes[0] * 1.1
    assert described(storyteller)["running"] == described(storyteller)["waiting"] == 0


def described(server):
    return server.manage("GET", "/models/bard?customized=true").json[0]["customizedMetadata"]
