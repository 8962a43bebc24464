"""What of the outside may appear in a log, and how."""

from __future__ import annotations

import logging

import pytest

from flambeau.logs.access import http_line
from flambeau.logs.layouts import masked, tidy
from flambeau.logs.writer import QueueHandler

SIGNED = "https://b.s3.amazonaws.com/m.mar?X-Amz-Credential=AKIA%2F1&X-Amz-Signature=abc&x=1"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("m.mar", "m.mar"),
        ("https://h/m.mar?versionId=3", "https://h/m.mar?versionId=3"),
        (SIGNED, "https://b.s3.amazonaws.com/m.mar?X-Amz-Credential=***&X-Amz-Signature=***&x=1"),
        ("https://h/m.mar?sv=1&sig=a%2Bb", "https://h/m.mar?sv=1&sig=***"),
        ("url=https%3A%2F%2Fh%2Fm.mar%3FSignature%3Dabc%26a%3D1&limit=3", None),
        ("limit=3&next_page_token=50", "limit=3&next_page_token=50"),
    ],
)
def test_signatures_are_masked(url, shown):
    assert masked(url) == (shown or "url=https%3A%2F%2Fh%2Fm.mar%3FSignature%3D***%26a%3D1&limit=3")


def test_access_log_has_no_signatures():
    line = http_line("/h:1", "POST", "/models", f"url={SIGNED}", "1.1", 200, 0.001, 0.0)
    assert "abc" not in line
    assert "AKIA" not in line
    assert "/models?url=https://b.s3" in line


def test_message_keeps_its_lines_and_shows_what_would_move_the_cursor():
    assert tidy("one\n\ttwo é") == "one\n\ttwo é"
    assert tidy("a\x1b[2Jb\rc\u2028") == "a\\x1b[2Jb\\rc\\u2028"


def test_records_are_tidied():
    class Taken:
        def put_now(self, *entry):
            self.entry = entry

    logs = Taken()
    record = logging.LogRecord("flambeau", logging.INFO, "", 0, "model %s", ("a\rb",), None)
    record.worker = "W-1\nx"
    QueueHandler(logs).emit(record)
    assert logs.entry[2:] == ("W-1\\nx", "flambeau", "model a\\rb")
