"""Vectors of tokens → one vector."""

from __future__ import annotations

import pytest

from flambeau.errors import HandlerError

np = pytest.importorskip("numpy")

from flambeau.handlers.embedding.pooling import normalize, pool, read_modes  # noqa: E402

HIDDEN = np.array([[[1, -8], [3, -4], [99, 99], [99, 99]], [[1, 2], [3, 4], [5, 6], [7, 8]]], np.float32)
MASK = np.array([[1, 1, 0, 0], [1, 1, 1, 1]], np.float32)
EXPECTED = {
    "cls": [[1, -8], [1, 2]],
    "max": [[3, -4], [7, 8]],
    "mean": [[2, -6], [4, 5]],
    "mean_sqrt_len": [[4 / 2**0.5, -12 / 2**0.5], [8, 10]],
}


@pytest.mark.parametrize("mode", EXPECTED)
def test_arrays_and_tensors_are_pooled_alike(mode):
    [found] = pool(HIDDEN, MASK, [mode])
    assert found == pytest.approx(np.array(EXPECTED[mode]))
    torch = pytest.importorskip("torch")
    [tensor] = pool(torch.from_numpy(HIDDEN), torch.from_numpy(MASK), [mode])
    assert tensor.numpy() == pytest.approx(found)


def test_vectors_get_length_one_and_zero_stays_zero():
    assert normalize(np.array([[3.0, 4.0], [0.0, 0.0]])).tolist() == [[0.6, 0.8], [0.0, 0.0]]


def test_modes_are_read_from_the_config():
    assert read_modes({}) == ("mean",)
    assert read_modes({"pooling_mode_max_tokens": True, "pooling_mode_cls_token": True}) == ("cls", "max")
    with pytest.raises(HandlerError, match="pooling_mode_lasttoken"):
        read_modes({"pooling_mode_lasttoken": True})
    with pytest.raises(HandlerError, match="include_prompt"):
        read_modes({"include_prompt": False})
