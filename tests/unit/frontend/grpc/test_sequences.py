"""Which sequence a request belongs to."""

from __future__ import annotations

import pytest

from flambeau.config.server import SequenceHeaders
from flambeau.errors import BadRequest
from flambeau.frontend.grpc.calls import remote_of
from flambeau.frontend.grpc.sequences import sequence_of

NAMES = SequenceHeaders(id="id", start="start", end="end")


@pytest.mark.parametrize(
    ("inputs", "headers"),
    [
        ({}, [("id", "s")]),
        ({"start": b"true"}, [("id", "s"), ("start", "true")]),
        ({"start": b"false", "end": b" TRUE\n"}, [("id", "s"), ("end", "true")]),
        ({"end": b"yes"}, [("id", "s")]),
        ({"end": b"\xff"}, [("id", "s")]),
    ],
)
def test_headers_of_a_named_sequence(inputs, headers):
    assert sequence_of("s", inputs, NAMES) == ("s", headers)


def test_a_new_sequence_gets_a_name_when_it_says_that_it_starts():
    name, headers = sequence_of("", {"start": b"true"}, NAMES)
    assert name.startswith("ts-seq-")
    assert headers == [("id", name), ("start", "true")]
    with pytest.raises(BadRequest, match=r"Parameter sequenceId is required\."):
        sequence_of("", {"start": b"false"}, NAMES)


def test_addresses_in_the_access_log():
    assert remote_of("ipv4:127.0.0.1:40122") == "/127.0.0.1:40122"
    assert remote_of("ipv6:%5B::1%5D:40122") == "/[::1]:40122"
    assert remote_of("unix:") == "/unix:"
