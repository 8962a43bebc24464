"""Checkpoints in fp8 of DeepSeek, transformers and ModelOpt, and ModelOpt's NVFP4."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from flambeau.llm.backends.eager import WholeAttention
from flambeau.llm.checkpoints.checkpoint import load_model, read_architecture
from flambeau.llm.checkpoints.layer_formats import NO_FORMS, KeptForms
from flambeau.llm.errors import CheckpointError
from flambeau.llm.quantize.row_scaled import Fp8Linear
from flambeau.llm.quantize.settings import read_quantization
from support.checkpoints import write_checkpoint
from support.packed_checkpoints import PACKABLE, check_equal, write_packed
from support.tiny_models import tiny_model

FP8 = torch.float8_e4m3fn
FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


def blocks(weight, size=48, leaf="weight_scale_inv"):
    """Blocks of so many rows and columns; the last ones are cut off."""
    high, wide = (size, size) if isinstance(size, int) else size
    scale = torch.empty(-(-weight.shape[0] // high), -(-weight.shape[1] // wide))
    plain, stored = torch.empty_like(weight), torch.empty_like(weight, dtype=FP8)
    for i in range(len(scale)):
        for j in range(scale.shape[1]):
            at = slice(i * high, (i + 1) * high), slice(j * wide, (j + 1) * wide)
            scale[i, j] = weight[at].abs().max() / 448
            stored[at] = (weight[at] / scale[i, j]).to(FP8)
            plain[at] = stored[at].float() * scale[i, j]
    return {"weight": stored, leaf: scale}, plain


def whole(weight, leaf="weight_scale"):
    scale = weight.abs().max() / 448
    stored = (weight / scale).to(FP8)
    return {"weight": stored, leaf: scale, "input_scale": torch.tensor(0.5)}, stored.float() * scale


def test_blocks_of_deepseek_are_dequantized(tmp_path):
    declared = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [48, 48]}
    model = check_equal(*write_packed(tmp_path, blocks, declared))
    assert isinstance(model.model.layers[0].mlp.down_proj, torch.nn.Linear)


POWERS = torch.float8_e8m0fnu


def fp4_in_groups(weight):
    """Groups of 32 numbers of 4 bits, whose scales are powers of two; two numbers lie in a byte."""
    groups = weight.unflatten(1, (-1, 32))
    scale = torch.exp2(torch.floor(torch.log2(groups.abs().amax(-1))) - 2)
    codes = (groups / scale.unsqueeze(-1)).unsqueeze(-1).sub(FP4).abs().argmin(-1)
    plain, pairs = (FP4[codes] * scale.unsqueeze(-1)).flatten(1), codes.flatten(1).to(torch.uint8)
    return {"weight": (pairs[:, ::2] | pairs[:, 1::2] << 4).view(torch.int8), "scale": scale.to(POWERS)}, plain


@pytest.mark.parametrize("forms", [NO_FORMS, KeptForms(blocks=True), KeptForms(blocks=True, codes=True)])
def test_experts_of_deepseek_v4_are_fp4_beside_blocks_of_fp8(forms, tmp_path):
    packed, plain = tmp_path / "packed", tmp_path / "plain"
    write_checkpoint(plain, "deepseek-v4", intermediate_size=64)
    tensors = load_file(plain / "model.safetensors")
    stored = {}
    for name in [*tensors]:
        leaves = {}
        if ".experts." in name and name.endswith(".weight"):
            leaves, tensors[name] = fp4_in_groups(tensors[name])
        elif ".attn.w" in name or ".shared_experts." in name or ".attn.indexer.wq_b." in name:
            leaves, tensors[name] = blocks(tensors[name], 16, "scale")
            powers = torch.exp2(leaves["scale"].log2().round())
            tensors[name] *= (
                (powers / leaves["scale"])
                .repeat_interleave(16, 0)
                .repeat_interleave(16, 1)[: len(tensors[name]), : tensors[name].shape[1]]
            )
            leaves["scale"] = powers.to(POWERS)
        start = name.removesuffix("weight")
        stored |= {start + leaf: value for leaf, value in leaves.items()} or {name: tensors[name]}
    packed.mkdir()
    save_file(stored, packed / "model.safetensors")
    save_file(tensors, plain / "model.safetensors")
    declared = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 16], "scale_fmt": "ue8m0"}
    config = json.loads((plain / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps({**config, "quantization_config": declared, "expert_dtype": "fp4"}))
    found, expected = load_model(packed, forms=forms), load_model(plain)
    assert found.arch.unknown_keys == ()
    ids = torch.arange(40) % 101
    with torch.inference_mode():
        logits = [one.logits(one(ids, torch.arange(40), WholeAttention())) for one in (found, expected)]
    torch.testing.assert_close(*logits, atol=1e-4, rtol=0.0)
    stack = found.model.layers[0].mlp.experts.down_proj
    assert isinstance(stack, torch.nn.Parameter) == (forms is NO_FORMS)


@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_blocks_stay_fp8_in_a_network_that_may_have_them(tmp_path, kind):
    declared = {"quant_method": "fp8", "weight_block_size": [48, 64]}
    model = None if kind == "dense" else tiny_model(replace(PACKABLE, num_experts=4, expert_size=128))
    folders = write_packed(tmp_path, lambda weight: blocks(weight, (48, 64)), declared, model=model)
    model = check_equal(*folders, forms=KeptForms(blocks=True))
    linear = model.model.layers[0].self_attn.qkv_proj
    assert isinstance(linear, Fp8Linear)
    assert linear.scale.shape == (len(linear.weight), 2)
    assert read_quantization(read_architecture(folders[0], KeptForms(blocks=True)).source).block_size == 64
    assert read_quantization(read_architecture(folders[0]).source) is None  # dequantized


def test_scales_that_are_powers_of_two_are_read(tmp_path):
    def pack(weight):
        parts, _ = blocks(weight)
        scale = torch.exp2(torch.log2(parts["weight_scale_inv"]).round()).to(torch.float8_e8m0fnu)
        wide = scale.float().repeat_interleave(48, 0).repeat_interleave(48, 1)[: weight.shape[0], : weight.shape[1]]
        return {"weight": parts["weight"], "weight_scale_inv": scale}, parts["weight"].float() * wide

    declared = {"quant_method": "fp8", "weight_block_size": [48, 48], "scale_fmt": "ue8m0"}
    check_equal(*write_packed(tmp_path, pack, declared))


@pytest.mark.parametrize("leaf", ["weight_scale", "weight_scale_inv"])
def test_one_scale_for_all_is_ours(tmp_path, leaf):
    declared = {"quant_method": "fp8", "activation_scheme": "static"}
    model = check_equal(*write_packed(tmp_path, lambda weight: whole(weight, leaf), declared))
    assert isinstance(model.model.layers[0].self_attn.qkv_proj, Fp8Linear)


@pytest.mark.parametrize("forms", [NO_FORMS, KeptForms(blocks=True)])
def test_numbers_without_their_scale_are_refused(tmp_path, forms):
    declared = {"quant_method": "fp8", "weight_block_size": [48, 64]}
    folder, _ = write_packed(tmp_path, lambda weight: blocks(weight, (48, 64)), declared)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.down_proj.weight_scale_inv"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"no file has a scale for .* model\.layers\.1\.mlp\.down_proj\.weight"):
        load_model(folder, forms=forms)


def test_modelopt_names_its_method_in_a_file_of_its_own(tmp_path):
    packed, plain = write_packed(tmp_path, whole, {})
    quantization = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    content = {"producer": {"name": "modelopt"}, "quantization": quantization}
    (packed / "hf_quant_config.json").write_text(json.dumps(content))
    model = check_equal(packed, plain)
    assert isinstance(model.model.layers[0].self_attn.qkv_proj, Fp8Linear)


def test_blocks_of_modelopt_are_dequantized(tmp_path):
    def pack(weight):
        parts, plain = blocks(weight, 128, "weight_scale")
        return {**parts, "weight_scale": parts["weight_scale"][:, None, :, None]}, plain

    check_equal(*write_packed(tmp_path, pack, {"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}))


def test_nvfp4_of_modelopt_is_dequantized(tmp_path):
    def pack(weight):
        groups = weight.unflatten(1, (-1, 16))
        high = groups.abs().amax(2)
        second = high.max() / (448 * 6)
        scale = (high / 6 / second).to(FP8)
        wide = scale.float().unsqueeze(2) * second
        codes = ((groups / wide).unsqueeze(3) - FP4).abs().argmin(3).to(torch.uint8)
        pairs = codes.flatten(1)[:, ::2] | codes.flatten(1)[:, 1::2] << 4
        return {"weight": pairs, "weight_scale": scale, "weight_scale_2": second}, (FP4[codes.int()] * wide).flatten(1)

    check_equal(*write_packed(tmp_path, pack, {"quant_method": "modelopt", "quant_algo": "NVFP4"}))


@pytest.mark.parametrize(
    ("declared", "named"),
    [
        ({"quant_method": "fp8", "fmt": "e5m2"}, "'e5m2'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size"),
        ({"quant_method": "fp8", "rotation": "hadamard"}, "rotation"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "'W4A8_AWQ'"),
    ],
)
def test_other_variants_are_refused_by_name(tmp_path, declared, named):
    folder, _ = write_packed(tmp_path, whole, declared)
    with pytest.raises(CheckpointError, match=named):
        load_model(folder)


def test_scales_that_do_not_fit_are_refused(tmp_path):
    declared = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    folder, _ = write_packed(tmp_path, blocks, declared)
    with pytest.raises(CheckpointError, match="do not fit together"):
        load_model(folder)
