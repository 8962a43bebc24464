"""The requests and results of batches."""

from __future__ import annotations

import json

import pytest

from flambeau.frontend.openai_batches.batch_files import BatchRecord, ResultFile, read_requests

CHAT = "/v1/chat/completions"


def line(custom_id="a", method="POST", url=CHAT, **body):
    return json.dumps({"custom_id": custom_id, "method": method, "url": url, "body": body}).encode()


def test_requests_are_read_line_by_line():
    requests, problems = read_requests(b"\n".join([line("a", n=1), b"", line("b")]) + b"\n", CHAT)
    assert [(request.custom_id, request.body) for request in requests] == [("a", {"n": 1}), ("b", {})]
    assert problems == []


@pytest.mark.parametrize(
    ("content", "number", "words"),
    [
        (b"", None, "no requests"),
        (b"\n{", 2, "no request"),
        (b'{"custom_id": "a"}', 1, "no request"),
        (line("a") + b"\n" + line("a"), 2, "that of another line"),
        (line(method="GET"), 1, "must be POST"),
        (line(url="/v1/embeddings"), 1, "endpoint"),
        (line(stream=True), 1, "whole replies"),
    ],
)
def test_invalid_lines_are_named(content, number, words):
    _, [problem] = read_requests(content, CHAT)
    assert problem["line"] == number
    assert words in problem["message"]


def test_too_many_requests_are_refused(monkeypatch):
    monkeypatch.setattr("flambeau.frontend.openai_batches.batch_files.MAX_REQUESTS", 2)
    _, [problem] = read_requests(b"\n".join(line(str(i)) for i in range(5)), CHAT)
    assert problem["code"] == "too_many_tasks"


def test_torn_last_line_of_the_results_is_dropped(tmp_path):
    results = ResultFile(tmp_path / "results")
    assert results.done() == set()
    results.append({"custom_id": "a"})
    results.append({"custom_id": "b"})
    with results.path.open("ab") as stream:
        stream.write(b'{"custom_id": "c')
    assert results.done() == {"a", "b"}
    results.append({"custom_id": "c"})
    assert results.done() == {"a", "b", "c"}


def test_document_of_a_batch_has_its_counts_and_not_its_owner():
    record = BatchRecord(
        id="batch_1", owner="ann", endpoint=CHAT, input_file_id="file-1", created_at=1, expires_at=2, total=3, failed=1
    )
    document = record.document()
    assert document["request_counts"] == {"total": 3, "completed": 0, "failed": 1}
    assert (document["object"], document["errors"]) == ("batch", None)
    assert "ann" not in str(document)
