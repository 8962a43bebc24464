"""Single keys of config.json are changed: the logits stay those of transformers, or the change is refused by name.

A sample of what `python -m support.config_attack` tries, and changes that once gave other logits.
"""

from __future__ import annotations

import pytest

from support.config_attack import BESIDE, DEFECTS, REMOVED, Change, attack, attack_together, pairs_of, sample_of

YARN = {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 32}
FOUND = [
    Change("gpt-neox", "partial_rotary_factor", 0.25),
    Change("gpt-neox", "num_attention_heads", 16),
    Change("gpt-j", "rope_theta", 1000.0),
    Change(
        "gpt-neox", "rope_parameters", {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 10.0}
    ),
    Change("phi-3", "layer_types", ["full_attention", "sliding_attention"]),
    Change("granite-moe", "norm_topk_prob", False),
    Change("starcoder-2", "layer_types", ["full_attention", "sliding_attention"]),
    Change("biogpt", "layer_norm_eps", 0.3),
    Change("opt", "layer_norm_eps", 0.3),
    Change("gemma-3", "attn_logit_softcapping", 0.5),
    Change("olmo-3", "sliding_window", REMOVED),
    Change("deepseek-v3", "topk_group", 0),
    Change("glm-4.5", "n_routed_experts", 9),
    Change("phi-4-mini", BESIDE, YARN),
    Change("phi-4-mini", "partial_rotary_factor", 0.0),
    Change("gpt-j", BESIDE, YARN),
    Change("phi-3-long", "original_max_position_embeddings", REMOVED),
    Change("olmo-hybrid", "rope_parameters", REMOVED),
    Change("kimi-linear", "rope_parameters", {"rope_theta": 1000.0, **YARN, "mscale": 0.7, "mscale_all_dim": 0.4}),
    Change(
        "gemma-3",
        "rope_parameters",
        {
            "full_attention": {"rope_theta": 500.0, **YARN, "truncate": False},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    ),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("change", FOUND, ids=str)
def test_a_change_is_computed_as_in_transformers_or_refused(tmp_path, change):
    verdict, detail = attack(change, tmp_path)
    assert verdict not in DEFECTS, detail


@pytest.mark.filterwarnings("ignore")
def test_layers_with_a_window_that_is_switched_off_are_refused(tmp_path):
    changes = [
        Change("smol-lm-3", "layer_types", ["sliding_attention", "full_attention"]),
        Change("smol-lm-3", "sliding_window", 9),
        Change("smol-lm-3", "use_sliding_window", False),
    ]
    verdict, detail = attack_together(changes, tmp_path)
    assert verdict == "refused"
    assert "use_sliding_window" in detail


@pytest.mark.filterwarnings("ignore")
def test_changes_chosen_by_chance_are_computed_as_in_transformers_or_refused(tmp_path):
    for i, change in enumerate(sample_of(8, seed=1)):
        verdict, detail = attack(change, tmp_path / str(i))
        assert verdict not in DEFECTS, (change, detail)


@pytest.mark.filterwarnings("ignore")
def test_changes_of_several_keys_are_computed_as_in_transformers_or_refused(tmp_path):
    for i, changes in enumerate(pairs_of(8, seed=1)):
        verdict, detail = attack_together(changes, tmp_path / str(i))
        assert verdict not in DEFECTS, (changes, detail)
