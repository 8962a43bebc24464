"""The whole engine on a GPU says what it says on a CPU, in float32."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import flambeau.examples.storyteller
from flambeau.llm import Engine, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("default"),  # the compiler's own
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MODEL = Path(flambeau.examples.storyteller.__file__).parent / "target"
DRAFT = MODEL.parent / "draft"
PROMPTS = ["Once upon a time", "The future of", "Dear Anna,\n\nthank", "The", "Reader:\nTell me"]


@pytest.fixture(scope="module")
def on_cpu():
    engine = Engine.from_pretrained(MODEL, device="cpu", num_blocks=512)
    yield engine
    engine.close()


@pytest.fixture(scope="module", params=["plain", "draft", "lookup"])
def on_gpu(request):
    ways = {"plain": {}, "draft": {"draft": str(DRAFT), "speculate_k": 3}, "lookup": {"speculate_k": 3}}
    options = ways[request.param]
    if request.param == "lookup":
        options = {**options, "speculation": "lookup"}
    engine = Engine.from_pretrained(MODEL, device="cuda", dtype="float32", num_blocks=512, **options)
    for number in (1, len(PROMPTS)):  # eager steps that ask for graphs
        engine.generate(PROMPTS[:number], SamplingParams(temperature=0.0, max_tokens=12))
    engine.wait_until_compiled()
    yield engine
    engine.close()


SETTINGS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=48),
    "sampled": SamplingParams(temperature=0.8, top_k=50, top_p=0.9, seed=7, max_tokens=48),
    "large top-k": SamplingParams(temperature=0.8, top_k=200, seed=3, max_tokens=48),
    "unfiltered": SamplingParams(seed=4, max_tokens=32),
    "top-p": SamplingParams(top_p=0.7, seed=5, max_tokens=32),
    "penalties": SamplingParams(temperature=0.0, repetition_penalty=1.2, presence_penalty=0.3, max_tokens=32),
    "logprobs": SamplingParams(temperature=0.0, logprobs=2, max_tokens=16),
}


@pytest.mark.parametrize("settings", SETTINGS)
def test_tokens_are_those_of_a_cpu(on_cpu, on_gpu, settings):
    params = SETTINGS[settings]
    expected = [completion.token_ids for completion in on_cpu.generate(PROMPTS, params)]
    for _ in range(2):
        assert [completion.token_ids for completion in on_gpu.generate(PROMPTS, params)] == expected
    assert on_gpu.generate(PROMPTS[:1], params)[0].token_ids == expected[0]


def test_blocks_are_free_at_the_end(on_gpu):
    assert on_gpu.state.num_blocks_used == 0
