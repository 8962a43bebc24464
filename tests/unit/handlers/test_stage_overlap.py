from __future__ import annotations

import pytest

from flambeau.errors import HandlerError
from flambeau.handlers.base import BaseHandler
from flambeau.handlers.stage_overlap import find_shared_state
from flambeau.handlers.text_classifier import TextClassifier
from flambeau.handlers.vision_handlers import ImageClassifier


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


class KeepsInABase(KeepsDirectly):
    def preprocess(self, data):
        return super().preprocess(data)


class KeepsInAHookOfOurs(TextClassifier):
    def clean(self, text):
        self.last = text
        return super().clean(text)


class KeepsBySetattr(Clean):
    def preprocess(self, data):
        setattr(self, "sizes", data)  # noqa: B010
        return data


class OwnHandleOfTheInstance(Clean):
    def __init__(self):
        super().__init__()
        self.handle = lambda data, context: data


class OwnHandle(Clean):
    def handle(self, data, context):
        return data


def test_handler_without_state_may_be_pipelined():
    assert find_shared_state(Clean()) is None
    assert find_shared_state(ImageClassifier()) is None
    assert find_shared_state(TextClassifier()) is None
    assert find_shared_state(BaseHandler()) is None
    assert len(Clean().pipeline()) == 2


@pytest.mark.parametrize(
    ("handler", "words"),
    [
        (KeepsDirectly, "preprocess .* changes self.sizes"),
        (KeepsThroughAHelper, "scale .* changes self.seen"),
        (KeepsInAContainer, "changes self.cache"),
        (ReadsTheContext, "uses self.context"),
        (ReadsWhatOthersWrite, "postprocess .* changes self.last"),
        (OwnHandle, "one of its own"),
        (OwnHandleOfTheInstance, "one of its own"),
        (KeepsInABase, "preprocess .* changes self.sizes"),
        (KeepsInAHookOfOurs, "clean .* changes self.last"),
        (KeepsBySetattr, "changes self.__dict__ through setattr"),
    ],
)
def test_handler_that_would_mix_up_requests_is_rejected(handler, words):
    with pytest.raises(HandlerError, match=words):
        handler().pipeline()
