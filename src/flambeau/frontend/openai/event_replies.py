"""EventReply: a reply that may be a stream of OpenAI's events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from flambeau.config.server import ErrorStyle
from flambeau.errors import FlambeauError, ReplyNotRead
from flambeau.frontend.http.errors import openai_error_body
from flambeau.frontend.http.exchange import Exchange
from flambeau.frontend.http.inference import Prediction
from flambeau.frontend.openai.responses import EVENT_STREAM, described
from flambeau.serving.model import Model


class EventReply(Prediction):
    """Sends events if the request asks for them; a stream that has started ends with an error event."""

    __slots__ = ("is_streamed",)

    def __init__(self, exchange: Exchange, model: Model, style: ErrorStyle, *, is_streamed: bool) -> None:
        super().__init__(exchange, model, style)
        self.is_streamed = is_streamed

    def send_events(self, events: Sequence[bytes], *, ends: bool) -> None:
        exchange = self.exchange
        if not exchange.is_started:
            self.model.answers[200] += 1
            exchange.start(200, EVENT_STREAM, has_trailer=False)
        exchange.send((b"".join(events),), ends=ends)

    def reject(self, error: FlambeauError) -> None:
        """End the job, whose further parts are dropped, with an error."""
        if self.exchange.on_gone is not None:
            self.exchange.on_gone()
        self.on_error(error)

    def on_error(self, error: FlambeauError) -> None:
        if not (self.is_streamed and self.exchange.is_started) or isinstance(error, ReplyNotRead):
            super().on_error(error)
            return
        self.log(error)
        self.exchange.note_error(error)
        status, message, cause = described(error, self.style)
        self.model.count_broken(status)
        self.exchange.send((b"data: %b\n" % openai_error_body(status, message, error, cause),), ends=True)


def to_event(document: Mapping[str, Any]) -> bytes:
    return b"data: %b\n\n" % msgspec.json.encode(document)
