"""What is applied to a network on a CPU while it is loaded."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import flambeau.examples
from flambeau.llm.backends.cpu import bindings
from flambeau.llm.backends.cpu.packed_linear import PackedLinear
from flambeau.llm.checkpoints.checkpoint import load_model, read_architecture
from flambeau.llm.config import EngineConfig
from flambeau.llm.cpu_weights import layer_makers
from flambeau.llm.errors import LLMError
from flambeau.llm.loader import load_engine
from flambeau.llm.models.embeddings import tied_logits
from flambeau.llm.network_loader import cache_dtype, load_network
from flambeau.llm.quantize.quantizer import ExpertStack, quantize_on_load
from support.checkpoints import reference
from support.cpu_kernels import need_cpu_kernels
from support.llm_steps import step_inputs
from support.packed_checkpoints import PACKABLE, write_packed
from support.tiny_models import tiny_model
from unit.llm.checkpoints.test_compressed_tensors import packed as packed_groups
from unit.llm.checkpoints.test_fp8 import blocks as fp8_blocks

INT4_GROUPS = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"all": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 32}}},
}
MODEL = Path(flambeau.examples.__file__).parent / "storyteller" / "draft"

pytestmark = pytest.mark.timeout(300)  # the kernels may have to be built, on a busy machine


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantized_layers_are_packed_for_the_cpu_kernels_and_the_cache_is_float16(kind):
    need_cpu_kernels()
    config = EngineConfig(device="cpu", quantization=kind, num_blocks=4)
    backend = load_network(MODEL, config, torch.device("cpu"), None).backend
    kinds = {layer.kind for layer in backend.model.modules() if isinstance(layer, PackedLinear)}
    assert kinds == {kind}
    assert backend.cache.keys[0].dtype == torch.float16
    assert backend.wait_until_compiled(timeout_s=250)
    assert backend.decode_path == "CPU kernels"
    backend.close()


@pytest.mark.parametrize("kind", ["gpt-neox", "mixtral", "qwen-2-moe"])
@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_networks_with_layer_norms_or_experts_run_on_the_cpu_kernels(tmp_path, kind, quantization):
    need_cpu_kernels()
    sizes = {"hidden_size": 64, "intermediate_size": 64}
    model = reference(kind, **sizes, **({"moe_intermediate_size": 64} if "moe" in kind else {}))
    model.save_pretrained(tmp_path)
    config = EngineConfig(device="cpu", quantization=quantization, num_blocks=16, block_size=4)
    backend = load_network(tmp_path, config, torch.device("cpu"), None).backend
    assert backend.wait_until_compiled(timeout_s=250)
    assert backend.decode_path == "CPU kernels"
    kinds = {layer.kind for layer in backend.model.modules() if isinstance(layer, PackedLinear)}
    # The last layer has 8 bits.
    assert kinds - {"float32"} == ({quantization, "int8"} if quantization else set())
    assert not any(isinstance(layer, ExpertStack) for layer in backend.model.modules())
    inputs = step_inputs({0: (0, ids := [5, 9, 40, 41, 3])})
    found = backend.prefill(inputs, torch.arange(len(ids)))
    if quantization is None:
        expected, allowed = model(torch.tensor([ids])).logits[0].detach(), 1e-5
    else:  # the plain layers round no inputs
        plain = load_network(tmp_path, replace(config, compile=False), torch.device("cpu"), None).backend
        expected, allowed = plain.prefill(inputs, torch.arange(len(ids))), 0.1
    assert (found - expected).norm() / expected.norm() < allowed
    backend.close()


@pytest.mark.parametrize("has_kernels", [True, False])
def test_an_outlier_of_an_expert_makes_its_own_group_less_exact_and_no_other(tmp_path, monkeypatch, has_kernels):
    need_cpu_kernels()
    if not has_kernels:
        monkeypatch.setattr(bindings.kernels, "load", lambda **_: False)  # not yet
    model = reference("mixtral", hidden_size=64, intermediate_size=96)
    for layer in model.model.layers:
        for weight in (layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj):
            weight[..., 5] = 30.0
    model.save_pretrained(tmp_path)
    makers = layer_makers(EngineConfig(quantization="int8"), torch.device("cpu"), None)
    arrived = quantize_on_load("int8", read_architecture(tmp_path), makers)
    found = load_model(tmp_path, arrived=arrived).model.layers[1].mlp.experts
    given = load_model(tmp_path).model.layers[1].mlp.experts
    for leaf in ("gate_up_proj", "down_proj"):
        weight = getattr(given, leaf).unflatten(2, (-1, 32))
        error = (getattr(found, leaf)[:].view_as(weight) - weight).abs()
        assert (error <= weight.abs().amax(dim=3, keepdim=True) / 127 * 0.8).all()


def test_4_bit_layers_of_other_tools_are_packed_for_the_cpu_kernels(tmp_path):
    need_cpu_kernels()
    folder, _ = write_packed(tmp_path, packed_groups(32), INT4_GROUPS)
    backend = load_network(folder, EngineConfig(device="cpu", num_blocks=4), torch.device("cpu"), None).backend
    layers = backend.model.model.layers
    assert isinstance(layers[0].mlp.down_proj, PackedLinear)
    assert layers[0].mlp.down_proj.kind == "int4_scaled"  # the middle level is zero everywhere
    backend.close()


def test_nothing_is_packed_if_compilation_is_off():
    config = EngineConfig(device="cpu", quantization="int8", num_blocks=4, compile=False)
    backend = load_network(MODEL, config, torch.device("cpu"), None).backend
    assert not any(isinstance(layer, PackedLinear) for layer in backend.model.modules())


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_quantized_model_answers_while_its_kernels_are_built(kind, monkeypatch):
    need_cpu_kernels()
    may_build, library = threading.Event(), bindings.kernels.library

    def load(*, builds: bool = True) -> bool:
        if builds:
            may_build.wait(timeout=200)
            bindings.kernels.library = library
        return builds

    monkeypatch.setattr(bindings.kernels, "library", None)
    monkeypatch.setattr(bindings.kernels, "load", load)
    monkeypatch.setattr(bindings.kernels, "can_load", lambda: True)
    engine = load_engine(MODEL, device="cpu", quantization=kind, num_blocks=8)
    options = {"temperature": 0.0, "max_tokens": 8}
    before = engine.generate(["Once upon a time"], **options)[0].token_ids
    assert engine.info.decode == "plain PyTorch"
    may_build.set()
    engine.wait_until_compiled()
    assert engine.info.decode == "CPU kernels"
    assert engine.generate(["Once upon a time"], **options)[0].token_ids == before
    engine.close()


@pytest.mark.parametrize("name", ["float32", "bfloat16", "int8"])
def test_the_cache_has_the_type_that_is_asked_for(name):
    config = EngineConfig(device="cpu", kv_cache_dtype=name, num_blocks=4)
    backend = load_network(MODEL, config, torch.device("cpu"), None).backend
    assert backend.cache.keys[0].dtype == getattr(torch, name)
    backend.close()


@pytest.mark.parametrize("named", ["fp8", "int3"])
def test_a_cache_that_the_device_cannot_have_is_refused(named):
    with pytest.raises(LLMError, match="kv_cache_dtype"):
        load_network(MODEL, EngineConfig(kv_cache_dtype=named, compile=False), torch.device("cpu"), None)


def test_int8_is_for_the_cache_of_a_cpu():
    with pytest.raises(LLMError, match=r"kv_cache_dtype must be fp8 or left out on cuda, not 'int8'"):
        cache_dtype(None, EngineConfig(kv_cache_dtype="int8"), torch.device("cuda"), torch.bfloat16)


def test_a_small_network_is_packed_while_it_is_loaded_and_says_the_same():
    need_cpu_kernels()
    options = {"temperature": 0.0, "max_tokens": 8}
    plain = load_engine(MODEL, device="cpu", compile=False, num_blocks=8)
    expected = plain.generate(["Once upon a time"], **options)[0].token_ids
    engine = load_engine(MODEL, device="cpu", num_blocks=8)
    assert engine.info.decode == "CPU kernels"  # from the first step on
    kinds = {layer.kind for layer in engine.model.modules() if isinstance(layer, PackedLinear)}
    assert kinds == {"bfloat16"}  # as in the file, though the network's numbers are float32
    assert engine.generate(["Once upon a time"], **options)[0].token_ids == expected
    for each in (plain, engine):
        each.close()


@pytest.mark.parametrize(
    ("kind", "changes"),
    [("mamba", {}), ("lfm-2-moe", {"tie_word_embeddings": False}), ("deepseek-v2-lite", {})],
    ids=["tied embeddings", "experts", "latents"],
)
def test_bfloat16_weights_in_a_network_of_float32_round_nothing(kind, changes, tmp_path):
    need_cpu_kernels()
    reference(kind, vocab_size=4096, **changes).bfloat16().save_pretrained(tmp_path)
    found = []
    for compiles in (False, True):
        engine = load_engine(tmp_path, device="cpu", tokenizer=str(MODEL), compile=compiles, num_blocks=8)
        assert engine.info.decode == ("CPU kernels" if compiles else "plain PyTorch")
        [completion] = engine.generate([list(range(3, 40))], temperature=0.0, max_tokens=4, logprobs=1)
        found.append([token.logprob for token in completion.tokens])
        engine.close()
    assert found[1] == pytest.approx(found[0], rel=1e-5, abs=1e-5)


def test_linear_layers_keep_the_type_of_the_file_until_they_are_replaced():
    arrived = []

    def replace_some(name: str, module: nn.Module) -> nn.Module | None:
        if isinstance(module, nn.Linear):
            arrived.append(module.weight.dtype)
        return None

    model = load_model(MODEL, dtype=torch.float32, arrived=replace_some, keeps_types=True)
    assert set(arrived) == {torch.bfloat16}
    types = {parameter.dtype for name, parameter in model.named_parameters() if "embed_tokens" not in name}
    assert types == {torch.float32}
    assert model.model.embed_tokens.weight.dtype == torch.bfloat16  # they are looked up, and then widened
    ids, places = torch.tensor([5, 6, 7]), torch.arange(3)
    plain = load_model(MODEL, dtype=torch.float32)
    assert torch.equal(model.embed(ids, places), plain.embed(ids, places))


def test_narrow_embeddings_give_the_logits_of_wide_ones():
    weight, hidden = torch.randn(5000, 16).bfloat16(), torch.randn(3, 16)
    torch.testing.assert_close(tied_logits(hidden, weight), hidden @ weight.float().t())


@pytest.mark.parametrize("quantization", [None, "int8"])
@pytest.mark.parametrize("kind", ["dense", "experts"])
def test_blocks_of_fp8_run_on_the_cpu_kernels_as_they_are_or_are_quantized_anew(tmp_path, kind, quantization):
    need_cpu_kernels()
    declared = {"quant_method": "fp8", "weight_block_size": [48, 64]}
    model = None if kind == "dense" else tiny_model(replace(PACKABLE, num_experts=4, expert_size=128))
    packed, plain = write_packed(tmp_path, lambda weight: fp8_blocks(weight, (48, 64)), declared, model=model)
    cpu, config = torch.device("cpu"), EngineConfig(device="cpu", num_blocks=8, block_size=4, quantization=quantization)
    expected = load_network(plain, replace(config, compile=False, quantization=None), cpu, None).backend
    backends = [load_network(packed, replace(config, compile=each), cpu, None).backend for each in (True, False)]
    inputs = step_inputs({0: (0, [3, 1, 4, 1, 5])})
    wanted = expected.prefill(inputs, torch.tensor([2, 4]))
    for backend in backends:
        logits = backend.prefill(inputs, torch.tensor([2, 4]))
        if quantization is None:
            torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=1e-4)
        assert (logits - wanted).norm() / wanted.norm() < 0.05
    kinds = {layer.kind for layer in backends[0].model.modules() if isinstance(layer, PackedLinear)}
    assert ("int8" if quantization else "fp8") in kinds
    assert backends[0].decode_path == "CPU kernels" or quantization
    for backend in (*backends, expected):
        backend.close()
