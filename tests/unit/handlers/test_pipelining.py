from __future__ import annotations

import pytest

from flambeau.errors import HandlerError
from flambeau.handlers.base import BaseHandler
from flambeau.handlers.pipelining import why_not


class Clean(BaseHandler):
    def preprocess(self, data):
        local = {}
        local["x"] = [self.scale(row) for row in data]
        return local

    def scale(self, row):
        return row

    def postprocess(self, data):
        self.last = data
        return data


class KeepsDirectly(Clean):
    def preprocess(self, data):
        self.sizes = [len(row) for row in data]
        return data


class KeepsThroughAHelper(Clean):
    def scale(self, row):
        self.seen.append(row)
        return row


class KeepsInAContainer(Clean):
    def preprocess(self, data):
        self.cache["last"] = data
        return data


class ReadsTheContext(Clean):
    def preprocess(self, data):
        return self.context.get_request_header(0, "x")


class ReadsWhatOthersWrite(Clean):
    def preprocess(self, data):
        return self.last


class OwnHandle(Clean):
    def handle(self, data, context):
        return data


def test_handler_without_state_may_be_pipelined():
    assert why_not(Clean()) is None
    assert why_not(BaseHandler()) is None
    assert len(Clean().pipeline()) == 2


@pytest.mark.parametrize(
    ("handler", "words"),
    [
        (KeepsDirectly, "preprocess .* keeps self.sizes"),
        (KeepsThroughAHelper, "scale .* keeps self.seen"),
        (KeepsInAContainer, "keeps self.cache"),
        (ReadsTheContext, "uses self.context"),
        (ReadsWhatOthersWrite, "postprocess .* changes self.last"),
        (OwnHandle, "one of its own"),
    ],
)
def test_handler_that_would_mix_up_requests_is_refused(handler, words):
    with pytest.raises(HandlerError, match=words):
        handler().pipeline()
