"""Tiles of the pairs of rows and experts: every pair is in one tile, of its own expert."""

from __future__ import annotations

import pytest
import torch

from flambeau.llm.backends.cuda.expert_tiles import searched_pairs, sorted_tiles, tile_rows


@pytest.mark.parametrize("rows", [16, 64])
@pytest.mark.parametrize(("num_rows", "num_experts", "num_chosen"), [(1, 8, 2), (70, 8, 2), (40, 128, 8), (300, 5, 5)])
def test_every_pair_is_in_one_tile_of_its_expert(num_rows, num_experts, num_chosen, rows):
    torch.manual_seed(num_rows)
    chosen = torch.rand(num_rows, num_experts).topk(num_chosen, dim=-1)[1].int()
    order, tiles = sorted_tiles(chosen, num_experts, rows)
    found = []
    for expert, first, stop in tiles.tolist():
        pairs = order[first : min(first + rows, stop)]
        assert (chosen.flatten()[pairs] == expert).all()
        found += pairs.tolist()
    assert sorted(found) == [*range(chosen.numel())]


def test_the_number_of_tiles_depends_on_the_shape_only():
    one_expert = torch.zeros(100, 1, dtype=torch.int32)
    all_experts = torch.arange(100, dtype=torch.int32).view(100, 1) % 32
    assert len(sorted_tiles(one_expert, 32, 16)[1]) == len(sorted_tiles(all_experts, 32, 16)[1])


def test_unused_tiles_are_empty():
    _, tiles = sorted_tiles(torch.full((20, 1), 31, dtype=torch.int32), 32, 16)
    used = [tile for tile in tiles.tolist() if tile[1] < tile[2]]
    assert used == [[31, 0, 20], [31, 16, 20]]


@pytest.mark.parametrize(("num_pairs", "rows"), [(2, 16), (128, 16), (136, 32), (512, 64), (100_000, 128)])
def test_tiles_have_room_for_what_an_expert_gets_on_average(num_pairs, rows):
    assert tile_rows(num_pairs, 8) == rows


def test_few_pairs_are_searched_and_many_are_sorted():
    assert [searched_pairs(number) for number in (2, 64, 65, 1024, 1025)] == [64, 64, 256, 1024, 0]
