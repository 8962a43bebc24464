"""Checkpoints of GPTQ and AWQ give the network that their levels, scales and zeros stand for."""

from __future__ import annotations

import logging
import re
from dataclasses import replace

import pytest
import torch

from flambeau.llm.checkpoints import gptq as gptq_files
from flambeau.llm.checkpoints.checkpoint import load_model, read_architecture
from flambeau.llm.errors import CheckpointError
from flambeau.llm.executor.shard import Shard, local_architecture
from flambeau.llm.quantize.int4 import Int4Linear
from flambeau.llm.quantize.packed_layers import use_fast_layers
from flambeau.llm.quantize.quantizer import ExpertStack, build, quantize_on_load
from flambeau.llm.quantize.settings import read_quantization
from support.packed_checkpoints import PACKABLE, check_equal, to_levels, to_words, write_packed, write_packed_kind
from support.tiny_models import tiny_model
from support.weights import logits_of

AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # the columns that the nibbles of a word hold


def gptq(group_size=32, bits=4, *, version=1, order=None):
    """Pack as GPTQ does: words of consecutive inputs; zeros minus 1 in the first version."""

    def pack(weight):
        size = weight.shape[1] if group_size == -1 else group_size
        rows = weight if order is None else weight[:, order(weight.shape[1])]
        levels, scales, zeros = to_levels(rows, size, bits)
        groups = torch.arange(weight.shape[1]) // size
        if order is not None:  # back to the order of the inputs
            back = order(weight.shape[1]).argsort()
            levels, groups = levels[:, back], groups[back]
        zeros = zeros.clamp_min(1) if version == 1 else zeros
        plain = scales.float()[:, groups] * (levels - zeros[:, groups])
        parts = {
            "qweight": to_words(levels, bits).t(),
            "qzeros": to_words(zeros.t() - int(version == 1), bits),
            "scales": scales.t(),
            "g_idx": groups.to(torch.int32),
        }
        return parts, plain

    return pack


def awq(weight, group_size=64):
    levels, scales, zeros = to_levels(weight, group_size)
    plain = scales.float().repeat_interleave(group_size, 1) * (levels - zeros.repeat_interleave(group_size, 1))

    def words(values):
        return to_words(values.unflatten(1, (-1, 8))[:, :, AWQ_ORDER].flatten(1), 4)

    return {"qweight": words(levels.t()), "qzeros": words(zeros.t()), "scales": scales.t()}, plain


def config(**options):
    return {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False, **options}


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}


@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
@pytest.mark.parametrize("version", [1, 2])
def test_groups_of_gptq_are_ours(tmp_path, group_size, version):
    declared = config(group_size=group_size, checkpoint_format="gptq" if version == 1 else "gptq_v2")
    model = check_equal(*write_packed(tmp_path, gptq(group_size, version=version), declared))
    assert isinstance(model.model.layers[0].self_attn.qkv_proj, Int4Linear)
    assert model.model.layers[0].mlp.down_proj.group_size == (128 if group_size == -1 else group_size)


def test_zeros_of_the_first_version_are_one_more(tmp_path):
    second = write_packed(tmp_path, gptq(version=2), config(checkpoint_format="gptq"))
    with pytest.raises(AssertionError):
        check_equal(*second)  # so the test above can tell them apart


def test_inputs_in_another_order_are_dequantized(tmp_path, caplog):
    def order(size):
        return torch.randperm(size, generator=torch.Generator().manual_seed(size))

    with caplog.at_level(logging.WARNING):
        model = check_equal(*write_packed(tmp_path, gptq(order=order), config(desc_act=True)))
    assert isinstance(model.model.layers[0].self_attn.qkv_proj, torch.nn.Linear)
    assert "GPTQ" in caplog.text
    assert "14 layers are dequantized" in caplog.text


@pytest.mark.parametrize("bits", [2, 3, 8])
def test_other_bits_are_dequantized(tmp_path, bits):
    model = check_equal(*write_packed(tmp_path, gptq(bits=bits), config(bits=bits)))
    assert isinstance(model.model.layers[0].mlp.down_proj, torch.nn.Linear)


def test_unknown_options_are_named(tmp_path, caplog):
    packed, _ = write_packed(tmp_path, gptq(), config(damp_percent=0.1, twist=3))
    with caplog.at_level(logging.INFO):
        load_model(packed)
    assert "unknown options of quantization_config have no effect: twist" in caplog.text


def test_small_groups_are_dequantized(tmp_path):
    check_equal(*write_packed(tmp_path, gptq(16), config(group_size=16)))


@pytest.mark.parametrize("words_at_once", [3, 64])
def test_awq_groups_are_ours(tmp_path, words_at_once, monkeypatch):
    monkeypatch.setattr(gptq_files, "AWQ_WORDS_AT_ONCE", words_at_once)
    model = check_equal(*write_packed(tmp_path, awq, AWQ))
    assert isinstance(model.model.layers[1].mlp.gate_up_proj, Int4Linear)


@pytest.mark.parametrize("packing", ["auto_round:auto_gptq", "auto_round:auto_awq"])
def test_files_of_auto_round_are_arranged_as_those_of_gptq_or_awq(tmp_path, packing):
    is_gptq = packing.endswith("gptq")
    declared = {"quant_method": "auto-round", "bits": 4, "group_size": 32 if is_gptq else 64, "sym": False}
    declared |= {"packing_format": packing, "data_type": "int", "autoround_version": "0.5.1", "iters": 200}

    def without_order(weight):  # it stores no g_idx
        parts, plain = gptq(32)(weight)
        return {name: part for name, part in parts.items() if name != "g_idx"}, plain

    check_equal(*write_packed(tmp_path, without_order if is_gptq else awq, declared))


@pytest.mark.parametrize("changes", [{"packing_format": "auto_round:gptqmodel"}, {"data_type": "mx_fp"}])
def test_other_files_of_auto_round_are_refused_by_name(changes):
    given = {"quant_method": "auto-round", "bits": 4, "packing_format": "auto_round:auto_gptq", **changes}
    with pytest.raises(CheckpointError, match=re.escape(repr(next(iter(changes.values()))))):
        gptq_files.auto_round_format(given)


def test_layers_that_are_not_quantized_stay_as_they_are(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        model = check_equal(*write_packed(tmp_path, awq, AWQ, plain=("layers.0", "k_proj")))
    first, second = model.model.layers
    assert isinstance(first.mlp.down_proj, torch.nn.Linear)
    assert isinstance(second.mlp.down_proj, Int4Linear)
    assert isinstance(second.self_attn.qkv_proj, torch.nn.Linear)  # q and v are dequantized: k is not quantized
    assert "4 layers stay int4 in groups of 64, 2 layers are dequantized" in caplog.text


def test_experts_are_ours_too(tmp_path):
    sparse = tiny_model(replace(PACKABLE, num_experts=4, expert_size=256))
    model = check_equal(*write_packed(tmp_path, gptq(64), config(group_size=64), model=sparse))
    assert isinstance(model.model.layers[0].mlp.experts.gate_up_proj, ExpertStack)


@pytest.mark.parametrize("kind", ["gpt-2", "gpt-neox", "phi-3", "qwen-3-moe", "deepseek-v3"])
def test_families_that_store_their_layers_otherwise_are_read(tmp_path, kind):
    """Transposed, fused, in another order, or as experts."""
    check_equal(*write_packed_kind(tmp_path, kind, gptq(8), config(group_size=8)))


def test_each_rank_reads_its_part(tmp_path):
    packed, plain = write_packed(tmp_path, gptq(), config())
    whole = load_model(plain, dtype=torch.float32)
    arch = read_architecture(packed)
    local = local_architecture(arch, 2)
    shard = Shard(arch, 1, 2)
    model = load_model(packed, dtype=torch.float32, build=lambda _: build(local), shard=shard)
    expected = shard("down_proj.weight", whole.model.layers[0].mlp.down_proj.weight)
    torch.testing.assert_close(model.model.layers[0].mlp.down_proj.dequantize(torch.float32), expected)


def test_fast_layers_take_wide_scales(tmp_path):
    packed, plain = write_packed(tmp_path, gptq(), config())
    model, expected = load_model(packed, dtype=torch.float32), logits_of(load_model(plain, dtype=torch.float32))
    use_fast_layers(model, torch.float32)
    assert not isinstance(model.model.layers[0].mlp.down_proj, Int4Linear)
    assert (logits_of(model) - expected).abs().max() < 0.05 * expected.abs().max()


def test_dequantized_layers_can_be_quantized_on_load(tmp_path):
    packed, _ = write_packed(tmp_path, gptq(bits=8), config(bits=8))
    arch = read_architecture(packed)
    assert read_quantization(arch.source) is None
    model = load_model(packed, dtype=torch.float32, arrived=quantize_on_load("int8", arch))
    assert type(model.model.layers[0].mlp.down_proj).__name__ == "Int8Linear"


@pytest.mark.parametrize(
    ("declared", "named"),
    [
        (config(bits=5), "bits 5"),
        (config(checkpoint_format="marlin"), "'marlin'"),
        (config(is_marlin_format=True), "'marlin'"),
        (config(adapter={"rank": 4}), "adapter"),
        ({**AWQ, "version": "gemv"}, "'gemv'"),
        ({**AWQ, "bits": 8}, "8 bits"),
        ({**AWQ, "zero_point": False}, "zero_point"),
    ],
)
def test_other_variants_are_refused_by_name(tmp_path, declared, named):
    packed, _ = write_packed(tmp_path, awq, declared)
    with pytest.raises(CheckpointError, match=named):
        load_model(packed)


def test_tensors_that_do_not_fit_together_are_refused(tmp_path):
    packed, _ = write_packed(tmp_path / "a", lambda w: ({**awq(w)[0], "scales": torch.zeros(3, 5)}, w), AWQ)
    with pytest.raises(CheckpointError, match=r"_proj do not fit together.*scales \[3, 5\]"):
        load_model(packed)
    packed, _ = write_packed(tmp_path / "b", lambda w: ({"qweight": awq(w)[0]["qweight"]}, w), AWQ)
    with pytest.raises(CheckpointError, match="has its qzeros, scales"):
        load_model(packed)
    packed, _ = write_packed(tmp_path / "c", lambda w: ({"weight": w}, w), AWQ)
    with pytest.raises(CheckpointError, match="no file has a tensor qweight"):
        load_model(packed)
