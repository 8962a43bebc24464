"""Envelopes convert a handler's input and output."""

from __future__ import annotations

import pytest

from flambeau.handlers.envelopes.base import BodyEnvelope, JSONEnvelope
from flambeau.wire.messages import Request
from flambeau.worker.context import Context
from flambeau.worker.inputs import read_headers


def context(count=1, kind="predict"):
    context = Context("m", "/", {"model": {"modelName": "named", "modelVersion": "2"}}, 1, None, "1")
    context.connect(None, read_headers)
    context.begin([Request(i, f"id-{i}", [], b"", kind) for i in range(count)], [None] * count)
    return context


def same(data, context):
    return [*data]


def test_instances_may_be_the_fields_of_the_row():
    assert JSONEnvelope(same).handle([{"instances": [1]}], context()) == ['{"predictions": [1]}']


@pytest.mark.parametrize(
    ("instance", "given"),
    [
        ({"b64": "aGk="}, b"hi"),
        ({"x": {"b64": "aGk="}, "y": 1}, {"x": b"hi", "y": 1}),
        ({"b64": "aGk=", "y": 1}, {"b64": "aGk=", "y": 1}),
        ({"x": {"y": {"b64": "aGk="}}}, {"x": {"y": {"b64": "aGk="}}}),
        ([1], [1]),
    ],
)
def test_bytes_are_decoded_one_level_deep(instance, given):
    seen = []
    JSONEnvelope(lambda data, context: seen.extend(data)).handle([{"body": {"instances": [instance]}}], context())
    assert seen == [given]


def test_description_and_initialization_pass_by_the_envelope():
    assert JSONEnvelope(lambda data, context: ["described"]).handle([{}], context(kind="describe")) == ["described"]
    assert JSONEnvelope(lambda data, context: data).handle(None, context()) is None


def test_streams_pass_through_as_they_are():
    def chunks(data, context):
        yield from data

    assert [*BodyEnvelope(chunks).handle([{"body": 1}, {"data": 2}], context(2))] == [1, 2]


async def same_later(data, context):
    return same(data, context)


async def test_async_handlers_are_awaited():
    assert await JSONEnvelope(same_later).handle([{"instances": [1]}], context()) == ['{"predictions": [1]}']
