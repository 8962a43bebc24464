"""Adapters on a GPU give the tokens of a CPU, also after CUDA graphs were captured for steps without them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import flambeau.examples.storyteller
from flambeau.llm import Engine, SamplingParams
from support.adapters import layer_shapes, write_adapter

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("default"),  # the compiler's own
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MODEL = Path(flambeau.examples.storyteller.__file__).parent / "target"
PROMPTS = ["Once upon a time", "The future of", "The"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=32)


def test_tokens_are_those_of_a_cpu(tmp_path):
    shapes = layer_shapes(MODEL)
    adapters = {name: str(write_adapter(tmp_path / name, shapes, alpha=1, seed=i)) for i, name in enumerate("ab", 1)}
    on_cpu = Engine.from_pretrained(MODEL, device="cpu", num_blocks=256, lora_adapters=adapters)
    on_gpu = Engine.from_pretrained(MODEL, device="cuda", dtype="float32", num_blocks=256, lora_adapters=adapters)
    on_gpu.generate(PROMPTS, GREEDY)  # eager steps that ask for graphs
    on_gpu.wait_until_compiled()

    def tokens_of(engine):
        return [[each.token_ids for each in engine.generate(PROMPTS, GREEDY, adapter=name)] for name in ("", "a", "b")]

    expected = tokens_of(on_cpu)
    for _ in range(3):  # as plain PyTorch, which asks for the kernels of adapters, then for their graphs
        assert tokens_of(on_gpu) == expected
        on_gpu.wait_until_compiled()
    assert on_gpu._backend._lora_networks
    assert any(len(key) == 3 for key in on_gpu._backend._captured)
    on_cpu.close()
    on_gpu.close()
