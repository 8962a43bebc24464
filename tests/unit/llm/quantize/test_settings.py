"""Which layers are quantized."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn

from flambeau.llm.errors import LLMError
from flambeau.llm.models.transformer import Transformer
from flambeau.llm.quantize.quantizer import quantize
from flambeau.llm.quantize.row_scaled import Fp8Linear
from support.tiny_models import ARCH


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

    def test_what_does_not_exist_is_refused(self):
        with pytest.raises(LLMError, match="one of int8, int4, fp8, not 'int3'"):
            quantize(Transformer(ARCH), "int3")
        with pytest.raises(LLMError, match="one of 32, 64, 128, not 7"):
            quantize(Transformer(ARCH), "int4", group_size=7)
