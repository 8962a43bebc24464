"""StreamReader: the bytes of a streamed reply → its parts; EventReader: the server-sent events in them."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from flambeau.client.replies import UNREADABLE, error_of, read_as, unreadable
from flambeau.client.transport import MAX_RESPONSE_BYTES, too_large
from flambeau.http_client import HttpReply

EVENTS = "text/event-stream"


@dataclass(frozen=True, slots=True)
class Event:
    """One server-sent event."""

    kind: str
    data: str


class EventReader:
    """Bytes of an event stream → events (the format of WHATWG HTML, section 9.2)."""

    def __init__(self, max_bytes: int = MAX_RESPONSE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._rest: list[bytes] = []  # of a line that has not ended
        self._rest_bytes = 0
        self._kind = ""
        self._data: list[str] = []
        self._data_bytes = 0

    def feed(self, data: bytes) -> Iterator[Event]:
        if self._rest_bytes + self._data_bytes > self._max_bytes:
            raise too_large(200, self._max_bytes)
        if b"\n" not in data:
            self._rest.append(data)
            self._rest_bytes += len(data)
            return
        *lines, rest = (b"".join([*self._rest, data]) if self._rest else data).split(b"\n")
        self._rest, self._rest_bytes = [rest] if rest else [], len(rest)
        for raw in lines:
            line = raw.removesuffix(b"\r").decode("utf-8", "replace")
            if not line:
                if self._data:
                    yield Event(self._kind or "message", "\n".join(self._data))
                self._kind, self._data, self._data_bytes = "", [], 0
                continue
            name, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if name == "data":
                self._data.append(value)
                self._data_bytes += len(raw)
            elif name == "event":
                self._kind = value


class StreamReader:
    """The body of a streamed reply → its parts. Without events, whatever arrives together is one."""

    def __init__(self, head: HttpReply, max_bytes: int = MAX_RESPONSE_BYTES) -> None:
        self._head = head
        self._has_events = head.headers.get("content-type", "").startswith(EVENTS)
        self._events = EventReader(max_bytes)

    def parts(self, data: bytes) -> Iterator[str | bytes]:
        if not self._has_events:
            yield as_text(data)
            return
        for event in self._events.feed(data):
            if event.kind == "error":
                raise error_of(HttpReply(status_in(event.data), self._head.headers, event.data.encode()))
            if event.kind == "base64":
                yield read_as(bytes_of, self._reply(event.data))
            elif event.kind != "end":
                yield event.data

    def texts(self, data: bytes, text: Callable[[Any], str]) -> Iterator[str]:
        """The texts in the events of a generation."""
        for part in self.parts(data):
            if part == "[DONE]" or isinstance(part, bytes):
                continue
            try:
                document = json.loads(part)
                is_error = "error" in document
                found = "" if is_error else text(document)
            except UNREADABLE:
                raise unreadable(self._reply(part)) from None
            if is_error:
                raise error_of(HttpReply(status_in(part), self._head.headers, part.encode()))
            if found:
                yield found

    def _reply(self, part: str) -> HttpReply:
        return HttpReply(self._head.status, self._head.headers, part.encode())


def bytes_of(reply: HttpReply) -> bytes:
    return base64.b64decode(reply.body)


def as_text(data: bytes) -> str | bytes:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


def status_in(text: str) -> int:
    """The status in the document of an error event."""
    try:
        code = json.loads(text)["error"]["code"]
        return code if isinstance(code, int) else 500
    except (ValueError, LookupError, TypeError, RecursionError):
        return 500
