"""A crowd of mixed requests, some of which are cancelled, in too small a cache: each gets what it gets alone."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from flambeau.llm.sampling_params import SamplingParams
from support.async_backend import AsyncEagerBackend
from support.tiny_models import ARCH, tiny_draft, tiny_engine, tiny_model

WINDOWED = replace(ARCH, head_size=16, windows=(None, 6, 11))
KINDS = {"plain": {}, "ahead": {"kind": AsyncEagerBackend}, "look-up": {"speculation": "lookup"}, "draft": {}}


def some_params(rng: random.Random) -> SamplingParams:
    most = rng.randrange(1, 30)
    settings = {"max_tokens": most, "n": rng.choice([1, 1, 1, 3]), "speculate": rng.random() < 0.8}
    if rng.random() < 0.5:
        settings["temperature"] = 0.0
    else:
        settings |= {"seed": rng.randrange(1000), "top_k": rng.choice([0, 5, 80]), "top_p": rng.choice([1.0, 0.7])}
    if rng.random() < 0.3:
        settings |= {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.3}
    if rng.random() < 0.3:
        settings |= {"stop_token_ids": [rng.randrange(97) for _ in range(3)], "min_tokens": rng.randrange(most)}
    return SamplingParams(**settings)


def some_requests(rng: random.Random) -> dict[str, tuple[list[int], SamplingParams]]:
    """Prompts that begin alike, and some that repeat themselves."""
    base = [rng.randrange(97) for _ in range(40)]
    found = {}
    for i in range(10):
        prompt = base[: rng.randrange(1, 40)] + [rng.randrange(97) for _ in range(rng.randrange(12))]
        found[str(i)] = (prompt if i % 3 else prompt[:4] * rng.randrange(1, 8), some_params(rng))
    return found


def run(engine, requests, rng: random.Random | None = None, num_tenants: int = 1):
    """The tokens and the end of each choice; with `rng`, requests come and go at random."""
    coming, made, ends = [*requests.items()], {}, {}
    for _ in range(2000):
        while coming and (rng is None or rng.random() < 0.5):
            name, (prompt, params) = coming.pop(0)
            engine.add(name, prompt, params, tenant=f"key{int(name) % num_tenants}")
        for output in engine.step():
            place = (output.request_id, output.index)
            made.setdefault(place, []).extend(output.token_ids)
            if output.finish_reason:
                ends[place] = (made[place], output.finish_reason, output.counts.num_generated)
        if rng is not None and rng.random() < 0.03:
            gone = rng.choice([*requests])
            engine.cancel(gone)
            coming = [each for each in coming if each[0] != gone]
            requests = {name: each for name, each in requests.items() if name != gone}
        if not coming and not engine.has_work:
            return {place: end for place, end in ends.items() if place[0] in requests}, requests
    raise AssertionError("somebody never leaves")


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("arch", [ARCH, WINDOWED], ids=["plain attention", "kernels, windows"])
def test_each_of_a_crowd_gets_what_it_gets_alone(arch, kind, seed):
    rng = random.Random(f"{kind} {seed}")
    model = tiny_model(arch)
    engine = tiny_engine(
        model,
        draft=tiny_draft(model) if kind == "draft" else None,
        num_blocks=rng.choice([26, 40]),
        max_step_tokens=rng.choice([9, 64, 512]),
        max_num_seqs=rng.choice([3, 8]),
        speculate_k=rng.choice([1, 3, 5]),
        prefix_cache=seed != 0,
        **KINDS[kind],
    )
    found, stayed = run(engine, some_requests(rng), rng, num_tenants=1 + 2 * seed)
    assert engine.state.num_blocks_used == 0
    for name, (prompt, params) in stayed.items():
        alone, _ = run(tiny_engine(model, num_blocks=100), {name: (prompt, replace(params, speculate=False))})
        assert {place: end for place, end in found.items() if place[0] == name} == alone
