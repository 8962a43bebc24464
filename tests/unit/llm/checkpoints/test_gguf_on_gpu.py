"""GGUF files in the form that GPU kernels read: here in plain PyTorch, exactly as the file has them."""

from __future__ import annotations

import logging
from dataclasses import replace

import gguf
import pytest
import torch

from flambeau.llm import network_loader, proposers
from flambeau.llm.backends.eager import WholeAttention
from flambeau.llm.checkpoints.checkpoint import load_model, read_architecture
from flambeau.llm.checkpoints.gguf_blocks import FORMATS, FactoredScales
from flambeau.llm.checkpoints.layer_formats import KeptForms
from flambeau.llm.config import EngineConfig
from flambeau.llm.executor.shard import local_architecture
from flambeau.llm.gpu_weights import can_keep_integers, join_equal_parts, order_codes
from flambeau.llm.models.embeddings import RowEmbedding
from flambeau.llm.models.presets import preset
from flambeau.llm.quantize.coded import CodeLayout, CudaCodedLinear
from flambeau.llm.quantize.cuda_groups import CudaGroupedLinear, CudaGroupedStack, main_plane, more_plane, to_levels
from flambeau.llm.quantize.groups import GroupedLinear, GroupLayout, JoinedLinear
from flambeau.llm.quantize.quantizer import CudaCodedStack, ExpertStack, build
from flambeau.llm.quantize.settings import Parts as GroupParts
from flambeau.llm.quantize.settings import QuantizationSettings, read_quantization
from support.checkpoints import reference
from support.gguf_files import tensors_of, values_of, write_gguf, written_twice

IDS = torch.tensor([3, 1, 4, 15, 9, 26, 53, 58, 9, 7, 93, 12, 77])
CODED = ("IQ4_NL", "IQ4_XS", "MXFP4")
EXPERTS = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 256}
EXPERT_SIZES = {"num_experts": 4, "moe_intermediate_size": 256, "hidden_size": 256, "intermediate_size": 256}
SIZES = {"hidden_size": 256, "intermediate_size": 512}


def logits_of(model):
    with torch.inference_mode():
        return model.logits(model(IDS, torch.arange(len(IDS)), WholeAttention()))


def loaded(path, dtype=torch.float32):
    """What the loader makes of a file for a GPU, in plain PyTorch."""
    model = load_model(path, dtype=dtype, forms=KeptForms(groups="gpu"), arrived=order_codes(dtype))
    join_equal_parts(model)
    return model


def weights_by_name(model):
    """The weights [O, I] of all layers."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, JoinedLinear):
            weights = [
                getattr(part, "dequantize", lambda _, part=part: part.weight)(torch.float32) for part in module.parts
            ]
            found[name] = torch.cat(weights)
        elif ".parts." in name:
            continue
        elif isinstance(module, ExpertStack):
            found[name] = module[:].float()
        elif isinstance(module, RowEmbedding):
            found[name] = module.weight
            assert torch.equal(module(IDS), module.weight[IDS])
        elif hasattr(module, "dequantize"):
            found[name.removesuffix(".rows")] = module.dequantize(torch.float32)
    return found


def check_weights(found, expected):
    """All quantized weights are those of a file of floats, exactly."""
    weights = weights_by_name(found)
    assert weights
    for name, weight in weights.items():
        other = expected.get_parameter(name if ".experts." in name else f"{name}.weight")
        assert torch.equal(weight, other), name
    torch.testing.assert_close(logits_of(found), logits_of(expected), rtol=1e-4, atol=1e-4)


def plain_parameters(model):
    """Matrices that are not quantized."""
    return [
        name for name, weight in model.named_parameters() if weight.dim() > 1 and not name.endswith("mlp.gate.weight")
    ]


@pytest.mark.parametrize("kind", FORMATS)
def test_weights_of_all_types_stay_exactly(tmp_path, kind):
    model = reference("llama-2", **SIZES)  # rows of queries and keys are arranged in pairs
    paths = written_twice(tmp_path, model, "llama", values_of(model.config), kind)
    found, expected = loaded(paths[0]), load_model(paths[1], dtype=torch.float32)
    check_weights(found, expected)
    assert plain_parameters(found) == []
    layer = found.model.layers[1].self_attn.qkv_proj
    assert type(layer) is (CudaCodedLinear if kind in CODED else CudaGroupedLinear)
    if isinstance(layer, CudaGroupedLinear):
        factored = isinstance(FORMATS[kind].scales, FactoredScales)
        assert layer.layout.scale_bits == (8 if factored else 16)


@pytest.mark.parametrize("kind", ["Q4_K", "Q6_K", "Q5_1", "Q8_0", "IQ4_XS", "MXFP4"])
def test_weights_of_experts_stay_exactly(tmp_path, kind):
    model = reference("qwen-3-moe-normalized", **EXPERT_SIZES)
    paths = written_twice(tmp_path, model, "qwen3moe", values_of(model.config, **EXPERTS), kind)
    found, expected = loaded(paths[0]), load_model(paths[1], dtype=torch.float32)
    check_weights(found, expected)
    experts = found.model.layers[0].mlp.experts
    for stack in (experts.gate_up_proj, experts.down_proj):
        assert type(stack) is (CudaCodedStack if kind in CODED else CudaGroupedStack)
        assert stack[1].shape == stack[:].shape[1:]


def mixed(name):
    """The types of a file that is called Q4_K_M, and floats, in one module."""
    kinds = {"v_proj": "Q6_K", "1.self_attn.k_proj": "F16", "down_proj": "Q6_K", "embed": "Q6_K", "1.mlp.up": "Q8_0"}
    return next((kind for part, kind in kinds.items() if part in name), "Q4_K")


def test_projections_of_a_module_have_types_of_their_own(tmp_path, caplog):
    model = reference("qwen-2", **SIZES, tie_word_embeddings=True)  # with biases
    paths = written_twice(tmp_path, model, "qwen2", values_of(model.config), mixed)
    with caplog.at_level(logging.INFO):
        found, expected = loaded(paths[0]), load_model(paths[1], dtype=torch.float32)
    check_weights(found, expected)
    assert "dequantized" not in caplog.text
    first, second = (layer.self_attn.qkv_proj for layer in found.model.layers[:2])
    assert [part.layout.bits for part in first.parts] == [4, 6]  # queries and keys are one product
    assert [type(part) for part in second.parts] == [CudaGroupedLinear, torch.nn.Linear, CudaGroupedLinear]
    assert isinstance(found.model.layers[0].mlp.gate_up_proj, CudaGroupedLinear)
    assert [part.layout.bits for part in found.model.layers[1].mlp.gate_up_proj.parts] == [4, 8]
    assert found.lm_head is None
    assert found.model.embed_tokens.rows.layout.bits == 6


def test_rows_of_a_whole_gate_and_projections_in_one_tensor(tmp_path):
    model = reference("phi-3", **SIZES)
    values = values_of(model.config, **{"attention.sliding_window": 9})
    paths = written_twice(tmp_path, model, "phi3", values, "Q5_K")
    found = loaded(paths[0])
    check_weights(found, load_model(paths[1], dtype=torch.float32))
    assert plain_parameters(found) == []


def test_both_matrices_of_experts_stay_or_none(tmp_path, caplog):
    """Gate and up of different types have no common form, and the kernels multiply both matrices in one way."""
    model = reference("qwen-3-moe-normalized", **EXPERT_SIZES)

    def kind_of(name):
        return "Q5_K" if "1.mlp.experts.up" in name else "Q4_K"

    paths = written_twice(tmp_path, model, "qwen3moe", values_of(model.config, **EXPERTS), kind_of)
    with caplog.at_level(logging.WARNING):
        found, expected = loaded(paths[0]), load_model(paths[1], dtype=torch.float32)
    check_weights(found, expected)
    assert "3 tensors are dequantized" in caplog.text
    kinds = [
        [type(each) for each in (e.gate_up_proj, e.down_proj)] for e in (la.mlp.experts for la in found.model.layers)
    ]
    assert kinds[0] == [CudaGroupedStack] * 2
    assert kinds[1] == [torch.nn.Parameter] * 2


# ---- memory ----


def size_bytes(tensors):
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


def test_small_files_take_their_size(tmp_path):
    model = reference("llama-2", **SIZES, vocab_size=512)
    for kind, most in (("Q8_0", 1.0), ("Q4_K", 1.03), ("Q5_K", 1.03), ("Q6_K", 1.01), ("Q4_0", 1.0), ("Q5_1", 1.0)):
        path = tmp_path / kind / "model.gguf"
        write_gguf(path, "llama", tensors_of(model, "llama"), values_of(model.config), kind)
        found = loaded(path, torch.bfloat16)
        taken = size_bytes([*found.parameters(), *found.buffers()]) - size_bytes(found.rotation.buffers())
        written = sum(int(tensor.n_bytes) for tensor in gguf.GGUFReader(path).tensors)
        assert 0.95 < taken / written <= most, kind


GROUPED = {name: form.layout for name, form in FORMATS.items()}
NARROW = {
    name: GroupLayout(layout.bits, layout.size, layout.has_minimums, 16 if name[-1] in "01" else 8)
    for name, layout in GROUPED.items()
}


def types_of_file(arch, kind):
    """The types of the projections of each module, as the usual tools mix them."""
    mixes = kind == "Q4_K_M"
    main = "Q4_K" if mixes else kind
    types = {"model.embed_tokens": (main,), "lm_head": ("Q6_K" if mixes else main,)}
    for i in range(arch.num_layers):
        is_more = mixes and (i < arch.num_layers // 8 or i >= 7 * arch.num_layers // 8 or i % 3 == 2)
        other = "Q6_K" if is_more else main
        types[f"model.layers.{i}.self_attn.qkv_proj"] = (main, main, other) if is_more else (main,)
        types[f"model.layers.{i}.self_attn.o_proj"] = (main,)
        types[f"model.layers.{i}.mlp.gate_up_proj"] = (main,)
        types[f"model.layers.{i}.mlp.down_proj"] = (other,)
    return types


TOPS = ("model.embed_tokens", "lm_head")  # which all ranks have


def file_bytes(shape, kind):
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return shape[0] * shape[1] // block * size


@pytest.mark.parametrize("kind", ["Q4_K_M", "Q8_0"])
@pytest.mark.parametrize("name", ["Llama-3.1-8B", "Llama-2-7B"])
def test_networks_of_8_billion_weights_take_about_their_size(name, kind):
    """Computed from tensors without numbers."""
    arch = preset(name)
    types = types_of_file(arch, kind)
    groups: dict[str, GroupParts] = {module: tuple(NARROW[each] for each in kinds) for module, kinds in types.items()}
    config = QuantizationSettings(kind="int4", lm_head=True, groups=groups, wide_scales=True).to_config()
    declared = replace(arch, source={**arch.source, "quantization_config": config})
    shared = sum(file_bytes((arch.vocab_size, arch.hidden_size), types[module][0]) for module in TOPS)
    written = 0
    for size in (1, 2, 4):  # ranks
        with torch.device("meta"):
            torch.set_default_dtype(torch.bfloat16)
            try:
                model = build(local_architecture(declared, size), whole=declared)
            finally:
                torch.set_default_dtype(torch.float32)
            arrived = order_codes(torch.bfloat16, is_part=size > 1)
            if size == 1:
                written = size_bytes(p for p in model.parameters() if p.dim() == 1) * 2  # norms are of 32 bits in files
                for module, kinds in types.items():
                    layer = model.get_submodule(module)
                    parts = layer.parts if isinstance(layer, JoinedLinear) else [getattr(layer, "rows", layer)]
                    shapes = [(part.out_features, part.in_features) for part in parts]
                    written += sum(file_bytes(shape, each) for shape, each in zip(shapes, kinds, strict=True))
            for module, layer in [*model.named_modules()]:
                if (other := arrived(module, layer)) is not None:
                    model.set_submodule(module, other)
        join_equal_parts(model)
        assert plain_parameters(model) == []
        taken = size_bytes([*model.parameters(), *model.buffers()]) - size_bytes(model.rotation.buffers())
        assert 4e9 < written < 9e9
        assert taken < (1.03 if size == 1 else 1.04) * (shared + (written - shared) / size)


# ---- order, settings, loader ----


@pytest.mark.parametrize("layout", [*{*NARROW.values()}], ids=str)
def test_the_order_of_levels_is_undone(layout):
    if layout.bits not in (4, 5, 6, 8):
        return
    levels = torch.randint(0, 1 << layout.bits, (3, 5, 512), dtype=torch.uint8)
    more = more_plane(levels, layout) if layout.bits in (5, 6) else None
    weight = main_plane(levels, layout)
    assert weight.nbytes + (0 if more is None else more.nbytes) == levels.numel() * layout.bits // 8
    assert torch.equal(to_levels(weight, more, layout), levels)


def test_other_bits_are_refused_by_name():
    layer = GroupedLinear(64, 8, GroupLayout(7, 32))
    with pytest.raises(ValueError, match="groups of 7 bits"):
        order_codes(torch.float32)("layer", layer)


def test_layouts_are_kept_in_the_settings():
    groups = {"a": (GroupLayout(6, 16, False, 8), None), "b": (CodeLayout(tuple(map(float, range(16))), 32),)}
    config = QuantizationSettings(kind="int4", groups=groups).to_config()
    assert read_quantization({"quantization_config": config}).groups == groups


def test_other_devices_and_settings_keep_nothing():
    arch, gpu = preset("Llama-2-7B"), torch.device("cuda")
    assert not can_keep_integers(EngineConfig(), torch.device("cpu"), None, arch)
    for options in ({"compile": False}, {"quantization": "int8"}, {"merge_lora": True}):
        assert not can_keep_integers(EngineConfig(**options), gpu, None, arch)


def test_the_loader_keeps_files_for_a_gpu(tmp_path, monkeypatch):
    """The loader's own steps, on a CPU."""
    model = reference("qwen-2", **SIZES, tie_word_embeddings=True)
    paths = written_twice(tmp_path, model, "qwen2", values_of(model.config), mixed)
    for module in (network_loader, proposers):
        monkeypatch.setattr(module, "can_keep_integers", lambda *_: True)
    config = EngineConfig(device="cpu", num_blocks=8, compile=False)
    network = network_loader.load_network(paths[0], config, torch.device("cpu"), None)
    found = network.backend.model
    check_weights(found, load_model(paths[1], dtype=torch.float32))
    assert [part.layout.bits for part in found.model.layers[0].self_attn.qkv_proj.parts] == [4, 6]
    assert read_quantization(network.arch.source) == read_quantization(
        read_architecture(paths[0], KeptForms(groups="gpu")).source
    )
    draft = proposers.load_draft(
        EngineConfig(draft=str(paths[0]), device="cpu", compile=False), network.arch, torch.device("cpu"), torch.float32
    )
    check_weights(draft, load_model(paths[1], dtype=torch.float32))
