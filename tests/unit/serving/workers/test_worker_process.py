"""Who may speak to the server as a worker."""

from __future__ import annotations

import asyncio

import pytest

from flambeau.serving.workers import worker_process
from flambeau.serving.workers.worker_process import TokenGate

TOKEN = b"secret"


class Transport:
    def __init__(self):
        self.is_aborted = False
        self.protocol = None

    def abort(self):
        self.is_aborted = True

    def pause_reading(self):
        self.is_reading = False

    def resume_reading(self):
        self.is_reading = True

    def set_protocol(self, protocol):
        self.protocol = protocol


class Channel:
    transport = None
    was_open_to = None

    def connection_made(self, transport):
        self.transport = transport


def note_open(channel):
    """Take note of whom the channel was open to when the model could be sent."""
    channel.was_open_to = channel.transport if channel.transport.is_reading else None


def meet(*chunks, then=None):
    async def talk():
        strangers, transport = set(), Transport()
        gate = TokenGate(TOKEN, Channel, note_open, strangers)
        gate.connection_made(transport)
        for chunk in chunks:
            gate.data_received(chunk)
        if then:
            await then(gate)
        return transport, strangers

    return asyncio.run(talk())


def test_worker_is_let_through_once_it_has_shown_its_token():
    async def wait(gate):
        assert gate._timer.cancelled()

    transport, strangers = meet(b"sec", b"ret", then=wait)
    assert isinstance(transport.protocol, Channel)
    assert transport.protocol.was_open_to is transport  # its model is sent only then
    assert not transport.is_aborted
    assert not strangers


@pytest.mark.parametrize("word", [b"sesame", b"secret and more"])
def test_stranger_is_turned_away(word):
    transport, strangers = meet(word)
    assert transport.is_aborted
    assert not strangers


def test_whoever_shows_nothing_is_turned_away_in_time(monkeypatch):
    monkeypatch.setattr(worker_process, "TOKEN_TIMEOUT_S", 0.01)
    transport, strangers = meet(b"sec", then=lambda gate: asyncio.sleep(0.1))
    assert transport.is_aborted
    assert not strangers


def test_whoever_waits_at_the_gate_goes_with_the_listener():
    async def end(gate):
        assert gate._strangers == {gate}
        gate.close()

    transport, strangers = meet(then=end)
    assert transport.is_aborted
    assert not strangers
