"""Invalid forms are bad requests."""

from __future__ import annotations

import pytest

from flambeau.errors import BadRequest
from flambeau.wire.messages import Request
from flambeau.worker.inputs import MAX_FIELDS, InputReader

PART = b'--b\r\nContent-Disposition: form-data; name="a"\r\n\r\n1\r\n'


def read(body, boundary="b"):
    headers = [("Content-Type", f"multipart/form-data; boundary={boundary}")]
    return InputReader(decode=True).read(Request(job_id=1, request_id="r", headers=headers, body=body))


def test_parts_are_counted_not_names():
    assert read(PART * MAX_FIELDS + b"--b--\r\n") == {"a": bytearray(b"1")}
    with pytest.raises(BadRequest, match="at most 1000 fields"):
        read(PART * (MAX_FIELDS + 1) + b"--b--\r\n")


def test_form_without_a_boundary_is_a_bad_request():
    with pytest.raises(BadRequest, match="could not be read"):
        read(b"x", "b" * 60_000)


def test_body_that_cannot_be_decoded_is_logged_once(caplog):
    reader = InputReader(decode=True)
    request = Request(job_id=1, request_id="r", headers=[("content-type", "application/json")], body=b"{")
    assert reader.read(request) == {"body": bytearray(b"{")}
    assert "not valid JSON" in reader.problem_of(request)
    assert len(caplog.records) == 1
