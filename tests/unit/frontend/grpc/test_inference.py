"""Which sequence a request belongs to."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from flambeau.config.server import SequenceHeaders, ServerConfig
from flambeau.errors import BadRequest
from flambeau.frontend.grpc.inference import SequenceStream, sequence_of
from flambeau.frontend.grpc.messages import PredictionsRequest
from flambeau.serving.reply_budget import ReplyBudget

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


async def one_request_and_silence():
    yield PredictionsRequest(model_name="m", sequence_id="s")
    await asyncio.Event().wait()


async def test_a_mistake_of_ours_ends_the_stream_at_once():
    broken = SimpleNamespace(find=lambda name, version: 1 / 0)
    server = SimpleNamespace(registry=broken, config=ServerConfig())
    with pytest.raises(ZeroDivisionError):
        async with asyncio.timeout(30):
            [reply async for reply in SequenceStream(server, one_request_and_silence(), ReplyBudget()).replies()]
