"""config.json in the form in which publishers of models write it, with keys beyond those of transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.hugging_face import from_hugging_face

FILES = {path.stem: path for path in (Path(__file__).parent / "published").glob("*.json")}


def published(name: str) -> Architecture:
    return from_hugging_face(json.loads(FILES[name].read_text()))


@pytest.mark.parametrize("name", sorted(FILES))
def test_every_key_is_understood(name):
    assert published(name).unknown_keys == ()


def test_deepseek_v3_has_groups_of_experts_and_sharper_attention():
    arch = published("deepseek-v3")
    assert (arch.num_experts, arch.num_experts_per_token, arch.num_expert_groups, arch.num_chosen_groups) == (
        256,
        8,
        8,
        4,
    )
    assert (arch.dense_layers, arch.shared_expert_size, arch.routed_scale) == ({0, 1, 2}, 2048, 2.5)
    assert arch.num_unused_layers == 1
    assert arch.attention_scale == pytest.approx(192**-0.5 * 1.3689**2, rel=1e-3)


def test_deepseek_v2_lite_has_no_latent_of_queries():
    arch = published("deepseek-v2-lite")
    assert (arch.query_latent_size, arch.num_expert_groups, arch.shared_expert_size) == (0, 1, 2816)


def test_deepseek_v4_compresses_in_all_layers_but_two():
    arch = published("deepseek-v4-flash")
    assert arch.compression is not None
    assert arch.compression.rates[:5] == (0, 0, 4, 128, 4)
    assert (arch.rotary_size, arch.rope_theta, arch.local_rope_theta) == (64, 160000.0, 10000.0)
    assert (arch.hashed_layers, arch.windows) == ({0, 1, 2}, (128,) * 43)


def test_hy_4_has_a_key_for_each_head_whatever_its_file_says():
    arch = published("hy-4")
    assert arch.indexer is not None
    assert (arch.num_kv_heads, arch.value_size, len(arch.indexer.reusing_layers)) == (1, 256, 57)


def test_glm_5_3_has_an_indexer_in_every_fourth_layer():
    arch = published("glm-5.3-flash")
    assert arch.indexer is not None
    assert [layer for layer in range(45) if arch.index_size(layer)] == [*range(3, 45, 4)]
    assert (arch.head_size, arch.rotary_size, arch.indexer.pool_size) == (512, 0, 4)


def test_llama_4_has_chunks_in_layers_with_positions_and_no_tables_of_ten_million():
    arch = published("llama-4-scout")
    assert arch.chunks[:4] == (8192, 8192, 8192, None)
    assert arch.unrotated_layers == set(range(3, 48, 4))
    assert (arch.dense_layers, arch.temperature_length, arch.eos_ids) == (set(), 8192, (200001, 200007, 200008))


def test_theta_of_hunyuan_is_stretched():
    assert published("hunyuan-7b").rope_theta == pytest.approx(10000.0 * 1000.0 ** (128 / 126))
