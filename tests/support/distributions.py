"""Whether the second and third tokens of many sampled answers have the distribution of the network itself."""

from __future__ import annotations

import itertools
import math

import torch

from flambeau.llm.backends.eager import WholeAttention
from flambeau.llm.engine import Engine
from flambeau.llm.models.transformer import Transformer
from flambeau.llm.sampling_params import SamplingParams
from support.statistics import chi_square_p

PROMPT, FOUR = [1, 2, 3, 4, 4, 2, 1, 3], [1, 2, 3, 4]


def check_distribution(engine: Engine, model: Transformer, *, bias: float = 100.0, temperature: float = 2.0) -> None:
    """Only four tokens may come; some proposals of them are accepted, and some are not."""
    params = SamplingParams(
        max_tokens=3, top_k=4, temperature=temperature, n=128, ignore_eos=True, logit_bias=dict.fromkeys(FOUR, bias)
    )
    completions = [each for _ in range(4) for each in engine.generate([PROMPT], params)]
    assert 0 < sum(c.counts.num_accepted for c in completions) < sum(c.counts.num_drafted for c in completions)
    pairs = [tuple(completion.token_ids[1:]) for completion in completions]
    expected = dict.fromkeys(itertools.product(FOUR, FOUR), 0.0)
    for ids in itertools.product(FOUR, repeat=3):
        expected[ids[1:]] += math.prod(share(model, [*PROMPT, *ids[:i]], ids[i], temperature) for i in range(3))
    found = [pairs.count(pair) for pair in expected]
    assert sum(found) == len(pairs)
    assert chi_square_p(found, [len(pairs) * each for each in expected.values()]) > 1e-4


def share(model: Transformer, tokens: list[int], token: int, temperature: float) -> float:
    ids = torch.tensor(tokens)
    with torch.inference_mode():
        logits = model.logits(model(ids, torch.arange(len(ids)), WholeAttention())[-1]).double()
    return float((logits[FOUR] / temperature).softmax(-1)[FOUR.index(token)])
