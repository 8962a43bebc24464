"""What is kept of a reply, so that another worker can go on with it."""

from __future__ import annotations

from flambeau.handlers.generation.progress import encode_step, read_progress


def test_steps_add_up():
    state = [
        encode_step({0: [1, 2], 1: [3]}, set(), seed=9),
        encode_step({1: [4]}, {1}, seed=None),
        encode_step({0: [5]}, {1}, seed=None),
    ]
    progress = read_progress(state)
    assert (progress.seed, progress.tokens, progress.finished) == (9, {0: [1, 2, 5], 1: [3, 4]}, {1})


def test_what_cannot_be_read_is_no_progress():
    assert read_progress([]) is None
    assert read_progress([b"nonsense"]) is None
    assert read_progress([encode_step({0: [1]}, set(), seed=None)]) is None  # its beginning is missing
