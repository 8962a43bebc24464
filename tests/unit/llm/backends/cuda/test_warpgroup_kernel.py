"""The CUDA kernel for up to 128 rows gives what the layers give; how it divides work needs no GPU."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from flambeau.llm.backends.cuda import backend, few_row_kernel, prompt_graphs, warpgroup_kernel
from flambeau.llm.backends.cuda.few_row_kernel import BFLOAT16, CAPABILITY, FP8, INT4, INT8
from flambeau.llm.backends.cuda.warpgroup_kernel import (
    BEST_ROWS,
    NO_ADAPTERS,
    ProductAdapters,
    WarpgroupDivision,
    best_division,
    block_shape,
)
from flambeau.llm.quantize.int4 import Int4Linear
from flambeau.llm.quantize.packed_layers import CudaFp8Linear, CudaInt4Linear
from flambeau.llm.quantize.row_scaled import Fp8Linear, Int8Linear

H200 = 132
MAX_SHARED_BYTES = 227 << 10
ALL_ROWS = range(2, 129)
HAS_GPU = torch.cuda.is_available() and torch.cuda.get_device_capability() == CAPABILITY
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="needs a GPU of compute capability 9.0")
# The shapes of 7B and 8B networks, and whether half of the outputs gate the others.
SHAPES = [
    (12288, 4096, False),
    (4096, 4096, False),
    (11008, 4096, True),
    (4096, 11008, False),
    (6144, 4096, False),
    (14336, 4096, True),
]
LAYERS = {
    "bfloat16": (BFLOAT16, lambda linear: linear),
    "int8": (INT8, Int8Linear.from_linear),
    "fp8": (FP8, lambda linear: CudaFp8Linear(Fp8Linear.from_linear(linear))),
    "int4 in groups of 64": (INT4, lambda linear: CudaInt4Linear(Int4Linear.from_linear(linear, 64))),
    "int4 in groups of 128": (INT4, lambda linear: CudaInt4Linear(Int4Linear.from_linear(linear, 128))),
}


@pytest.fixture
def for_all_rows(monkeypatch):
    """All kinds and numbers of rows that the kernel can compute, also where others are faster."""
    for kind in (BFLOAT16, INT8, FP8, INT4):
        monkeypatch.setitem(BEST_ROWS, kind, ALL_ROWS)


@pytest.mark.usefixtures("for_all_rows")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", [BFLOAT16, INT8, FP8, INT4])
@pytest.mark.parametrize("rows", [2, 8, 32, 64, 128])
def test_blocks_fit_and_most_multiprocessors_have_work(kind, shape, rows):
    width, size, gates = shape
    division = best_division(kind, width, size, rows, H200, gates=gates)
    block = division.block
    shared_bytes = block.shared_bytes(kind, warpgroup_kernel.padded(rows))
    assert shared_bytes <= MAX_SHARED_BYTES
    assert shared_bytes * block.per_processor <= warpgroup_kernel.MULTIPROCESSOR_BYTES
    assert block.tiles <= 16 * block.groups  # a warp has at least one
    num_blocks = -(-width * (2 if gates else 1) // 16 // block.tiles) * division.parts
    assert num_blocks / (-(-num_blocks // H200) * H200) > 0.9


def test_what_others_compute_faster_is_left_to_them():
    for kind in (INT8, FP8, INT4):
        assert best_division(kind, 4096, 4096, 32, H200, gates=False) is None
        assert best_division(kind, 4096, 4096, 33, H200, gates=False) is not None
        assert best_division(kind, 4096, 4096, 128, H200, gates=False) is not None
        assert best_division(kind, 4096, 4096, 129, H200, gates=False) is None
    assert best_division(BFLOAT16, 4096, 4096, 64, H200, gates=False) is not None
    assert best_division(BFLOAT16, 4096, 4096, 65, H200, gates=False) is None


@pytest.mark.usefixtures("for_all_rows")
def test_what_it_cannot_compute_is_left_to_others():
    assert best_division(INT8, 4096, 4096 + 64, 64, H200, gates=False) is None  # inputs
    assert best_division(INT4, 4096, 4096 + 64, 64, H200, gates=False) is None
    assert best_division(INT8, 4096 + 8, 4096, 64, H200, gates=False) is None  # outputs
    assert best_division(INT8, 4096 + 8, 4096, 64, H200, gates=True) is not None
    assert best_division(BFLOAT16, 32000, 4096, 32, H200, gates=False) is None  # a vocabulary
    assert warpgroup_kernel.division(torch.zeros(4, 64), nn.Linear(64, 32), 32, 4, gates=False) is None  # no GPU


@pytest.mark.usefixtures("for_all_rows")
def test_short_sums_have_no_more_parts_than_chunks():
    assert best_division(INT8, 64, 128, 64, H200, gates=False).parts == 1
    assert best_division(INT8, 64, 512, 64, H200, gates=False).parts <= 4


@pytest.mark.parametrize("rows", [8, 32, 128])
def test_the_operands_of_products_are_numbered_in_turn(rows):
    in_registers, in_shared_memory = warpgroup_kernel.wgmma_macros(rows)
    for macro, others in ((in_registers, 5), (in_shared_memory, 2)):
        count = rows // 2  # sums of a thread
        assert f"m64n{rows}k16" in macro
        assert [int(number) for number in re.findall(r"%(\d+)", macro)] == [*range(count + others)]
        assert macro.count('"+f"') == count


def test_sums_of_more_rows_than_the_kernel_has_are_computed_in_pieces(monkeypatch):
    """As many parts for each piece, whatever its rows, and by which kernel."""
    pytest.importorskip("triton", reason="there is no Triton here")
    from flambeau.llm.backends.cuda import linear
    from flambeau.llm.backends.cuda.linear_choice import kernel_linear

    asked = []

    def compute(x, layer, as_for_rows):
        asked.append((len(x), as_for_rows))
        return torch.nn.functional.linear(x, layer.layer.dequantize(x.dtype)).expand(2, -1, -1)

    layer = Int8Linear.from_linear(nn.Linear(64, 32, bias=False))
    monkeypatch.setattr(linear, "by_cuda_kernel", compute)
    x = torch.randn(200, 64)
    y = kernel_linear(layer)(x)
    assert asked == [(128, 128), (72, 128)]
    assert y.shape == (2, 200, 32)
    torch.testing.assert_close(y[1], nn.functional.linear(x, layer.dequantize(torch.float32)))


def test_prompts_in_graphs_use_kernels_that_were_compiled_before():
    most = warpgroup_kernel.MAX_ROWS

    def kernels_of(lengths):
        """The rows that blocks are for, and those of the kernel: linear.py divides what is longer."""
        found = set()
        for length in lengths:
            if length <= 2 * most:  # more are computed by PyTorch
                rest = length % most or most
                found |= {(min(length, most), warpgroup_kernel.padded(rows)) for rows in {min(length, most), rest}}
        return found

    assert kernels_of(prompt_graphs.SIZES) <= kernels_of(backend.PROMPT_LENGTHS)


@pytest.mark.gpu
@pytest.mark.timeout(300)
@needs_gpu
@pytest.mark.usefixtures("for_all_rows")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("gates", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("rows", [2, 13, 32, 64, 100, 128])
def test_it_gives_what_the_layer_gives(kind, gates, rows):
    torch.manual_seed(0)
    number, quantized = LAYERS[kind]
    for width, size, has_bias in ((1264, 512, True), (6016, 1024, False), (4096, 4096, False)):
        outputs = 2 * width if gates else width
        plain = nn.Linear(size, outputs, bias=has_bias, dtype=torch.bfloat16, device="cuda").requires_grad_(False)
        layer = quantized(plain)
        x = torch.randn(rows, size, dtype=torch.bfloat16, device="cuda")
        division = warpgroup_kernel.division(x, layer, width, rows, gates=gates)
        with torch.inference_mode():
            weight = layer.weight if number == BFLOAT16 else layer.dequantize(torch.float32)
            expected = nn.functional.linear(x.float(), weight.float(), plain.bias.float() if has_bias else None)
            if gates:
                gate, up = expected.chunk(2, dim=-1)
                expected = nn.functional.silu(gate) * up
            scales = few_row_kernel.kernel_scales(layer, gates)
            y = warpgroup_kernel.multiply(x, layer, scales, width, division, gates=gates).float()
        y = y.sum(0) if division.parts > 1 else y
        assert y.shape == (rows, width)
        assert (y - expected).norm() <= 0.005 * expected.norm()


def random_bfloat16(*shape):
    return torch.randn(shape, device="cuda").bfloat16()


ADAPTED = [  # outputs without gates, inputs, where segments begin, whether they are gates and what they gate, a bias
    (3072, 2048, (0, 2048, 2560), False, False),
    (1264, 512, (0, 624, 1040), False, True),
    (1264, 512, (0, 1264), True, True),
    (8192, 2048, (0, 8192), True, False),
    (11008, 4096, (0, 11008), True, False),
]


@pytest.mark.gpu
@pytest.mark.timeout(300)
@needs_gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("case", ADAPTED)
@pytest.mark.parametrize("rows", [2, 8, 13, 32])
@pytest.mark.parametrize("inner", [64, 128, 512])
def test_it_adds_products_with_a_second_matrix(case, rows, inner):
    torch.manual_seed(0)
    width, size, starts, gates, has_bias = case
    outputs = 2 * width if gates else width
    layer = nn.Linear(size, outputs, bias=has_bias, dtype=torch.bfloat16, device="cuda").requires_grad_(False)
    x, inner_TX = random_bfloat16(rows, size), random_bfloat16(rows, len(starts) * inner)
    b_OX = random_bfloat16(outputs, inner) * 0.1
    adapters = ProductAdapters(inner=inner, segments=len(starts))
    division = warpgroup_kernel.division(x, layer, width, rows, gates=gates, adapters=adapters)
    with torch.inference_mode():
        expected = nn.functional.linear(x.float(), layer.weight.float(), layer.bias.float() if has_bias else None)
        for number, (start, stop) in enumerate(zip(starts, (*starts[1:], outputs), strict=True)):
            expected[:, start:stop] += inner_TX.view(rows, -1, inner)[:, number].float() @ b_OX[start:stop].float().T
        if gates:
            gate, up = expected.chunk(2, dim=-1)
            expected = nn.functional.silu(gate) * up
        y = warpgroup_kernel.multiply_with_adapters(x, layer, width, division, inner_TX, b_OX, starts, gates=gates)
    y = y.sum(0) if division.parts > 1 else y.float()
    assert (y - expected).norm() <= 0.005 * expected.norm()


@pytest.mark.gpu
@pytest.mark.timeout(300)
@needs_gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("width", "size", "has_bias"), [(2048, 2048, False), (2048, 8192, False), (1264, 512, True)])
@pytest.mark.parametrize("rows", [2, 8, 13, 32])
@pytest.mark.parametrize("ranks", [64, 128, 512])
def test_it_multiplies_with_a_second_matrix(width, size, has_bias, rows, ranks):
    torch.manual_seed(0)
    layer = nn.Linear(size, width, bias=has_bias, dtype=torch.bfloat16, device="cuda").requires_grad_(False)
    x, a_XK = random_bfloat16(rows, size), random_bfloat16(ranks, size)
    division = warpgroup_kernel.division(x, layer, width, rows, gates=False, adapters=ProductAdapters(shrunk=ranks))
    with torch.inference_mode():
        expected = nn.functional.linear(x.float(), layer.weight.float(), layer.bias.float() if has_bias else None)
        y, shrunk = warpgroup_kernel.multiply_and_shrink(x, layer, width, division, a_XK)
    y = y.sum(0) if division.parts > 1 else y.float()
    assert (y - expected).norm() <= 0.005 * expected.norm()
    assert shrunk.shape == (division.parts, rows, ranks)
    torch.testing.assert_close(shrunk.sum(0), x.float() @ a_XK.float().T, atol=0.05, rtol=1e-3)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [2, 8, 32])
@pytest.mark.parametrize("added", [64, 128, 512])
def test_blocks_of_adapters_take_no_second_round(shape, rows, added):
    """What is added to a layer has a place beside its own work."""
    width, size, gates = shape
    fused, other = ProductAdapters(inner=added, segments=2 if gates else 3), ProductAdapters(shrunk=added)
    adapters = fused if width > size else other
    division, alone = (
        best_division(BFLOAT16, width, size, rows, H200, gates=gates, adapters=each) for each in (adapters, NO_ADAPTERS)
    )
    assert division.block.shared_bytes(BFLOAT16, warpgroup_kernel.padded(rows)) <= MAX_SHARED_BYTES
    num_tiles = width * (2 if gates else 1) // 16

    def rounds(division, added_tiles):
        num_blocks = sum(-(-tiles // division.block.tiles) for tiles in (num_tiles, added_tiles))
        return -(-num_blocks * division.parts // H200)

    assert rounds(division, adapters.shrunk // 16) <= rounds(alone, 0)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.filterwarnings("default")
def test_fewer_rows_than_the_block_is_for_give_the_same_parts():
    layer = Int8Linear.from_linear(nn.Linear(1024, 2048, bias=False, dtype=torch.bfloat16, device="cuda"))
    x = torch.randn(128, 1024, dtype=torch.bfloat16, device="cuda")
    division = WarpgroupDivision(block_shape(INT8, 128, 8, 128), parts=2)
    scales = few_row_kernel.kernel_scales(layer, False)
    with torch.inference_mode():
        y, some = (warpgroup_kernel.multiply(rows, layer, scales, 2048, division, gates=False) for rows in (x, x[:5]))
    torch.testing.assert_close(some, y[:, :5])


@pytest.mark.gpu
@needs_gpu
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_inputs_that_are_not_finite_give_outputs_that_are_not(value):
    layer = Int8Linear.from_linear(nn.Linear(512, 1024, bias=False, dtype=torch.bfloat16, device="cuda"))
    x = torch.randn(64, 512, dtype=torch.bfloat16, device="cuda")
    x[5, 100] = value
    with torch.inference_mode():
        division = warpgroup_kernel.division(x, layer, 1024, 64, gates=False)
        scales = few_row_kernel.kernel_scales(layer, False)
        y = warpgroup_kernel.multiply(x, layer, scales, 1024, division, gates=False).float()
    y = y.sum(0) if division.parts > 1 else y
    assert not y[5].isfinite().any()
    assert y[4].isfinite().all()
    assert y[6].isfinite().all()
