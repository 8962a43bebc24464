"""The products around attention over latents for one token: on a GPU, or by Triton's interpreter."""

from __future__ import annotations

import math
import os

import pytest
import torch

pytest.importorskip("triton", reason="there is no Triton here")

from flambeau.llm.backends.cuda.latent_one_row import has_kernels, latent_queries, values_of_splits

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
TOLERANCE = 0.01 if DEVICE.type == "cuda" else 1e-5
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1",
        reason="needs a CUDA device, or Triton's interpreter (TRITON_INTERPRET=1)",
    ),
]


def relative_difference(found, expected):
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def random(*shape, dtype=DTYPE):
    return torch.randn(shape).to(DEVICE, dtype)


@pytest.mark.parametrize("position", [0, 30, 200])
def test_values_of_merged_splits(position):
    """Splits behind the position are not read."""
    torch.manual_seed(0)
    weights = random(3, 24 + 40, 80)
    to_keys, to_values = weights[:, :24], weights[:, 24:]
    assert has_kernels(to_keys, to_values)
    sums, highs = random(1, 3, 8, 80, dtype=torch.float32), random(1, 3, 8, dtype=torch.float32)
    totals = torch.rand(1, 3, 8, device=DEVICE) + 0.5
    places = 16
    share = math.ceil(math.ceil((position + 1) / 8) / places) * places
    num_used = math.ceil((position + 1) / share)
    sums[:, :, num_used:] = torch.nan
    shares = torch.exp(highs[..., :num_used])
    merged = (sums[:, :, :num_used] * shares.unsqueeze(-1)).sum(2)
    merged /= (totals[..., :num_used] * shares).sum(2, keepdim=True)
    expected = torch.einsum("thr,hvr->thv", merged, to_values.float()).flatten(1)
    positions = torch.tensor([position], device=DEVICE)
    found = values_of_splits((sums, highs, totals), positions, to_values, places, DTYPE)
    assert relative_difference(found, expected) < TOLERANCE


def test_queries_of_latents():
    torch.manual_seed(0)
    weights, q = random(3, 24 + 40, 80), random(3, 24 + 8)
    found = latent_queries(q, weights[:, :24])
    expected = torch.einsum("hn,hnr->hr", q[:, :24].float(), weights[:, :24].float())
    assert relative_difference(found.squeeze(1), expected) < TOLERANCE
