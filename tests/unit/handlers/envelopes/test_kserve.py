"""KServe's protocols around a handler that expects their documents."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from flambeau.errors import BadRequest, HandlerError
from flambeau.handlers.envelopes.base import JSONEnvelope
from flambeau.handlers.envelopes.kserve import InstancesEnvelope, KServeEnvelope, KServev2Envelope
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


def tensor(name, *data):
    return {"name": name, "shape": [len(data)], "datatype": "INT64", "data": [*data]}


def test_lone_request_gets_all_results_however_many():
    assert KServeEnvelope(lambda data, context: [9]).handle([{"body": {"instances": [1, 2]}}], context()) == [
        {"predictions": [9]}
    ]


def test_batch_whose_results_cannot_be_split_is_an_error():
    rows = [{"body": {"instances": [1, 2]}}, {"body": {"instances": [3]}}]
    with pytest.raises(HandlerError, match="1 results for 3 instances"):
        KServeEnvelope(lambda data, context: [9]).handle(rows, context(2))


def test_explanations_have_their_own_name():
    rows = [{"body": b'{"instances": [1]}'}]
    assert KServeEnvelope(same).handle(rows, context(kind="explain")) == [{"explanations": [1]}]


def test_v2_sets_names_and_id_during_the_call_only():
    told = context()
    seen = []

    def handle(data, context):
        seen.append((context.input_names, context.input_request_id))
        return [row["data"] for row in data]

    document = {"id": "mine", "inputs": [tensor("a", 1), tensor("b", 2, 3)]}
    [answer] = KServev2Envelope(handle).handle([{"body": document}], told)
    assert seen == [(["a", "b"], "mine")]
    assert (answer["id"], answer["model_name"], answer["model_version"]) == ("mine", "named", "2")
    assert not hasattr(told, "input_names")
    assert not hasattr(told, "input_request_id")


def test_v2_blank_id_is_replaced_by_the_requests():
    document = {"id": " ", "inputs": [tensor("a", 1)]}
    [answer] = KServev2Envelope(lambda data, context: [[1]]).handle([{"body": document}], context())
    assert answer["id"] == "id-0"


def test_v2_needs_no_more_of_a_context_than_torchserve_does():
    minimal = SimpleNamespace(
        manifest={"model": {}}, get_request_header=lambda i, name: False
    )  # as in the tests that people wrote for their handlers
    [reply] = KServev2Envelope(lambda data, context: [[1]]).handle(
        [{"body": {"id": "x", "inputs": [tensor("a", 1, 2)]}}], minimal
    )
    assert (reply["id"], reply["model_name"], reply["model_version"]) == ("x", None, None)
    assert vars(minimal).keys() == {"manifest", "get_request_header"}


def test_v2_more_results_than_inputs_is_an_error():
    with pytest.raises(HandlerError, match="2 results for 1 inputs"):
        KServev2Envelope(lambda data, context: [1, 2]).handle([{"body": {"inputs": [tensor("a", 1)]}}], context())


@pytest.mark.parametrize("body", [b"\xff", b"[1]", b"{}", b'{"instances": {}}', 3])
@pytest.mark.parametrize("kind", [JSONEnvelope, KServeEnvelope, KServev2Envelope])
def test_bad_documents_are_rejected(kind, body):
    with pytest.raises(BadRequest):
        kind(same).handle([{"body": body}], context())


def test_instances_become_the_rows_that_plain_handlers_expect():
    seen = []
    envelope = InstancesEnvelope(lambda data, context: seen.extend(data) or ["ok"] * len(data))
    document = {"instances": [5, [1], {"a": 2}, {"data": 3}, {"b64": "YWI="}, {"data": {"b64": "YWI="}}]}
    assert envelope.handle([{"body": document}], context()) == [{"predictions": ["ok"] * 6}]
    assert seen == [{"data": value} for value in (5, [1], {"a": 2}, 3, b"ab", b"ab")]
