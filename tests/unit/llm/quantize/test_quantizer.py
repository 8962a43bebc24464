"""Quantization: smaller weights, nearly the same network; measured on the one that is shipped."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional as F

import flambeau.examples.storyteller
from flambeau.llm.backends.eager import WholeAttention
from flambeau.llm.checkpoints import quantized
from flambeau.llm.checkpoints.checkpoint import load_model, read_architecture
from flambeau.llm.checkpoints.quantized import save_quantized
from flambeau.llm.config import EngineConfig
from flambeau.llm.errors import CheckpointError, InvalidRequest, LLMError
from flambeau.llm.executor.shard import Shard, local_architecture
from flambeau.llm.loader import load_engine
from flambeau.llm.models.tensor_names import parts_of
from flambeau.llm.models.transformer import Transformer
from flambeau.llm.perplexity import perplexity, perplexity_of
from flambeau.llm.quantize import int4, row_scaled
from flambeau.llm.quantize.int4 import Int4Linear, pack_int4, unpack_int4
from flambeau.llm.quantize.packed_layers import use_fast_layers
from flambeau.llm.quantize.quantizer import ExpertStack, build, quantize, quantize_on_load, quantized_layer
from flambeau.llm.quantize.row_scaled import Fp8Linear, Int8Linear
from flambeau.llm.quantize.settings import QuantizationSettings
from flambeau.llm.sampling_params import SamplingParams
from flambeau.llm.text.tokenizer import load_tokenizer
from support.tiny_models import ARCH
from support.unseen_tales import TALES

KINDS = {"int8": Int8Linear, "int4": Int4Linear, "fp8": Fp8Linear}


def layer_of(kind, linear, group_size=32):
    return quantized_layer(linear, QuantizationSettings(kind=kind, group_size=group_size))


def squared_error(weight):
    return (int4.dequantize_groups(*int4.quantize_int4(weight, 64), torch.float32) - weight).square().sum()


class TestLayers:
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("shape", [(5,), (2, 3)])
    @pytest.mark.parametrize("bias", [False, True])
    def test_a_layer_computes_with_the_weights_it_stands_for(self, linear, kind, shape, bias):
        linear.bias = linear.bias if bias else None
        layer = layer_of(kind, linear)
        assert isinstance(layer, KINDS[kind])
        x = torch.randn(*shape, 128)
        expected = F.linear(x, layer.dequantize(torch.float32), linear.bias)
        torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)

    def test_int8_is_within_half_a_step(self, linear):
        step = linear.weight.abs().amax(dim=1, keepdim=True) / 127
        error = (layer_of("int8", linear).dequantize(torch.float32) - linear.weight).abs()
        assert (error <= 0.76 * step).all()  # half, and a quarter at the very end: scales are rounded to bfloat16
        assert error.mean() < 0.26 * step.mean()

    @pytest.mark.parametrize("make", [Int8Linear, Fp8Linear])
    def test_some_rows_at_a_time_give_the_same(self, make, linear, monkeypatch):
        whole = make.from_linear(linear)
        monkeypatch.setattr(row_scaled, "QUANTIZED_AT_ONCE", 3 * linear.in_features)
        parts = make.from_linear(linear)
        assert parts.weight.dtype == whole.weight.dtype
        assert torch.equal(parts.weight.float(), whole.weight.float())
        assert torch.equal(parts.scale, whole.scale)

    def test_fp8_keeps_three_bits_after_the_first(self, linear):
        error = (layer_of("fp8", linear).dequantize(torch.float32) - linear.weight).abs()
        smallest = linear.weight.abs().amax(dim=1, keepdim=True) / 448 * 2**-9
        assert (error <= linear.weight.abs() / 16 + smallest).all()

    @pytest.mark.parametrize(("name", "value", "share"), [("NUM_FITS", 0, 0.98), ("MOVES", (), 0.95)])
    def test_fitted_scales_and_ends_that_move_alone_make_int4_more_exact(self, monkeypatch, name, value, share):
        weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
        found = squared_error(weight)
        monkeypatch.setattr(int4, name, value)
        assert found < share * squared_error(weight)

    def test_int4_is_more_exact_than_symmetric_levels_of_as_many_bits(self):
        """Groups of 32 with one scale, as llama.cpp's q4_0 has them, also take 4.5 bits for a weight."""
        weight = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
        groups = weight.view(256, -1, 32)
        largest = groups.gather(2, groups.abs().argmax(dim=2, keepdim=True))
        step = (largest / -8).half().float()
        symmetric = (groups / step).round().clamp(-8, 7) * step
        assert squared_error(weight) < 0.92 * (symmetric - groups).square().sum()

    def test_int4_keeps_groups_of_equal_numbers(self):
        weight = torch.cat([torch.full((2, 64), 0.5), torch.zeros(2, 64)])
        assert torch.equal(int4.dequantize_groups(*int4.quantize_int4(weight, 64), torch.float32), weight)

    @pytest.mark.parametrize("group_size", int4.GROUP_SIZES)
    def test_int4_is_no_worse_than_sixteen_levels_between_the_ends_of_each_group(self, linear, group_size):
        weight = linear.weight.view(48, -1, group_size)
        low, high = weight.amin(2, keepdim=True), weight.amax(2, keepdim=True)
        step = (high - low) / 15
        simple = ((weight - low) / step).round() * step + low
        layer = layer_of("int4", linear, group_size)
        error = (layer.dequantize(torch.float32).view_as(weight) - weight).square().sum(2)
        assert error.sum() < (simple - weight).square().sum()
        assert layer.weight.shape == (48, 64)

    def test_two_weights_lie_in_a_byte(self):
        levels = torch.arange(16, dtype=torch.uint8).repeat(2, 2)
        assert torch.equal(unpack_int4(pack_int4(levels)), levels)
        assert pack_int4(torch.tensor([[1, 2]], dtype=torch.uint8)).item() == 0x12

    def test_rows_are_quantized_in_portions_with_the_same_result(self, linear, monkeypatch):
        whole = layer_of("int4", linear)
        monkeypatch.setattr(int4, "MAX_WEIGHTS_AT_ONCE", 300)
        assert torch.equal(layer_of("int4", linear).weight, whole.weight)

    @pytest.mark.parametrize("kind", KINDS)
    def test_weights_that_are_all_alike_survive(self, kind):
        linear = nn.Linear(32, 3, bias=False).requires_grad_(False)
        linear.weight[0], linear.weight[1], linear.weight[2] = 0.0, 0.5, -2.0
        torch.testing.assert_close(layer_of(kind, linear).dequantize(torch.float32), linear.weight, rtol=0.01, atol=0)


@pytest.fixture(scope="module")
def folder():
    return Path(flambeau.examples.storyteller.__file__).parent / "target"


@pytest.fixture(scope="module")
def ids(folder):
    return load_tokenizer(folder).encode(TALES)


@pytest.fixture(scope="module")
def before(folder, ids):
    return perplexity(load(folder), ids)


def load(folder, **options):
    return load_model(folder, dtype=torch.float32, **options)


def logits(model, ids):
    with torch.inference_mode():
        given = torch.tensor(ids[:32])
        return model.logits(model(given, torch.arange(32), WholeAttention()))


class TestPerplexity:
    def test_network_has_learnt_something(self, folder, ids, before):
        assert before < load(folder).arch.vocab_size / 3

    @pytest.mark.parametrize(("kind", "group_size", "limit"), [("int8", 64, 1.005), ("fp8", 64, 1.02)])
    def test_eight_bits_cost_next_to_nothing(self, folder, ids, before, kind, group_size, limit):
        model = quantize(load(folder), kind)
        assert 0.95 < perplexity(model, ids) / before < limit
        use_fast_layers(model, torch.float32)
        assert 0.95 < perplexity(model, ids) / before < limit

    @pytest.mark.parametrize("group_size", int4.GROUP_SIZES)
    def test_four_bits_cost_a_little(self, folder, ids, before, group_size):
        model = quantize(load(folder), "int4", group_size=group_size)
        assert 0.95 < perplexity(model, ids) / before < 1.08
        use_fast_layers(model, torch.float32)
        assert 0.95 < perplexity(model, ids) / before < 1.08

    def test_a_mistake_in_the_bits_would_be_seen(self, folder, ids, before):
        model = quantize(load(folder), "int4")
        for module in model.modules():
            if isinstance(module, Int4Linear):
                module.weight = module.weight >> 4 | module.weight << 4  # the halves of each byte change places
        assert perplexity(model, ids) > 2 * before

    def test_who_knows_nothing_is_as_surprised_as_there_are_tokens(self):
        model = Transformer(ARCH)
        nn.init.zeros_(model.lm_head.weight)
        assert perplexity(model, list(range(97))) == pytest.approx(97, rel=1e-4)

    def test_one_token_is_too_short(self):
        with pytest.raises(InvalidRequest, match="two tokens"):
            perplexity(Transformer(ARCH), [1])


class TestFiles:
    @pytest.mark.parametrize("kind", KINDS)
    def test_written_and_read_it_is_the_network_quantized_in_memory(self, folder, ids, tmp_path, kind, monkeypatch):
        monkeypatch.setattr(quantized, "MAX_FILE_BYTES", 1_000_000)
        save_quantized(folder, tmp_path / "small", kind, group_size=64)
        expected = quantize(load(folder), kind)
        model = load(tmp_path / "small")
        assert isinstance(model.model.layers[1].mlp.gate_up_proj, KINDS[kind])
        assert torch.equal(logits(model, ids), logits(expected, ids))
        assert len([*(tmp_path / "small").glob("model-*.safetensors")]) > 1
        assert not [*tmp_path.glob("*.partial")]

    def test_everything_else_is_there_too_and_the_weights_are_smaller(self, folder, ids, tmp_path):
        out = tmp_path / "new" / "small"
        save_quantized(folder, out, "int4", group_size=128)
        config = json.loads((out / "config.json").read_text())
        assert config["quantization_config"] == {
            "quant_method": "flambeau",
            "kind": "int4",
            "lm_head": False,
            "group_size": 128,
        }
        assert {path.name for path in out.iterdir()} == {path.name for path in folder.iterdir()}
        # The embedding stays as it is: a quarter of this model.
        assert (out / "model.safetensors").stat().st_size < 0.5 * (folder / "model.safetensors").stat().st_size
        assert perplexity_of(out, TALES) == pytest.approx(perplexity_of(folder, TALES), rel=0.1)

    def test_quantized_while_loading_it_is_the_same(self, folder, ids):
        arrived = quantize_on_load("int8", read_architecture(folder))
        model = load(folder, arrived=arrived)
        assert torch.equal(logits(model, ids), logits(quantize(load(folder), "int8"), ids))

    def test_a_share_of_quantized_files_is_a_share_of_the_network(self, folder, tmp_path):
        for kind in KINDS:
            small = tmp_path / kind
            save_quantized(folder, small, kind, group_size=32)
            arch = read_architecture(small)
            local = local_architecture(arch, 2)
            shares = [
                load(small, build=lambda _, local=local: build(local), shard=Shard(arch, rank, 2)) for rank in range(2)
            ]
            whole = load(small).model.layers[0].mlp.down_proj
            x = torch.randn(3, arch.intermediate_size)
            parts = [
                share.model.layers[0].mlp.down_proj(half) for share, half in zip(shares, x.chunk(2, 1), strict=True)
            ]
            torch.testing.assert_close(parts[0] + parts[1], whole(x), rtol=1e-4, atol=1e-4)

    def test_what_cannot_be_written_is_refused(self, folder, tmp_path):
        with pytest.raises(CheckpointError, match="is there already"):
            save_quantized(folder, folder, "int8")
        with pytest.raises(CheckpointError, match=r"no config\.json"):
            save_quantized(tmp_path, tmp_path / "out", "int8")
        damaged = tmp_path / "damaged"
        shutil.copytree(folder, damaged)
        (damaged / "model.safetensors").write_bytes(b"cut")
        with pytest.raises(CheckpointError, match="is cut off or damaged"):
            save_quantized(damaged, tmp_path / "out", "int8")
        assert [file.name for file in tmp_path.iterdir()] == ["damaged"]  # nothing half-written
        save_quantized(folder, tmp_path / "small", "int8")
        with pytest.raises(CheckpointError, match="quantized already"):
            save_quantized(tmp_path / "small", tmp_path / "smaller", "int4")

    @pytest.mark.parametrize(
        ("key", "factor", "says"), [("hidden_size", 2, "of another shape"), ("num_hidden_layers", 2, "missing: model")]
    )
    def test_weights_that_do_not_fit_their_description_are_refused(self, folder, tmp_path, key, factor, says):
        other, out = tmp_path / "other", tmp_path / "out"
        shutil.copytree(folder, other)
        config = json.loads((other / "config.json").read_text())
        (other / "config.json").write_text(json.dumps(config | {key: config[key] * factor}))
        with pytest.raises(CheckpointError, match=f"do not fit the architecture: .*{says}"):
            save_quantized(other, out, "int8")
        assert [file.name for file in tmp_path.iterdir()] == ["other"]

    def test_what_cannot_be_read_is_refused(self, folder, tmp_path):
        save_quantized(folder, tmp_path / "small", "int8")
        arch = read_architecture(tmp_path / "small")
        assert quantize_on_load("int8", arch) is None
        with pytest.raises(LLMError, match="holds int8 weights; leave quantization out, or load the original"):
            quantize_on_load("int4", arch)
        with pytest.raises(CheckpointError, match="quantization_config"):
            build(replace(arch, source={"quantization_config": {"quant_method": "flambeau", "kind": "int3"}}))


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_an_engine_of_quantized_weights_gives_everybody_the_tokens_it_gets_alone(folder, kind):
    engine = load_engine(folder, EngineConfig(device="cpu", quantization=kind, compile=False, block_size=4))
    params = SamplingParams(max_tokens=12, temperature=0)
    prompts = ["Once upon a time", "The future of", "Dear Anna,\n\n", "x"]
    together = engine.generate(prompts, params)
    alone = [engine.generate(prompt, params)[0] for prompt in prompts]
    assert [one.text for one in together] == [one.text for one in alone]
    assert any(one.text for one in together)


class TestExperts:
    @pytest.fixture
    def sparse(self, tmp_path):
        """A checkpoint with experts, in which every expert has tensors of its own."""
        config = {
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "vocab_size": 64,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 64,
            "tie_word_embeddings": False,
        }
        folder = tmp_path / "sparse"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        torch.manual_seed(0)
        model = Transformer(read_architecture(folder))
        tensors = {
            part: value[region].clone()
            for name, value in model.state_dict().items()
            for part, region in parts_of(model.arch, name, value).items()
        }
        assert "model.layers.1.mlp.experts.3.down_proj.weight" in tensors
        save_file(tensors, folder / "model.safetensors")
        return folder

    @pytest.mark.parametrize("kind", KINDS)
    def test_written_and_read_they_are_those_quantized_in_memory(self, sparse, tmp_path, kind):
        save_quantized(sparse, tmp_path / "small", kind, group_size=32)
        read = load(tmp_path / "small")
        assert isinstance(read.model.layers[0].mlp.experts.down_proj, ExpertStack)
        expected = quantize(load(sparse), kind, group_size=32)
        ids = list(range(32))
        assert torch.equal(logits(read, ids), logits(expected, ids))
        original = logits(load(sparse), ids)
        assert (logits(read, ids) - original).abs().mean() < 0.2 * original.abs().mean()

    @pytest.mark.parametrize("kind", KINDS)
    def test_all_ways_through_them_agree(self, sparse, kind):
        experts = quantize(load(sparse), kind, group_size=32).model.layers[0].mlp.experts
        x = torch.randn(5, 64)
        chosen = torch.tensor([[0, 1], [1, 2], [3, 0], [2, 3], [0, 3]])
        weights = torch.rand(5, 2)
        expected = experts.compute_each(x, chosen, weights)
        torch.testing.assert_close(experts.compute_gathered(x, chosen, weights), expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(experts.compute_all(x, chosen, weights), expected, rtol=1e-4, atol=1e-5)

    def test_quantized_while_loading_they_are_the_same(self, sparse):
        model = load(sparse, arrived=quantize_on_load("int8", read_architecture(sparse)))
        ids = list(range(32))
        assert torch.equal(logits(model, ids), logits(quantize(load(sparse), "int8"), ids))
