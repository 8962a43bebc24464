"""The examples of docs/scheduling.md do what the page says."""

from __future__ import annotations

import json
import re

import pytest

from support.snippets import snippets

PAGE = "docs/scheduling.md"


@pytest.fixture
def serve(tmp_path, start):
    for language in ("python", "yaml"):
        for code in snippets(PAGE, language):
            if not code.startswith("# "):
                continue
            path = tmp_path / code.splitlines()[0].removeprefix("# ")
            path.parent.mkdir(exist_ok=True)
            path.write_text(code)

    return lambda name: start(tmp_path / name).wait_ready()


def test_counter_remembers_by_sequence(serve):
    server = serve("counter")
    opened = server.predict("counter", 5)
    assert opened.body == b"5"
    name = {"ts_request_sequence_id": opened.headers["ts_request_sequence_id"]}
    assert server.predict("counter", 7, headers=name).body == b"12"
    assert server.predict("counter", 1, headers={"ts_request_sequence_id": "other"}).body == b"1"
    assert server.predict("counter", 0, headers=name).body == b"12"
    assert server.predict("counter", 3, headers=name).body == b"3"


def test_countdowns_share_a_batch(serve):
    server = serve("countdown")
    futures = server.at_once(lambda number: server.predict("countdown", number), [3, 1, 20, 500])
    for number, future in zip([3, 1, 20, 500], futures, strict=True):
        reply = future.result()
        assert [int(line) for line in reply.body.splitlines()] == [*range(number - 1, -1, -1)]
        assert ("transfer-encoding" in reply.headers) == (number > 1)


def test_gateway_waits_for_many_at_a_time(serve):
    server = serve("gateway")
    futures = server.at_once(lambda s: server.predict("gateway", s), [2.0, 2.0])
    server.until(lambda: json.loads(server.predict("gateway", 0).body)["open"] == 2)
    assert all(future.result().status == 200 for future in futures)


def test_priority_header_of_the_page_is_taken(serve):
    server = serve("countdown")
    command = snippets(PAGE, "sh")[0]
    name, value = command.split("'")[1].split(": ")
    assert server.predict("countdown", 1, headers={name: value}).status == 200
    assert server.predict("countdown", 1, headers={name: "higher"}).status == 400


def test_answers_are_kept_and_computed_once_for_requests_that_arrive_together(serve):
    server = serve("resize")
    first, again, other = (server.predict("resize", body) for body in (b"abc", b"abc", b"abcd"))
    assert (first.json["calls"], again.json, other.json["calls"]) == (1, first.json, 2)
    assert [reply.headers.get("x-flambeau-cache") for reply in (first, again, other)] == [None, "hit", None]
    assert server.predict("resize", b"abc", headers={"cache-control": "no-cache"}).json["calls"] == 3
    assert server.predict("resize", b"abc").json["calls"] == 3
    futures = server.at_once(lambda body: server.predict("resize", body), [b"together"] * 20)
    assert len({future.result().body for future in futures}) == 1
    assert server.predict("resize", b"last").json["calls"] == 5
    metrics = server.request("GET", "/metrics", port=server.metrics_port).text
    found = re.findall(r"flambeau_response_cache_requests_total{.*result=\"(\w+)\".*} (\d+)", metrics)
    counts = {name: int(number) for name, number in found}
    assert (counts["miss"], counts["hit"] + counts["joined"]) == (5, 2 + 19)


def test_another_code_of_the_handler_has_its_own_answers(serve):
    server = serve("resize")
    assert server.predict("resize", b"abc").json["calls"] == 1
    assert server.manage("PUT", "/models/resize?min_worker=2&synchronous=true").status in (200, 202)
    assert server.predict("resize", b"abc").json["calls"] == 1
