"""The CUDA kernel for attention of new tokens gives what plain attention gives; which layers it knows needs no GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="there is no Triton here")

from flambeau.llm.backends.cuda import decode_attention, decode_attention_kernel
from flambeau.llm.backends.cuda.attention import ScoreParts
from flambeau.llm.backends.cuda.decode_attention_kernel import is_supported
from flambeau.llm.backends.cuda.few_row_kernel import CAPABILITY
from flambeau.llm.backends.cuda.rope import HeadParts

HAS_GPU = torch.cuda.is_available() and torch.cuda.get_device_capability() == CAPABILITY
SIZE, BLOCK_SIZE, NUM_BLOCKS, SCALE = 128, 16, 48, 0.09
POSITIONS = [0, 1, 15, 16, 17, 31, 32, 63, 64, 65, 127, 128, 129, 300, 511, 512, 513, 640, 700, 701, 0, 5, 260, 90] * 2
TABLES = torch.zeros(2, 8, 64).unbind()


def heads(**options):
    return HeadParts(**{"tables": TABLES, **options})


def cache(dtype, size=SIZE, block_size=BLOCK_SIZE, kv_heads=8):
    return torch.empty(4, block_size, kv_heads, size, dtype=dtype)


def test_it_knows_rotated_heads_of_128_numbers(monkeypatch):
    monkeypatch.setattr(decode_attention_kernel, "runs_on", lambda device: True)
    plain = 32, 64, heads(), ScoreParts(), torch.bfloat16
    assert is_supported(cache(torch.bfloat16), *plain)
    assert is_supported(cache(torch.float8_e4m3fn, block_size=32), *plain)


@pytest.mark.parametrize(
    "changes",
    [
        {"keys": cache(torch.float32)},
        {"keys": cache(torch.bfloat16, size=64)},
        {"keys": cache(torch.bfloat16, block_size=8)},
        {"num_heads": 128},  # 16 share keys and values
        {"num_tokens": 31},  # too few blocks
        {"dtype": torch.float16},
        {"heads": HeadParts()},
        {"heads": heads(rotary_size=64)},
        {"heads": heads(gains=(torch.ones(SIZE), torch.ones(SIZE)))},
        {"heads": heads(clip=8.0)},
        {"heads": heads(temperature_length=8192)},
        {"scores": ScoreParts(softcap=50.0)},
        {"scores": ScoreParts(chunk=64)},
        {"scores": ScoreParts(sinks=torch.zeros(32))},
        {"scores": ScoreParts(alibi=torch.zeros(32, 64))},
    ],
    ids=str,
)
def test_other_layers_are_left_to_the_triton_kernel(changes, monkeypatch):
    monkeypatch.setattr(decode_attention_kernel, "runs_on", lambda device: True)
    plain = {"keys": cache(torch.bfloat16), "num_heads": 32, "num_tokens": 64, "heads": heads(), "scores": ScoreParts()}
    assert not is_supported(**{**plain, "dtype": torch.bfloat16, **changes})


def test_few_blocks_have_more_warps():
    assert decode_attention_kernel.warps_for(8 * 32) == 8
    assert decode_attention_kernel.warps_for(32 * 32) == 4


def test_without_such_a_gpu_it_is_not_used():
    assert not is_supported(cache(torch.bfloat16), 32, 64, heads(), ScoreParts(), torch.bfloat16)


# ---- on a GPU ----


def rotated(x, cos, sin):
    """Heads [T, H, D] in float32, rounded as the network rounds them."""
    first, second = x.float().chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).bfloat16()


def plain(q, k, v, keys, values, positions, tables, window):
    """The outputs [T, H, D] in float32, one token after another."""
    found = []
    for token, position in enumerate(positions.tolist()):
        places = torch.arange(max(0, position + 1 - window) if window else 0, position, device=keys.device)
        at = tables[token][places // BLOCK_SIZE], places % BLOCK_SIZE
        all_k, all_v = (
            torch.cat((cached[at], new[token][None])).repeat_interleave(q.shape[1] // keys.shape[2], 1)
            for cached, new in ((keys, k), (values, v))
        )
        scores = torch.einsum("hd,phd->hp", q[token], all_k) * SCALE
        found.append(torch.einsum("hp,phd->hd", scores.softmax(-1), all_v))
    return torch.stack(found)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU of compute capability 9.0")
@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(("num_heads", "kv_heads"), [(32, 32), (32, 8), (28, 4), (24, 3)])
@pytest.mark.parametrize("cached", [torch.bfloat16, torch.float8_e4m3fn])
def test_it_attends_to_all_places_and_writes_the_cache(cached, num_heads, kv_heads, parts, window, monkeypatch):
    torch.manual_seed(0)
    device, num = torch.device("cuda"), len(POSITIONS)
    positions = torch.tensor(POSITIONS, device=device)
    keys, values = (
        torch.randn(NUM_BLOCKS * num + 1, BLOCK_SIZE, kv_heads, SIZE, device=device).to(cached) for _ in range(2)
    )
    tables = 1 + torch.randperm(NUM_BLOCKS * num, device=device).view(num, NUM_BLOCKS)
    slots = tables.gather(1, positions[:, None] // BLOCK_SIZE)[:, 0] * BLOCK_SIZE + positions % BLOCK_SIZE
    keys.view(-1, kv_heads, SIZE)[slots] = 0.0  # what a place had before does not matter
    angles = torch.rand(1024, SIZE // 2, device=device)
    cos, sin = angles.cos(), angles.sin()
    sums = torch.randn(parts, num, (num_heads + 2 * kv_heads) * SIZE, device=device)
    qkv = sums[0].bfloat16() if parts == 1 else sums
    q, k, v = (
        (qkv if parts == 1 else sums.sum(0)).bfloat16().view(num, -1, SIZE).split([num_heads, kv_heads, kv_heads], 1)
    )
    q, k = (rotated(x, cos[positions], sin[positions]) for x in (q, k))
    k, v = k.to(cached), v.to(cached)
    numbers = (x.float() for x in (q, k, v, keys, values))
    expected = plain(*numbers, positions, tables, window)
    used = []
    monkeypatch.setattr(decode_attention_kernel, "MIN_BLOCKS", 1)
    compiled = decode_attention_kernel.compiled
    monkeypatch.setattr(decode_attention_kernel, "compiled", lambda *which: used.append(compiled(*which)) or used[-1])
    found = decode_attention.attend_new_tokens(
        qkv,
        keys,
        values,
        positions,
        slots,
        tables,
        num_heads,
        HeadParts(tables=(cos, sin)),
        ScoreParts(),
        SCALE,
        window,
        torch.bfloat16,
        torch.zeros(kv_heads, num, dtype=torch.int32, device=device),
    )
    assert used
    assert used[0] is not None
    torch.testing.assert_close(found.float(), expected, atol=0.02, rtol=0.02)
    assert float((found.float() - expected).norm() / expected.norm()) < 0.005
    for tensor, new in ((keys, k), (values, v)):
        written = tensor.view(torch.uint8 if cached.itemsize == 1 else cached).view(-1, kv_heads, SIZE)[slots]
        torch.testing.assert_close(written.view(cached).float(), new.float(), atol=0.01, rtol=0.13)
        assert float((written.view(cached).float() == new.float()).float().mean()) > 0.99
