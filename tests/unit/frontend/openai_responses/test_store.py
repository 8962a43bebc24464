"""Responses that are kept for a while."""

from __future__ import annotations

from flambeau.frontend.openai_responses.store import ResponseStore

MESSAGES = [{"role": "user", "content": "a"}]


def put(store, id, owner="", now=0.0):
    store.put(id, owner, {"id": id}, [{"id": "msg_1"}], MESSAGES, now)


def test_response_is_found_until_it_expires():
    store = ResponseStore(kept_s=10)
    put(store, "a")
    assert store.get("a", "", 9.9).conversation() == MESSAGES
    assert store.get("a", "", 9.9).document == b'{"id":"a"}'
    assert store.get("a", "", 10.0) is None
    put(store, "b", now=10.0)
    assert len(store) == 1


def test_response_belongs_to_the_key_that_made_it():
    store = ResponseStore()
    put(store, "a", owner="ann")
    assert store.get("a", "bob", 0) is None
    assert not store.delete("a", "bob", 0)
    assert store.delete("a", "ann", 0)
    assert (len(store), store.num_bytes) == (0, 0)


def test_oldest_go_first_when_there_are_too_many_bytes():
    store = ResponseStore()
    put(store, "a")
    size = store.num_bytes
    store = ResponseStore(max_bytes=2 * size)
    for id in "abc":
        put(store, id)
    assert [store.get(id, "", 0) is not None for id in "abc"] == [False, True, True]
    assert store.num_bytes == 2 * size
