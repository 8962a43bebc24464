"""Exchanges without sockets."""

from __future__ import annotations

from flambeau.frontend.http.exchange import Exchange


class FakeConnection:
    """Keeps the bytes and events of a response."""

    common = b"common: yes\r\n"
    counts_bytes = False

    def __init__(self, *, is_draining=False):
        self.sent, self.events, self.is_draining = b"", [], is_draining

    def write(self, data):
        self.sent += data

    def abort(self):
        self.events.append("abort")

    def on_answer(self, exchange, status):
        self.events.append(status)

    def on_finished(self, exchange):
        self.events.append("finished")

    @property
    def status(self):
        return next(event for event in self.events if isinstance(event, int))

    @property
    def body(self):
        return self.sent.partition(b"\r\n\r\n")[2]


def new_exchange(connection, method="GET", target="/a?b=c", version="1.1", headers=()):
    exchange = Exchange(connection, method, target, [*headers], version, 0.0)
    exchange.request_id = "r1"
    return exchange
