"""Which layers are quantized."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn

from flambeau.llm.errors import LLMError
from flambeau.llm.models.transformer import Transformer
from flambeau.llm.quantize.quantizer import quantize
from flambeau.llm.quantize.row_scaled import Fp8Linear, Int8Linear
from flambeau.llm.quantize.settings import QuantizationSettings
from support.kernel_families import recurrent
from support.llm_steps import random_model
from support.tiny_models import ARCH


def quantized_parts(model: Transformer) -> set[str]:
    """The last words of the names of layers with 8 bits."""
    return {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, Int8Linear)}


class TestWhichLayers:
    def test_all_linear_ones_but_the_last_and_the_router(self):
        model = Transformer(replace(ARCH, num_experts=4, expert_size=64, hidden_size=64))
        quantize(model, "int8")
        kinds = {name.split(".")[-1]: type(module).__name__ for name, module in model.named_modules()}
        assert (kinds["qkv_proj"], kinds["o_proj"]) == ("Int8Linear", "Int8Linear")
        assert (kinds["gate"], kinds["lm_head"], kinds["embed_tokens"]) == ("Linear", "Linear", "Embedding")

    def test_the_last_one_when_asked(self):
        assert isinstance(quantize(Transformer(ARCH), "fp8", lm_head=True).lm_head, Fp8Linear)

    def test_smaller_groups_where_they_fit_and_none_where_they_do_not(self):
        model = quantize(Transformer(replace(ARCH, hidden_size=96, intermediate_size=80)), "int4", group_size=128)
        assert model.model.layers[0].self_attn.qkv_proj.group_size == 32
        assert isinstance(model.model.layers[0].mlp.down_proj, nn.Linear)

    def test_not_what_gives_time_steps_of_states(self):
        model = quantize(random_model(**recurrent("mamba", 0, 1), has_mlp=False), "int8")
        assert quantized_parts(model) == {"in_proj", "out_proj"}

    def test_not_the_gates_of_norms(self):
        model = quantize(Transformer(replace(ARCH, norm_gate_rank=16)), "int8")
        assert quantized_parts(model) == {"qkv_proj", "o_proj", "gate_up_proj", "down_proj"}

    def test_files_of_other_tools_may_have_time_steps_of_a_few_bits(self):
        linear = nn.Linear(32, 9)
        assert QuantizationSettings(kind="int8", time_steps=True).applies_to("model.layers.0.mixer.x_proj", linear)

    def test_what_does_not_exist_is_refused(self):
        with pytest.raises(LLMError, match="one of int8, int4, fp8, not 'int3'"):
            quantize(Transformer(ARCH), "int3")
        with pytest.raises(LLMError, match="one of 32, 64, 128, not 7"):
            quantize(Transformer(ARCH), "int4", group_size=7)
