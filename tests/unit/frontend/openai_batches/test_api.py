"""Uploads of files."""

from __future__ import annotations

import pytest

from flambeau.errors import BadRequest, InvalidField
from flambeau.frontend.openai_batches.api import read_upload
from flambeau.frontend.openai_batches.runner import wait_s

FORM = (
    b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--x\r\ncontent-disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n{"a": 1}\n\r\n--x--\r\n'
)


def test_form_has_a_file_and_a_purpose():
    assert read_upload("multipart/form-data; boundary=x", FORM) == ({"purpose": "batch"}, "a.jsonl", b'{"a": 1}\n')


def test_other_bodies_are_refused():
    with pytest.raises(BadRequest, match="multipart/form-data"):
        read_upload("application/json", b"{}")
    with pytest.raises(InvalidField, match="file is required"):
        read_upload("multipart/form-data; boundary=x", FORM.replace(b'; filename="a.jsonl"', b""))
    with pytest.raises(BadRequest, match="could not be read"):
        read_upload("multipart/form-data; boundary=x", b"nonsense")


def test_wait_before_another_attempt():
    assert wait_s([("retry-after", "7")], 0) == 7
    assert wait_s([("retry-after", "700")], 0) == 30
    assert [wait_s([], n) for n in range(3)] == [1, 2, 4]
