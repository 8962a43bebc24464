"""Requests for scores and classes → requests of a handler, and its replies → responses."""

from __future__ import annotations

import json

import msgspec
import pytest

from flambeau.frontend.openai.requests import ClassifyRequest, RerankRequest, ScoreRequest, read_request
from flambeau.frontend.openai.scores import documents_of, pair_request, pairs_of, to_classes, to_ranking, to_scores
from support.openai_requests import refusal


def read(kind, **fields):
    return read_request(json.dumps({"model": "m", **fields}).encode(), kind)


def documents(**fields):
    return documents_of(read(RerankRequest, **fields))


def pairs(**fields):
    request = read(ScoreRequest, **fields)
    return pair_request(request, pairs_of(request))


def test_one_text_is_scored_with_each_of_several_or_two_by_two():
    assert pairs(text_1="a", text_2="b") == {"pairs": [("a", "b")], "truncation": False}
    assert pairs(text_1="a", text_2=["b", "c"])["pairs"] == [("a", "b"), ("a", "c")]
    assert pairs(text_1=["a", "b"], text_2=["c", "d"])["pairs"] == [("a", "c"), ("b", "d")]
    assert refusal(pairs, text_1=["a", "b"], text_2="c")[0] == "text_1"
    assert refusal(pairs, text_1="a", text_2=[])[0] == "text_2"
    assert refusal(pairs, text_1="a")[0] == "text_2"


def test_long_texts_are_cut_only_if_the_request_says_so():
    assert pairs(text_1="a", text_2="b", truncate_prompt_tokens=-1)["truncation"] is True
    assert refusal(pairs, text_1="a", text_2="b", truncate_prompt_tokens=7)[0] == "truncate_prompt_tokens"


def test_documents_are_texts_or_objects_with_a_text():
    assert documents(query="q", documents=["a", {"text": "b"}]) == ["a", "b"]
    assert refusal(documents, query="q", documents=["a", {"title": "c"}])[1].startswith("documents[1]")
    assert refusal(documents, query="", documents=["a"])[0] == "query"
    assert refusal(documents, query="q", documents=[])[0] == "documents"
    assert refusal(lambda: read(ClassifyRequest))[0] == "input"


BODY = b'{"scores": [0.5, 0.9, 0.5], "num_tokens": 7}'


def test_the_best_documents_come_first():
    texts = ["a", "b", "c"]
    document, num_tokens = to_ranking(BODY, "m", texts=texts, top_n=3, shows_texts=True)
    assert num_tokens == 7
    assert document["results"] == [
        {"index": 1, "document": {"text": "b"}, "relevance_score": 0.9},
        {"index": 0, "document": {"text": "a"}, "relevance_score": 0.5},
        {"index": 2, "document": {"text": "c"}, "relevance_score": 0.5},
    ]
    assert document["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    document, _ = to_ranking(BODY, "m", texts=texts, top_n=1, shows_texts=False)
    assert document["results"] == [{"index": 1, "relevance_score": 0.9}]
    with pytest.raises(msgspec.ValidationError, match="3 scores for 1 pairs"):
        to_ranking(BODY, "m", texts=["a"], top_n=1, shows_texts=True)


def test_scores_and_classes_keep_their_order():
    assert [one["score"] for one in to_scores(BODY, "m")[0]["data"]] == [0.5, 0.9, 0.5]
    body = b'{"classes": [{"label": "GOOD", "probs": [0.2, 0.8]}], "num_tokens": 3}'
    [one] = to_classes(body, "m")[0]["data"]
    assert one == {"index": 0, "label": "GOOD", "probs": [0.2, 0.8], "num_classes": 2}
    with pytest.raises(msgspec.DecodeError):
        to_classes(b"[1]", "m")
