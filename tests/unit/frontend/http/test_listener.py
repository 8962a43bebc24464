"""ConnectionRoom and AddressCounts: which connections there is room for."""

from __future__ import annotations

import pytest

from flambeau.frontend.http.listener import AddressCounts, ConnectionRoom, HttpLimits, Listener

LIMITS = HttpLimits(max_body_bytes=1, share_from_bytes=1, keep_alive_s=1, read_timeout_s=1)


class Idle:
    is_idle, is_busy, since, unfinished_bytes = True, False, 0.0, 0

    def __init__(self, listener):
        self.listener = listener
        listener.connections.add(self)

    def abort(self):
        self.listener.connections.discard(self)


@pytest.fixture
def ports():
    """Two ports of a server with room for 100 connections."""
    room = ConnectionRoom(100, num_ports=2)
    room.listeners += [Listener(None, LIMITS, None, room=room) for _ in range(2)]
    return room.listeners


def fill(listener, count):
    for _ in range(count):
        Idle(listener)


def test_one_port_may_have_all_but_the_reserve_of_the_other(ports):
    fill(ports[0], 95)
    assert not ports[0].room.is_full_for(ports[0])
    fill(ports[0], 1)
    assert ports[0].room.is_full_for(ports[0])
    fill(ports[1], 5)
    assert not ports[1].room.is_full_for(ports[1])


def test_the_port_with_most_connections_closes_some(ports):
    fill(ports[0], 60)
    fill(ports[1], 41)
    assert ports[1].room.is_full_for(ports[1])
    assert ports[1].room.make_room(ports[1], None)
    assert (len(ports[0].connections), len(ports[1].connections)) == (54, 41)


def test_handshakes_are_counted_and_give_way_first(ports):
    cancelled = []

    class Silent:
        def cancel(self):
            cancelled.append(self)

    silent = [Silent() for _ in range(90)]
    ports[0].handshakes.update((each, 0.0) for each in silent)
    fill(ports[0], 6)
    assert ports[0].room.is_full_for(ports[0])
    assert ports[0].room.make_room(ports[0], silent[-1])
    assert cancelled == silent[:9]
    assert len(ports[0].connections) == 6


def test_the_newest_connection_is_never_closed_to_make_room_for_itself(ports):
    newest = Idle(ports[0])
    assert not ports[0].room.make_room(ports[0], newest)
    assert newest in ports[0].connections


def test_connections_of_an_address_are_counted():
    counts = AddressCounts(2)
    assert [bool(counts.add("a")) for _ in range(3)] == [False, False, True]
    assert not counts.add("b")
    counts.remove("a")
    counts.remove("a")
    assert not counts.add("a")
    assert not any(counts.add("") for _ in range(5))  # unix sockets
