"""What of the outside may appear in a log, and how."""

from __future__ import annotations

import logging
import re

import pytest

from flambeau.logs.line_formats import LineFormat, local_time, masked, printable, terminal_line, tidy

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d,\d{3}"
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


def test_messages_keep_their_lines_and_other_control_characters_are_escaped():
    assert tidy("one\n\ttwo é") == "one\n\ttwo é"
    assert tidy("a\x1b[2Jb\rc\u2028") == "a\\x1b[2Jb\\rc\\u2028"


def test_layouts_of_files_and_terminal():
    assert re.fullmatch(TIME, local_time(1717105563.6254))
    assert local_time(1717105563.6254).endswith(",625")
    line = LineFormat("MODEL_LOG", logging.WARNING, "W-9000-m_1.0-stderr")
    assert line.full == line.own == " [WARN ] W-9000-m_1.0-stderr MODEL_LOG - "
    assert LineFormat("ACCESS_LOG").own == " - "
    assert terminal_line(0, logging.INFO, "hello") == "1970-01-01T00:00:00Z INFO    hello\n"
    assert printable("a\nb\x1b[31m") == r"a\nb\x1b[31m"
