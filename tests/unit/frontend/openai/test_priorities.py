"""vLLM's numbers of priority, and ours."""

from __future__ import annotations

import json

import pytest

from flambeau.errors import BadRequest, InvalidField
from flambeau.frontend.openai.priorities import apply_priority
from flambeau.frontend.openai.requests import (
    ChatRequest,
    ClassifyRequest,
    CompletionRequest,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
    read_request,
)
from flambeau.frontend.openai_responses.requests import ResponsesRequest
from flambeau.serving.job import PRIORITY_HEADER
from support.http_exchanges import FakeConnection, new_exchange

REQUESTS = {
    ChatRequest: {"messages": [{"role": "user", "content": "a"}]},
    CompletionRequest: {"prompt": "a"},
    EmbeddingRequest: {"input": "a"},
    RerankRequest: {"query": "a", "documents": ["b"]},
    ScoreRequest: {"text_1": "a", "text_2": "b"},
    ClassifyRequest: {"input": "a"},
    ResponsesRequest: {"input": "a"},
}


def exchange_with(header=None):
    exchange = new_exchange(FakeConnection(), headers=[] if header is None else [("X-Flambeau-Priority", header)])
    exchange.priority = header
    return exchange


@pytest.mark.parametrize("kind", REQUESTS)
def test_each_request_may_have_a_whole_number(kind):
    def read(priority):
        return read_request(json.dumps({**REQUESTS[kind], "priority": priority}).encode(), kind).priority

    assert [read(priority) for priority in (-(10**12), 0, 7, None)] == [-(10**12), 0, 7, None]
    for wrong in ("high", 0.5, True):
        with pytest.raises(InvalidField, match="priority: expected a whole number"):
            read(wrong)


@pytest.mark.parametrize(
    ("asked", "header", "found"),
    [
        (None, None, None),
        (0, None, None),
        (-1, None, "high"),
        (-(10**12), None, "high"),
        (1, None, "low"),
        (None, "low", "low"),
        (0, "high", "high"),
        (-3, " HIGH ", " HIGH "),
        (9, "low", "low"),
    ],
)
def test_a_number_is_one_of_three_classes(asked, header, found):
    exchange = exchange_with(header)
    apply_priority(exchange, asked)
    assert exchange.priority == found


@pytest.mark.parametrize(("asked", "header"), [(-1, "low"), (-1, "normal"), (1, "high")])
def test_a_number_and_a_header_that_differ_are_refused(asked, header):
    with pytest.raises(InvalidField, match=PRIORITY_HEADER) as found:
        apply_priority(exchange_with(header), asked)
    assert found.value.field == "priority"


def test_an_unknown_name_in_the_header_is_refused_as_ever():
    with pytest.raises(BadRequest, match="high, normal, low"):
        apply_priority(exchange_with("urgent"), 1)


def test_what_the_server_has_chosen_for_a_batch_stays():
    exchange = new_exchange(FakeConnection())
    exchange.priority = "low"
    apply_priority(exchange, -1)
    assert exchange.priority == "low"
