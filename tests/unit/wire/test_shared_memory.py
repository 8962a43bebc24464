from __future__ import annotations

import os

import pytest

from flambeau.wire.shared_memory import KEPT_BYTES, SMALLEST, SegmentPool, SegmentReader

pytestmark = pytest.mark.skipif(not SegmentPool.is_supported(), reason="needs memory files and /proc")


def test_reader_sees_what_the_pool_wrote():
    pool, reader = SegmentPool(), SegmentReader()
    segment = pool.take(5)
    segment.memory[:5] = b"hello"
    assert reader.can_read(segment.describe(1))
    assert reader.read(segment.describe(5)) == bytearray(b"hello")
    segment.memory[:5] = b"world"
    assert reader.read(segment.describe(4)) == bytearray(b"worl")
    segment.close()


def test_segment_closes_its_descriptor_once_even_where_that_fails():
    segment = SegmentPool().take(5)
    os.close(segment.fd)
    with pytest.raises(OSError, match="Bad file descriptor"):
        segment.close()
    segment.close()  # the number may belong to somebody else by now


def test_segments_are_reused_by_size():
    pool = SegmentPool()
    first = pool.take(SMALLEST + 1)
    pool.give_back(first)
    assert pool.take(SMALLEST * 2) is first
    assert pool.take(SMALLEST) is not first
    pool.close()


def test_pool_opens_only_so_many_files():
    pool = SegmentPool(max_open=2)
    first, second = pool.take(1), pool.take(1)
    with pytest.raises(OSError, match="segments of shared memory are in use"):
        pool.take(1)
    pool.give_back(second)
    large = pool.take(SMALLEST + 1)  # in place of the one that is free
    assert pool.num_open == 2
    pool.give_back(first)
    pool.give_back(large)
    pool.close()
    assert pool.num_open == 0


def test_pool_keeps_only_so_much():
    pool = SegmentPool()
    segments = [pool.take(KEPT_BYTES // 2) for _ in range(4)]
    for segment in segments:
        pool.give_back(segment)
    kept = [segment for segment in segments if os.path.exists(f"/proc/self/fd/{segment.fd}")]
    assert sum(segment.capacity for segment in kept) <= KEPT_BYTES
    pool.close()


def test_segment_that_is_gone_cannot_be_read():
    pool = SegmentPool()
    segment = pool.take(1)
    shared = segment.describe(1)
    segment.close()
    assert not SegmentReader().can_read(shared)
    assert not SegmentReader().can_read(None)


def test_free_segments_are_closed_when_none_was_taken_for_a_while():
    pool = SegmentPool()
    pool.give_back(pool.take(10))
    pool.close_unused()
    assert pool.num_open == 1  # it was taken since the last call, of which there was none
    pool.close_unused()
    assert pool.num_open == 0
