"""Networks of transformers on a GPU say what they say on a CPU, in float32."""

from __future__ import annotations

import pytest
import torch

from flambeau.llm import SamplingParams
from support.other_networks import engine_of, load_other, some_prompts, write_other

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("name", ["Arcee", "VaultGemma", "DeepseekV3", "Mamba2", "Bamba", "Qwen3Next", "CodeGen"])
def test_tokens_are_those_of_a_cpu(tmp_path, name):
    write_other(tmp_path, name)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    on_cpu = engine_of(load_other(tmp_path))
    on_gpu = engine_of(load_other(tmp_path, device="cuda", dtype="float32"), "cuda")
    assert on_gpu.info.decode == on_cpu.info.decode
    expected = [completion.token_ids for completion in on_cpu.generate(some_prompts(), params)]
    assert [completion.token_ids for completion in on_gpu.generate(some_prompts(), params)] == expected
    assert on_gpu.state.num_blocks_used == 0
