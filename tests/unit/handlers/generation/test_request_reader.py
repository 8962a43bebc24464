"""The state with which another worker resumes a reply."""

from __future__ import annotations

from flambeau.handlers.generation.request_reader import encode_step, read_state


def test_steps_add_up():
    parts = [
        encode_step({0: [1, 2], 1: [3]}, set(), seed=9),
        encode_step({1: [4]}, {1}, seed=None),
        encode_step({0: [5]}, {1}, seed=None),
    ]
    state = read_state(parts)
    assert (state.seed, state.tokens, state.finished) == (9, {0: [1, 2, 5], 1: [3, 4]}, {1})


def test_unreadable_steps_give_no_state():
    assert read_state([]) is None
    assert read_state([b"nonsense"]) is None
    assert read_state([encode_step({0: [1]}, set(), seed=None)]) is None  # its beginning is missing
