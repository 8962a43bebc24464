"""Rows and columns of images rotate a prompt as in transformers, but for a number that is the same for all tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flambeau.llm.core.sequence import EncodedMedia, PromptMedia
from flambeau.llm.executor.image_positions import rotary_positions
from support.grid_vision_models import IMAGE, grid_prompt, grid_reference

GRIDS = [(2, 5), (1, 7), (4, 4), (6, 1)]


def placed(*parts: list[int] | tuple[int, int]) -> tuple[list[int], tuple[PromptMedia, ...]]:
    """A prompt with images of so many rows and columns."""
    ids: list[int] = []
    images = []
    for part in parts:
        if isinstance(part, list):
            ids += part
            continue
        number = part[0] * part[1]
        image = EncodedMedia(b"", torch.zeros(number, 1), part)
        images.append(PromptMedia(len(ids) + 1, len(ids) + 1 + number, image, False))
        ids += grid_prompt(number)
    return ids, tuple(images)


@pytest.fixture(scope="module")
def reference():
    return grid_reference("qwen_2.5")


@pytest.mark.parametrize("kind", ["qwen_2.5", "qwen_3"])
@pytest.mark.parametrize("grids", [GRIDS, GRIDS[:1], GRIDS[1:2], [(3, 3), (3, 3)]])
def test_positions_are_those_of_transformers_counted_from_the_end(kind, grids):
    parts = [[20, 21, 22], *(part for grid in grids for part in (grid, [30, 31]))]
    ids, images = placed(*parts)
    model = grid_reference(kind).model
    expected, delta = model.get_rope_index(
        torch.tensor([ids]),
        mm_token_type_ids=torch.tensor([[int(token == IMAGE) for token in ids]]),
        image_grid_thw=torch.tensor([(1, 2 * rows, 2 * columns) for rows, columns in grids]),
    )
    wanted = expected[:, 0].numpy() - int(delta)
    for start in range(len(ids)):
        for length in (1, 2, 7, len(ids) - start):
            found = rotary_positions(images, start, min(length, len(ids) - start))
            own = wanted[:, start : start + length]
            if found is None:
                found = np.tile(np.arange(start, start + own.shape[1]), (3, 1))
            assert (found == own).all()
    assert wanted.max() < len(ids), "the tables of angles have no more rows"


def test_behind_the_last_image_a_place_is_the_position():
    ids, images = placed([20], (2, 5), [30, 31])
    assert rotary_positions(images, images[-1].end, 2) is None
    assert rotary_positions((), 0, 5) is None
    found = rotary_positions(images, 0, len(ids))
    assert found is not None
    assert found[:, -2:].tolist() == [[len(ids) - 2, len(ids) - 1]] * 3


def test_an_image_of_one_row_saves_nothing():
    ids, images = placed([20], (1, 7), [30])
    assert images[0].num_saved == 0
    found = rotary_positions(images, 0, len(ids))
    assert found is not None
    assert found[:, 2:9].tolist() == [[2] * 7, [2] * 7, [*range(2, 9)]]
