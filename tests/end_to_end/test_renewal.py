"""Workers that are replaced after a number of requests, under load."""

from __future__ import annotations

from support.archives import pack_handler


def test_requests_are_answered_while_their_worker_is_renewed(start, tmp_path):
    config = "renewAfterRequests: 20\nminWorkers: 1\nmaxWorkers: 1\n"
    server = start(pack_handler(tmp_path, "echo", config=config)).wait_ready()
    before = server.describe("echo")["workers"][0]["pid"]
    for _ in range(3):
        replies = server.at_once(lambda _: server.predict("echo", b"x"), range(40))
        assert {reply.result().status for reply in replies} == {200}
    server.until(lambda: all(each["pid"] != before for each in server.describe("echo")["workers"]))
    assert server.describe("echo")["workers"][-1]["restarts"] == 0
    assert server.logged("echo", "renewAfterRequests is 20", level="INFO")
