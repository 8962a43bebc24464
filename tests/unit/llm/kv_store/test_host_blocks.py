"""Places in host memory: the oldest block loses its place, unless it is being copied."""

from __future__ import annotations

from flambeau.llm.kv_store.host_blocks import HostBlocks


def add(blocks: HostBlocks, key: bytes) -> int | None:
    place = blocks.take()
    if place is not None:
        blocks.add(key, place)
    return place


def test_the_block_used_least_recently_loses_its_place():
    blocks = HostBlocks(2)
    places = {key: add(blocks, key) for key in (b"a", b"b")}
    blocks.unpin(b"a")
    blocks.unpin(b"b")
    blocks.touch(b"a")
    assert add(blocks, b"c") == places[b"b"]
    assert (b"a" in blocks, b"b" in blocks, len(blocks)) == (True, False, 2)


def test_a_block_that_is_copied_keeps_its_place():
    blocks = HostBlocks(2)
    add(blocks, b"a")
    add(blocks, b"b")
    assert blocks.take() is None
    blocks.unpin(b"b")
    assert add(blocks, b"c") is not None
    assert b"a" in blocks
    assert b"b" not in blocks


def test_a_place_is_given_back():
    blocks = HostBlocks(1)
    place = blocks.take()
    assert blocks.take() is None
    blocks.give_back(place)
    assert blocks.take() == place


def test_a_block_that_two_threads_add_has_one_place():
    blocks = HostBlocks(2)
    first, second = blocks.take(), blocks.take()
    blocks.add(b"a", first)
    blocks.add(b"a", second)
    assert blocks.pin(b"a") == first
    assert blocks.take() == second
    for _ in range(3):
        blocks.unpin(b"a")
    assert blocks.take() == first
