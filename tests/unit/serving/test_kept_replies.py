"""Replies that are kept up to a size and an age."""

from __future__ import annotations

from types import SimpleNamespace

from flambeau.serving.kept_replies import KeptReplies


def reply(size_bytes, expires=100.0):
    return SimpleNamespace(size_bytes=size_bytes, expires=expires)


def test_a_reply_is_kept_until_it_expires():
    kept = KeptReplies(100)
    kept.keep("a", one := reply(10))
    assert kept.find("a", 99.0) is one
    assert kept.find("b", 0.0) is None
    assert kept.find("a", 100.0) is None
    assert kept.size_bytes == 0


def test_the_oldest_leaves_first_unless_it_was_touched():
    kept = KeptReplies(100)
    for key in "abc":
        kept.keep(key, reply(30))
    kept.touch("a")
    kept.keep("d", reply(30))
    assert [key for key in "abcd" if kept.find(key, 0.0)] == ["a", "c", "d"]
    assert kept.size_bytes == 90


def test_a_reply_replaces_the_one_before_it_and_none_is_left_of_a_too_large_one_or_after_clear():
    kept = KeptReplies(100)
    kept.keep("a", reply(60))
    kept.keep("a", reply(70))
    assert kept.size_bytes == 70
    kept.keep("a", reply(101))
    assert (kept.find("a", 0.0), kept.size_bytes) == (None, 0)
    kept.keep("b", reply(30))
    kept.clear()
    assert (kept.find("b", 0.0), kept.size_bytes) == (None, 0)
