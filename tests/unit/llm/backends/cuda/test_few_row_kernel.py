"""The CUDA kernel for a few rows gives what the layers give; how it divides work needs no GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from flambeau.llm.backends.cuda import few_row_kernel
from flambeau.llm.backends.cuda.few_row_kernel import (
    BFLOAT16,
    BLOCKS,
    CAPABILITY,
    FP8,
    INT4,
    INT8,
    STREAM_BLOCKS,
    STREAM_ROWS,
    best_division,
    stream_division,
)
from flambeau.llm.quantize.int4 import Int4Linear
from flambeau.llm.quantize.packed_layers import CudaInt4Linear
from flambeau.llm.quantize.row_scaled import Fp8Linear, Int8Linear

H200 = 132
MAX_SHARED_BYTES = 227 << 10
HAS_GPU = torch.cuda.is_available() and torch.cuda.get_device_capability() == CAPABILITY
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs a GPU of compute capability 9.0")
QUANTIZERS = {
    "int8": Int8Linear.from_linear,
    "fp8": Fp8Linear.from_linear,
    "int4 in groups of 64": lambda linear: CudaInt4Linear(Int4Linear.from_linear(linear, 64)),
    "int4 in groups of 128": lambda linear: CudaInt4Linear(Int4Linear.from_linear(linear, 128)),
}


@pytest.mark.parametrize(("rows", "kind"), BLOCKS)
def test_all_blocks_fit_on_a_multiprocessor(rows, kind):
    for block in BLOCKS[rows, kind]:
        assert block.shared_bytes(kind, rows) <= MAX_SHARED_BYTES
        assert block.threads >= block.outputs // 2  # a thread stores two outputs
        assert block.tiles % 2 == 0  # two at a time


@pytest.mark.parametrize(("width", "size"), [(12288, 4096), (4096, 4096), (4096, 11008), (6144, 4096), (4096, 14336)])
@pytest.mark.parametrize("kind", [INT8, FP8, INT4])
def test_sums_are_split_so_that_most_multiprocessors_have_work(width, size, kind):
    division = best_division(kind, width, size, 32, H200, gates=False)
    num_blocks = -(-width // division.block.outputs) * division.parts
    slots = H200 * division.block.per_processor
    assert num_blocks / (-(-num_blocks // slots) * slots) > 0.7


def test_what_it_does_not_support_is_left_to_the_other_kernels():
    assert best_division(INT4, 4096, 4096, 33, H200, gates=False) is None  # another kernel's rows
    assert best_division(INT8, 4096, 4096 + 32, 32, H200, gates=False) is None  # inputs
    assert best_division(INT8, 4096 + 8, 4096, 32, H200, gates=False) is None  # outputs
    assert best_division(INT8, 32000, 4096, 32, H200, gates=False) is None  # a vocabulary
    assert best_division(BFLOAT16, 4096, 4096, 32, H200, gates=False) is None  # another kernel's
    assert few_row_kernel.division(torch.zeros(4, 64), nn.Linear(64, 32), 32, 4, gates=False) is None  # no GPU


def test_scales_of_4_bit_layers_are_kept_once_for_each_order():
    layer = CudaInt4Linear(Int4Linear.from_linear(nn.Linear(128, 32, bias=False, dtype=torch.bfloat16), 64))
    plain, gated = (few_row_kernel.kernel_scales(layer, is_gated) for is_gated in (False, True))
    assert few_row_kernel.kernel_scales(layer, False) is plain
    assert few_row_kernel.kernel_scales(layer, True) is gated
    # [tiles of 16 rows, pieces, rows of a tile, scale and minimum]; in a gated layer 8 rows and those that they gate
    assert plain.shape == (2, 2, 16, 2)
    torch.testing.assert_close(plain[1, 0, 3, 0], layer.scales[19, 0])
    torch.testing.assert_close(gated[1, 1, 0, 3], torch.stack((layer.scales[11, 1], layer.minimums[11, 1])))
    torch.testing.assert_close(gated[1, 1, 1, 3, 0], layer.scales[27, 1])


@pytest.mark.parametrize(
    ("width", "size", "rows", "is_divided"),
    [
        (4096, 11008, 8, True),
        (4096, 4096, 2, True),
        (3584, 18944, 8, True),
        (8192, 28672, 8, True),
        (4096, 4096, 1, False),
        (4096, 4096, 9, False),
        (2048, 8192, 8, False),  # half of the multiprocessors would have no work
        (5120, 13824, 8, False),  # some would have twice as much
        (4096, 4000, 8, False),
    ],
)
def test_products_that_have_work_for_all_multiprocessors_add_to_the_stream(width, size, rows, is_divided):
    for kind in (INT8, FP8, INT4):
        found = stream_division(kind, width, size, rows, H200)
        assert (found is not None) == is_divided


@pytest.mark.parametrize("kind", STREAM_BLOCKS)
def test_blocks_that_add_to_the_stream_fit(kind):
    block = STREAM_BLOCKS[kind]
    assert block.shared_bytes(kind, STREAM_ROWS) <= MAX_SHARED_BYTES
    assert block.threads >= block.outputs // 2


@pytest.mark.gpu
@pytest.mark.timeout(300)
@needs_gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("kind", QUANTIZERS)
@pytest.mark.parametrize("gates", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("rows", [2, 13, 32])
def test_it_gives_what_the_layer_gives(kind, gates, rows):
    torch.manual_seed(0)
    for width, size, has_bias in ((1264, 512, True), (6016, 1024, False)):  # the last blocks have fewer outputs
        outputs = 2 * width if gates else width
        linear = nn.Linear(size, outputs, bias=has_bias, dtype=torch.bfloat16, device="cuda").requires_grad_(False)
        layer = QUANTIZERS[kind](linear)
        x = torch.randn(rows, size, dtype=torch.bfloat16, device="cuda")
        division = few_row_kernel.division(x, layer, width, rows, gates=gates)
        with torch.inference_mode():
            weight = layer.dequantize(torch.float32)
            expected = nn.functional.linear(x.float(), weight.float(), linear.bias.float() if has_bias else None)
            if gates:
                gate, up = expected.chunk(2, dim=-1)
                expected = nn.functional.silu(gate) * up
            scales = few_row_kernel.kernel_scales(layer, gates)
            y = few_row_kernel.multiply(x, layer, scales, width, division, gates=gates).float()
        y = y.sum(0) if division.parts > 1 else y
        assert y.shape == (rows, width)
        assert (y - expected).norm() <= 0.005 * expected.norm()


@pytest.mark.gpu
@needs_gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_inputs_that_are_not_finite_give_outputs_that_are_not(value):
    layer = Int8Linear.from_linear(nn.Linear(512, 1024, bias=False, dtype=torch.bfloat16, device="cuda"))
    x = torch.randn(32, 512, dtype=torch.bfloat16, device="cuda")
    x[5, 100] = value
    with torch.inference_mode():
        division = few_row_kernel.division(x, layer, 1024, 32, gates=False)
        y = few_row_kernel.multiply(x, layer, few_row_kernel.kernel_scales(layer, False), 1024, division, gates=False)
    y = y.float().sum(0) if division.parts > 1 else y.float()
    assert not y[5].isfinite().any()
    assert y[4].isfinite().all()
    assert y[6].isfinite().all()
