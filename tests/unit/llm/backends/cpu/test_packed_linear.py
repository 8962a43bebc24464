"""Packed layers give what their plain twins give, for every kind of weights."""

from __future__ import annotations

import ctypes
import platform
import subprocess

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from flambeau.llm.backends.cpu import bindings, kernel_builds, packed_linear
from flambeau.llm.backends.cpu.packed_linear import (
    INT8_GROUP,
    PackedLinear,
    pack_floats,
    pack_layers,
    pack_quantized,
    packed,
    rounded_inputs,
)
from flambeau.llm.quantize.coded import FP4, CodedLinear, CodeLayout
from flambeau.llm.quantize.groups import GroupedLinear, GroupLayout
from flambeau.llm.quantize.int4 import Int4Linear
from flambeau.llm.quantize.row_scaled import Fp8Linear, Int8Linear

pytestmark = [
    pytest.mark.timeout(300),  # the kernels may have to be built, on a busy machine
    pytest.mark.usefixtures("loaded"),
]


def linear(in_features: int, out_features: int, *, bias: bool = False) -> nn.Linear:
    torch.manual_seed(in_features + out_features)
    return nn.Linear(in_features, out_features, bias=bias).requires_grad_(False)


def rounded_to(dtype: torch.dtype, layer: nn.Linear) -> nn.Linear:
    layer.weight.copy_(layer.weight.to(dtype))
    return layer


SHAPES = [(64, 32), (96, 7), (160, 100), (320, 33)]
ROWS = (1, 2, 3, 8, 21)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [*SHAPES, (37, 65)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_float_weights_give_the_results_of_float32(dtype, shape, bias):
    layer = rounded_to(dtype, linear(*shape, bias=bias))
    fast = packed(layer)
    assert fast.kind == str(dtype).removeprefix("torch.")
    for rows in ROWS:
        x = torch.randn(rows, shape[0])
        torch.testing.assert_close(fast(x), layer(x), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", [(96, 40), (37, 65)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_layers_of_16_bits_are_summed_in_float32(dtype, shape):
    layer = linear(*shape, bias=True).to(dtype)
    for rows in ROWS:
        x = torch.randn(rows, shape[0]).to(dtype)
        expected = F.linear(x.float(), layer.weight.float(), layer.bias.float()).to(dtype)
        torch.testing.assert_close(packed(layer)(x), expected, atol=1e-6, rtol=2**-7)


@pytest.mark.parametrize("shape", [(96, 40), (37, 65)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_of_16_bits_in_a_network_of_float32_are_packed_as_they_are(dtype, shape):
    stored = linear(*shape).to(dtype)
    fast = pack_floats(stored.weight, dtype=torch.float32)
    assert fast.kind == str(dtype).removeprefix("torch.")
    x = torch.randn(3, shape[0])
    torch.testing.assert_close(fast(x), F.linear(x, stored.weight.float()), atol=1e-5, rtol=1e-5)


SMALLEST_HALF = 2.0**-24


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (0.5, "bfloat16"),
        (-0.0, "bfloat16"),
        (2.0**-130, "bfloat16"),
        (1 + 2.0**-10, "float16"),
        (3 * SMALLEST_HALF, "bfloat16"),
        (1023 * SMALLEST_HALF, "float16"),
        (65504.0, "float16"),
        (1 + 2.0**-11, "float32"),
        (65504.0 + 16, "float32"),
        (1023.5 * SMALLEST_HALF, "float32"),
        (2.0**-25 + 2.0**-34, "float32"),
    ],
)
def test_the_narrowest_type_is_one_that_represents_every_weight(number, kind):
    weight = torch.full((33, 50), 0.25)
    weight[32, 49] = number
    fast = pack_floats(weight)
    assert fast.kind == kind
    found = fast(torch.eye(50)).t()
    assert torch.equal(found[:, :49], weight[:, :49])
    assert found[32, 49] == number


@pytest.mark.parametrize("is_grouped", [False, True])
@pytest.mark.parametrize("shape", [*SHAPES, (37, 65)])
def test_int8_weights_give_what_the_twin_gives_for_rounded_inputs(shape, is_grouped):
    plain = linear(*shape, bias=True)
    layer = Int8Linear.in_groups(plain, INT8_GROUP) if is_grouped else Int8Linear.from_linear(plain)
    fast = packed(layer)
    for rows in ROWS:
        sizes = torch.logspace(-3, 3, rows).unsqueeze(1)
        x = torch.randn(rows, shape[0]) * sizes
        expected = F.linear(rounded_inputs(x, fast.group_size), layer.dequantize(torch.float32), layer.bias)
        torch.testing.assert_close(fast(x) / sizes, expected / sizes, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(96, 40), (320, 33)])
def test_the_kernels_quantize_as_the_plain_functions_do(shape, dtype):
    plain = linear(*shape, bias=True).to(dtype)
    assert torch.equal(pack_quantized(plain.weight, "int8", 32).panels, packed(Int8Linear.in_groups(plain, 32)).panels)
    ours, theirs = pack_quantized(plain.weight, "int4", 32).panels, packed(Int4Linear.from_linear(plain, 32)).panels
    assert (ours != theirs).float().mean() < 0.01  # two ranges with the same error, but for the order of a sum


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_weights_that_are_not_finite_do_not_become_finite(kind, value):
    weight = linear(128, 40).weight.clone()
    weight[33, 70] = value
    found = pack_quantized(weight, kind, 32)(torch.randn(2, 128)).isfinite().all(dim=0)
    assert [n for n in range(40) if not found[n]] == [33]


def test_rows_that_do_not_divide_into_groups_are_quantized_by_the_kernels():
    plain, x = linear(37, 65), torch.randn(3, 37)
    fast = pack_quantized(plain.weight, "int8", 32)
    torch.testing.assert_close(fast(x), plain(x), atol=0.02, rtol=0.02)


def test_smaller_groups_make_int8_more_exact():
    plain, x = linear(512, 64), torch.randn(20, 512)
    errors = [
        (packed(layer)(x) - plain(x)).norm()
        for layer in (Int8Linear.from_linear(plain), Int8Linear.in_groups(plain, 32))
    ]
    assert errors[1] < errors[0]


@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("shape", [(128, 32), (256, 7), (384, 100)])
def test_int4_weights_give_what_the_twin_gives_for_rounded_inputs(shape, group_size):
    layer = Int4Linear.from_linear(linear(*shape, bias=True), group_size)
    fast = packed(layer)
    for rows in ROWS:
        x = torch.randn(rows, shape[0])
        expected = F.linear(rounded_inputs(x, group_size), layer.dequantize(torch.float32), layer.bias)
        torch.testing.assert_close(fast(x), expected, atol=1e-5, rtol=1e-4)


GROUPS = {  # bits of memory for each weight, by layout
    GroupLayout(8, 32): 8.5,
    GroupLayout(8, 32, True): 9.0,
    GroupLayout(6, 16): 7.0,
    GroupLayout(5, 32): 5.5,
    GroupLayout(5, 32, True): 6.0,
    GroupLayout(4, 32): 4.5,
    GroupLayout(4, 32, True): 5.0,
    GroupLayout(4, 16): 5.0,
    GroupLayout(4, 16, True): 6.0,
}


def grouped(layout: GroupLayout, in_features: int = 96, out_features: int = 72) -> GroupedLinear:
    """Every level, and scales and minimums that bfloat16 represents."""
    torch.manual_seed(layout.bits)
    layer = GroupedLinear(in_features, out_features, layout, bias=True)
    layer.weight.copy_(torch.arange(layer.weight.numel()).view_as(layer.weight) * 37 % (1 << layout.bits))
    for numbers in (layer.scales, *([] if layer.minimums is None else [layer.minimums])):
        numbers.copy_((torch.randn(numbers.shape) / (1 << layout.bits)).bfloat16())
    nn.init.normal_(layer.bias)
    return layer


@pytest.mark.parametrize("layout", GROUPS, ids=str)
def test_integers_in_groups_give_what_the_twin_gives_for_rounded_inputs(layout):
    layer = grouped(layout)
    fast = packed(layer)
    for rows in ROWS:
        x = torch.randn(rows, 96)
        torch.testing.assert_close(fast(x), layer(rounded_inputs(x, layout.size)), atol=1e-4, rtol=1e-4)
    assert torch.equal(fast.dequantize(torch.float32), layer.dequantize(torch.float32))
    ids = torch.tensor([[71, 0, 15], [16, 31, 32]])
    assert torch.equal(fast.read_rows(ids), layer.read_rows(ids))


@pytest.mark.parametrize(("layout", "bits"), GROUPS.items(), ids=str)
def test_integers_in_groups_take_few_bits(layout, bits):
    assert packed(grouped(layout, 128, 64)).panels.nbytes * 8 == bits * 128 * 64


def test_int4_weights_around_the_middle_level_need_no_minimums():
    layer = Int4Linear.from_linear(linear(320, 33), 32)
    layer.minimums = -8 * layer.scales
    fast, x = packed(layer), torch.randn(3, 320)
    assert fast.kind == "int4_scaled"
    torch.testing.assert_close(fast(x), layer(rounded_inputs(x, 32)), atol=1e-4, rtol=1e-4)


def test_large_layers_are_packed_in_portions(monkeypatch):
    layer = grouped(GroupLayout(6, 16), 96, 150)
    whole = packed(layer).panels
    monkeypatch.setattr(packed_linear, "LEVELS_AT_ONCE", 1)
    assert torch.equal(packed(layer).panels, whole)


@pytest.mark.parametrize(("outlier", "allowed"), [(0.0, 0.01), (30.0, 0.02)])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_rounding_inputs_costs_about_a_hundredth_of_the_output(kind, outlier, allowed):
    plain = linear(512, 64)
    layer = Int8Linear.from_linear(plain) if kind == "int8" else Int4Linear.from_linear(plain, 64)
    x = torch.randn(20, 512)
    x[:, 7] += outlier  # which spoils its own group only
    error = packed(layer)(x) - layer(x)
    assert error.norm() / layer(x).norm() < allowed


@pytest.mark.parametrize(
    "kind", ["float32", "bfloat16", "bfloat16 network", "int8", "int4", "int6", *(str(layout) for layout in GROUPS)]
)
def test_a_row_gets_the_same_bits_in_any_batch(kind):
    layer = linear(192, 70)
    if kind == "bfloat16":
        rounded_to(torch.bfloat16, layer)
    layers = {"int8": Int8Linear.from_linear(layer), "int4": Int4Linear.from_linear(layer, 64)}
    layers["int6"] = grouped(GroupLayout(6, 16), 192, 70)
    layers["bfloat16 network"] = linear(192, 70).bfloat16()
    layers.update((str(layout), grouped(layout, 192, 70)) for layout in GROUPS)
    fast, x = packed(layers.get(kind, layer)), torch.randn(57, 192)  # two tiles of rows and some more
    together = fast(x)
    assert torch.equal(torch.cat([fast(row.unsqueeze(0)) for row in x]), together)
    assert torch.equal(fast(x.view(3, 19, 192)), together.view(3, 19, 70))


@pytest.mark.parametrize("kind", ["int8", "int4", "bfloat16"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_numbers_that_are_not_finite_do_not_become_finite(kind, value):
    layer = linear(128, 40)
    quantized = {"int8": Int8Linear.from_linear(layer), "int4": Int4Linear.from_linear(layer, 64)}
    fast, x = packed(quantized[kind] if kind in quantized else layer.bfloat16()), torch.randn(43, 128)
    spoiled = torch.zeros(43, dtype=torch.bool)
    spoiled[[1, 40]] = True  # in a tile of rows, and behind the last whole one
    x[spoiled, 70] = value
    for y, rows in ((fast(x), spoiled), (fast(x[:2]), spoiled[:2])):
        assert y[~rows].isfinite().all()
        assert not y[rows].isfinite().any()


def test_the_largest_inputs_and_weights_do_not_overflow():
    layer = nn.Linear(256, 40, bias=False).requires_grad_(False)
    layer.weight.fill_(-1.0)
    for fast in (packed(Int8Linear.from_linear(layer)), packed(Int4Linear.from_linear(layer, 128))):
        torch.testing.assert_close(fast(torch.full((3, 256), 5.0)), torch.full((3, 40), -1280.0), rtol=0.01, atol=0)


def test_a_row_of_zeros_gives_zeros():
    assert packed(Int8Linear.from_linear(linear(64, 32)))(torch.zeros(1, 64)).eq(0).all()


def fp8_layer(in_features: int, out_features: int, num_groups: int) -> Fp8Linear:
    """A layer with a scale for each row, or for each group of it."""
    layer = Fp8Linear.from_linear(linear(in_features, out_features, bias=True))
    layer.scale = layer.scale.unsqueeze(1) * torch.logspace(-2, 0, num_groups) if num_groups > 1 else layer.scale
    return layer


FP8_SHAPES = [*((shape, 1) for shape in (*SHAPES, (37, 65))), ((96, 7), 3), ((320, 33), 5)]


@pytest.mark.parametrize(("shape", "num_groups"), FP8_SHAPES)
def test_fp8_weights_give_the_results_of_float32(shape, num_groups):
    layer = fp8_layer(*shape, num_groups)
    fast = packed(layer)
    assert (fast.kind, fast.group_size) == ("fp8", shape[0] // num_groups)
    assert fast.panels.nbytes == (shape[0] + 4 * num_groups) * -(-shape[1] // 32) * 32
    weight = layer.dequantize(torch.float32)
    for rows in ROWS:
        x = torch.randn(rows, shape[0])
        torch.testing.assert_close(fast(x), F.linear(x, weight, layer.bias), atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(fast(x), layer(x), atol=1e-5, rtol=1e-5)
    assert torch.equal(fast.dequantize(torch.float32), weight)


def test_every_number_of_fp8_is_widened_exactly():
    layer = Fp8Linear(256, 40)
    codes = torch.arange(256, dtype=torch.uint8)
    is_number = codes & 127 != 127
    layer.weight = torch.where(is_number, codes, 0).view(torch.float8_e4m3fn).repeat(40, 1)
    layer.scale = torch.ones(40)
    expected = layer.weight.float()
    assert torch.equal(packed(layer)(torch.eye(256)), expected.t())


@pytest.mark.parametrize("kind", ["fp4", "fp4_wide"])
@pytest.mark.parametrize(("shape", "num_groups"), [*FP8_SHAPES, ((160, 100), 10)])
def test_fp8_weights_that_4_bits_represent_are_packed_as_such(shape, num_groups, kind):
    layer = fp8_layer(*shape, num_groups)
    sizes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    numbers = torch.cat((sizes, -sizes))[torch.randint(16, layer.weight.shape)]
    layer.weight = numbers.to(torch.float8_e4m3fn)
    exponents = torch.randint(-6, -2, layer.scale.shape)
    layer.scale = torch.exp2(exponents.float()) * (1.0 if kind == "fp4" else 1.1)
    fast = packed(layer)
    assert fast.kind == kind
    weight = layer.dequantize(torch.float32)
    for rows in ROWS:
        x = torch.randn(rows, shape[0])
        torch.testing.assert_close(fast(x), F.linear(x, weight, layer.bias), atol=1e-5, rtol=1e-5)
    assert torch.equal(fast.dequantize(torch.float32), weight)


@pytest.mark.parametrize("kind", ["fp4", "fp4_wide", "codes"])
@pytest.mark.parametrize(("shape", "num_groups"), [((64, 32), 4), ((256, 40), 4), ((160, 100), 10)])
def test_codes_of_4_bits(shape, num_groups, kind):
    torch.manual_seed(0)
    table = tuple(torch.randn(16).tolist()) if kind == "codes" else FP4
    layer = CodedLinear(*shape, CodeLayout(table, shape[0] // num_groups), bias=True)
    layer.weight.random_(0, 256)
    layer.scales.copy_(
        torch.exp2(torch.randint(-6, -2, layer.scales.shape).float()) * (1.1 if kind == "fp4_wide" else 1)
    )
    torch.nn.init.normal_(layer.bias)
    fast, weight = packed(layer), layer.dequantize(torch.float32)
    assert fast.kind == kind
    assert weight[3, 1] == torch.tensor(table)[int(layer.weight[3, 0]) >> 4] * layer.scales[3, 0]
    for rows in ROWS:
        x = torch.randn(rows, shape[0])
        torch.testing.assert_close(fast(x), F.linear(x, weight, layer.bias), atol=1e-5, rtol=1e-5)
    assert torch.equal(fast.dequantize(torch.float32), weight)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_weight_of_fp8_that_is_no_number_gives_none(code):
    layer = fp8_layer(64, 40, 2)
    layer.weight.view(torch.uint8)[33, 5] = code
    found = packed(layer)(torch.randn(2, 64))
    assert found[:, 33].isnan().all()
    assert found.isnan().sum() == 2


def test_kinds_without_a_kernel_are_left_alone():
    assert packed(nn.Identity()) is None


VARIANTS = {"skylake-avx512": {"avx512f", "avx512bw"}}  # test_other_processors.py has those without AVX-512


@pytest.mark.slow
@pytest.mark.parametrize("processor", VARIANTS)
def test_processors_without_the_newest_instructions_give_the_same(processor, tmp_path, monkeypatch):
    features = set(kernel_builds.processor_features().split())
    if platform.machine() != "x86_64" or not VARIANTS[processor] <= features:
        pytest.skip(f"this processor does not execute code for {processor}")
    source, library = tmp_path / "multiply.cpp", tmp_path / "multiply.so"
    source.write_text(
        f'#include "{kernel_builds.SOURCES}/matrix.h"\n'
        'extern "C" void flambeau_multiply(const flambeau::Matrix* matrix, const float* x, float* out, int64_t rows, '
        "int threads) { matrix->multiply(x, out, rows, false, threads); }\n"
    )
    little = [flag.replace("-O3", "-O1") for flag in kernel_builds.COMMON_FLAGS]  # compiles in half the time
    flags = [*little, f"-march={processor}", "-shared"]
    subprocess.run([kernel_builds.find_compiler(), *flags, str(source), "-o", str(library)], check=True)
    layer, x = linear(256, 70, bias=True), torch.randn(43, 256)
    layers = [packed(each) for each in (layer, Int8Linear.from_linear(layer), Int4Linear.from_linear(layer, 64))]
    layers += [packed(grouped(layout, 256, 70)) for layout in GROUPS]
    layers += [packed(linear(256, 70).to(dtype)) for dtype in (torch.bfloat16, torch.float16)]
    expected = [each(x) for each in layers]
    older = ctypes.CDLL(str(library))
    older.flambeau_multiply.argtypes = bindings.kernels.library.flambeau_multiply.argtypes
    monkeypatch.setattr(bindings.kernels, "library", older)
    for each, result in zip(layers, expected, strict=True):
        torch.testing.assert_close(each(x), result, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("group_size", [32, 64])
def test_int4_weights_of_other_tools_have_wide_scales(group_size):
    """As layers of GPTQ, AWQ and GGUF files: scales and minimums in float32 are rounded for the kernels."""
    plain = linear(320, 33)
    layer = Int4Linear.from_linear(plain, group_size)
    layer.scales = layer.scales.float() * 1.003
    layer.minimums = -layer.scales * 7
    fast = packed(layer)
    for rows in ROWS:
        x = torch.randn(rows, 320)
        expected = layer(rounded_inputs(x, group_size))
        assert (fast(x) - expected).abs().max() < 0.01 * expected.abs().max()


def test_replaced_layers_go_back_to_the_system_while_others_are_packed(monkeypatch):
    """Not only at the end, when the process has had both copies of the network."""
    model = nn.ModuleList(Int4Linear.from_linear(linear(320, 64), 32) for _ in range(6))
    one = sum(tensor.nbytes for tensor in model[0].state_dict().values())
    remaining = []
    monkeypatch.setattr(packed_linear, "TRIM_BYTES", 2 * one - 1)
    monkeypatch.setattr(
        packed_linear, "trim_heap", lambda: remaining.append(sum(type(each) is Int4Linear for each in model))
    )
    pack_layers(model, (Int4Linear,))
    assert all(type(each) is PackedLinear for each in model)
    assert remaining == [4, 2, 0]
