"""Attention of new tokens gives what plain attention gives, also where the splits of long sequences are merged."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton", reason="there is no Triton here")

from flambeau.llm.backends.cuda.attention import ScoreParts
from flambeau.llm.backends.cuda.decode_attention import attend_new_tokens
from flambeau.llm.backends.cuda.rope import HeadParts

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BLOCK_SIZE, NUM_BLOCKS = 16, 40
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1",
        reason="needs a CUDA device, or Triton's interpreter (TRITON_INTERPRET=1)",
    ),
]


def plain(qkv, keys, values, positions, tables, scale, window, num_heads):
    """The outputs [T, H, D], one token after another."""
    kv_heads, size = keys.shape[2:]
    found = []
    for token, position in enumerate(positions.tolist()):
        q, k, v = torch.split(qkv[token].view(-1, size), [num_heads, kv_heads, kv_heads])
        places = torch.arange(max(0, position + 1 - window) if window else 0, position, device=keys.device)
        at = tables[token][places // BLOCK_SIZE], places % BLOCK_SIZE
        all_k, all_v = (
            torch.cat((cache[at], new[None])).repeat_interleave(num_heads // kv_heads, 1)
            for cache, new in ((keys, k), (values, v))
        )
        scores = torch.einsum("hd,phd->hp", q, all_k) * scale
        found.append(torch.einsum("hp,phd->hd", scores.softmax(-1), all_v))
    return torch.stack(found)


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize(("num_heads", "kv_heads"), [(2, 2), (6, 2), (8, 1)])
@pytest.mark.parametrize("positions", [[0], [63], [64], [65, 0, 500], [300]])
def test_splits_are_merged(positions, num_heads, kv_heads, window):
    torch.manual_seed(0)
    positions_T, size = torch.tensor(positions, device=DEVICE), 32
    keys, values = torch.randn(2, NUM_BLOCKS * len(positions) + 1, BLOCK_SIZE, kv_heads, size, device=DEVICE)
    tables = 1 + torch.randperm(NUM_BLOCKS * len(positions), device=DEVICE).view(len(positions), NUM_BLOCKS)
    qkv = torch.randn(len(positions), (num_heads + 2 * kv_heads) * size, device=DEVICE)
    expected = plain(qkv, keys, values, positions_T, tables, 0.2, window, num_heads)
    slots = tables.gather(1, positions_T[:, None] // BLOCK_SIZE)[:, 0] * BLOCK_SIZE + positions_T % BLOCK_SIZE
    counters = torch.zeros(kv_heads, 4, dtype=torch.int32, device=DEVICE)
    places = positions_T, slots, tables
    options = num_heads, HeadParts(), ScoreParts(), 0.2, window, torch.float32
    found = attend_new_tokens(qkv, keys, values, *places, *options, counters)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
