"""Prefixes of a cache on a GPU: copied to pinned memory and back beside the steps."""

from __future__ import annotations

import random
import time
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
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
OPTIONS = {"device": "cuda", "dtype": "float32", "num_blocks": 24, "max_model_len": 200}


def some_prompts(number: int) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(3, 400) for _ in range(130)] for _ in range(number)]


def run(engine: Engine, prompts: list[list[int]]) -> tuple[list[list[int]], list[int]]:
    """The tokens of each prompt, one after another, and how many tokens of it were cached."""
    tokens, num_cached = [], []
    for prompt in prompts:
        (completion,) = engine.generate([prompt], GREEDY)
        tokens.append(completion.token_ids)
        num_cached.append(completion.counts.num_cached)
        time.sleep(0.1)  # what is not saved in time is computed again
    return tokens, num_cached


@pytest.mark.parametrize("compile", [False, True])
def test_restored_prefixes_give_the_same_tokens(tmp_path, compile):
    prompts = some_prompts(6)
    plain = Engine.from_pretrained(MODEL, compile=compile, **OPTIONS)
    plain.generate(prompts[:1], GREEDY)
    plain.wait_until_compiled()
    expected, _ = run(plain, prompts)
    plain.close()
    stored = {"kv_host_memory_mb": 64, "kv_disk_folder": str(tmp_path)}
    engine = Engine.from_pretrained(MODEL, compile=compile, **OPTIONS, **stored)
    engine.generate(prompts[:1], GREEDY)
    engine.wait_until_compiled()
    for _ in range(3):
        tokens, num_cached = run(engine, prompts)
        assert tokens == expected
    assert engine.state.num_blocks_restored > 0
    assert num_cached == [128] * 6
    batch = [completion.token_ids for completion in engine.generate(prompts, GREEDY)]
    assert batch == expected
    engine.close()
    again = Engine.from_pretrained(MODEL, compile=compile, **OPTIONS, **stored)
    assert run(again, prompts) == (expected, [128] * 6)
    again.close()
