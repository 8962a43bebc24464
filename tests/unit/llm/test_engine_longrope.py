"""With longrope, each sequence has the rotary factors of its own length, whatever else runs and is cached."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch

from flambeau.llm.backends.cpu.backend import CpuBackend
from flambeau.llm.checkpoints.checkpoint import load_model
from flambeau.llm.perplexity import perplexity
from flambeau.llm.sampling_params import SamplingParams
from support.async_backend import AsyncEagerBackend
from support.checkpoints import VOCAB_SIZE, write_checkpoint
from support.tiny_models import tiny_draft, tiny_engine

SWITCH = 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
LENGTHS = (3, 9, SWITCH - 1, SWITCH, SWITCH + 1, 30)  # those in the middle grow beyond the switch


@pytest.fixture(scope="module")
def networks(tmp_path_factory):
    """The engine's network and that of transformers."""
    folder = tmp_path_factory.mktemp("phi-3-long")
    reference = write_checkpoint(folder, "phi-3-long")
    return load_model(folder), reference


def prompt(length: int) -> list[int]:
    return torch.randint(3, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(5)).tolist()


@pytest.fixture(scope="module")
def expected(networks):
    """What transformers generates after a prompt of some length."""

    @cache
    def generate(length: int) -> list[int]:
        ids = torch.tensor([prompt(length)])
        # transformers 5.17 loses all but the last token where its cache is dropped at the switch.
        options = {
            "max_new_tokens": 12,
            "do_sample": False,
            "eos_token_id": None,
            "pad_token_id": 0,
            "use_cache": False,
        }
        return networks[1].generate(ids, attention_mask=torch.ones_like(ids), **options)[0, length:].tolist()

    return generate


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_step_tokens": 8},
        {"num_blocks": 24},
        {"prefix_cache": False},
        {"kind": AsyncEagerBackend},
        {"speculation": "lookup", "speculate_k": 3},
        {"draft": True, "speculate_k": 3},
    ],
    ids=str,
)
def test_tokens_are_those_of_transformers_before_and_after_the_switch(networks, expected, options):
    model, options = networks[0], dict(options)
    draft = tiny_draft(model) if options.pop("draft", False) else None
    engine = tiny_engine(model, draft=draft, **options)
    prompts = [prompt(length) for length in LENGTHS]
    for turn in range(2):  # the second finds prefixes
        together = [completion.token_ids for completion in engine.generate(prompts, GREEDY)]
        assert together == [expected(length) for length in LENGTHS], turn


def test_the_switch_is_seen(networks, expected):
    """Factors that change nothing would prove nothing."""
    scaling = networks[0].arch.rope_scaling
    assert scaling.switch_length == SWITCH
    short_only = replace(networks[0].arch, rope_scaling=replace(scaling, long_factors=scaling.short_factors))
    other = type(networks[0])(short_only)
    other.load_state_dict(networks[0].state_dict())
    found = tiny_engine(other).generate([prompt(9)], GREEDY)[0].token_ids
    assert found[:8] == expected(9)[:8]
    assert found != expected(9)


def test_compiled_kernels_read_the_tables_of_the_length(networks, expected):
    """Tables are changed in place, so code that holds their addresses sees it."""
    engine = tiny_engine(networks[0], kind=CpuBackend)
    try:
        assert engine._backend.wait_until_compiled(300)
        found = engine.generate([prompt(length) for length in LENGTHS], GREEDY)
        assert [completion.token_ids for completion in found] == [expected(length) for length in LENGTHS]
    finally:
        engine._backend.close()


@pytest.mark.parametrize("window", [SWITCH, 40])
def test_perplexity_has_the_factors_of_its_window(networks, window):
    model, reference = networks
    ids = prompt(window)
    with torch.inference_mode():
        loss = reference(torch.tensor([ids]), labels=torch.tensor([ids])).loss
    assert perplexity(model, ids, window=window) == pytest.approx(float(loss.exp()), rel=1e-4)
