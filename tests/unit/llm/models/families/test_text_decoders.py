"""Decoders of models that read images, whose encoders are left out; and files with sections or lists of their own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from flambeau.llm.checkpoints.quantized import save_quantized
from flambeau.llm.errors import CheckpointError
from flambeau.llm.models.hugging_face import from_hugging_face
from support.checkpoints import ENCODER, TINY, config_of, import_transformers, random_weights, write_checkpoint
from unit.llm.models.families.test_llama_like import LENGTH, TOLERANCE, expected_logits, found_logits, rewrite

TEXT = {key: value for key, value in TINY.items() if key != "rope_theta"}
TOWER = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32}
HUNYUAN_ROPE = {"rope_type": "xdrope", "rope_theta": 9000.0, "alpha": 1000.0, "factor": 1.0}
WHOLE: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # the settings of the decoder and of the encoder
    "Aria": (
        {"model_type": "aria_text", "moe_num_experts": 4, "moe_topk": 2},
        {"model_type": "idefics3_vision", **ENCODER},
    ),
    "HunYuanVL": (
        {
            "model_type": "hunyuan_vl_text",
            "head_dim": 8,
            "rope_parameters": {**HUNYUAN_ROPE, "xdrope_section": [1, 1, 1, 1]},
        },
        {**ENCODER, "out_hidden_size": 32},
    ),
    "Ernie4_5_VLMoe": (
        {
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": [24, 16],
            "rope_parameters": {"rope_type": "default", "rope_theta": 9000.0, "mrope_section": [1, 1, 2]},
        },
        {key: value for key, value in TOWER.items() if key != "out_hidden_size"},
    ),
    "CohereCompass": (
        {
            "model_type": "cohere_compass_text",
            "sliding_window": 9,
            "pad_token_id": None,
            "logit_scale": 0.5,
            "tie_word_embeddings": False,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 9000.0, "mrope_section": [2, 1, 1]},
                "full_attention": None,
            },
        },
        {**TOWER, "deepstack_visual_indexes": []},
    ),
}
EXAONE = (  # which reads images
    {"model_type": "exaone4", "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"]},
    {**TOWER, "num_key_value_heads": 1, "patch_size": 4, "fullatt_block_indexes": [0]},
)
NEEDS_TYPES = ("HunYuanVL", "Ernie4_5_VLMoe", "CohereCompass")  # of tokens: 0 for those of a text


def write_whole(folder: Path, family: str) -> Any:
    """A checkpoint with an encoder, as transformers writes it."""
    transformers = import_transformers()
    text, vision = {**WHOLE, "Exaone4_5_": EXAONE}[family]
    config = getattr(transformers, f"{family}Config")(text_config={**TEXT, **text}, vision_config=vision)
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config).eval().requires_grad_(False)
    random_weights(model)
    model.save_pretrained(folder)
    return model


def text_logits(reference: Any, family: str) -> torch.Tensor:
    types = {"mm_token_type_ids": torch.zeros(1, LENGTH, dtype=torch.int)} if family in NEEDS_TYPES else {}
    return expected_logits(reference, **types)


@pytest.mark.parametrize("family", WHOLE)
def test_texts_of_a_model_with_images_are_those_of_transformers(tmp_path, caplog, family):
    reference = write_whole(tmp_path, family)
    torch.testing.assert_close(found_logits(tmp_path), text_logits(reference, family), **TOLERANCE)
    assert "tensors are left out" in caplog.text


def test_older_files_of_hunyuan_vl_have_no_section_of_the_text(tmp_path):
    reference = write_whole(tmp_path, "HunYuanVL")
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    own = {key: value for key, value in text.items() if key not in ("model_type", "rope_parameters")}
    scaling = {"type": "xdrope", "alpha": 1000.0, "factor": 1.0, "xdrope_section": [1, 1, 1, 1]}
    older = {**own, "rope_scaling": scaling, "rope_theta": 9000.0, "text_config": None}
    rewrite(tmp_path, older, lambda tensors: tensors)
    torch.testing.assert_close(found_logits(tmp_path), text_logits(reference, "HunYuanVL"), **TOLERANCE)


def test_older_names_of_ernie_and_exaone_are_known(tmp_path):
    write_whole(tmp_path, "Ernie4_5_VLMoe")
    config = json.loads((tmp_path / "config.json").read_text())
    older = {**config, "architectures": ["Ernie4_5_VL_MoeForConditionalGeneration"]}
    assert from_hugging_face(older) == from_hugging_face(config)
    reference = write_whole(tmp_path, "Exaone4_5_")
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    rewrite(tmp_path, {"text_config": {**text, "model_type": "exaone4_5_text"}}, lambda tensors: tensors)
    torch.testing.assert_close(found_logits(tmp_path), text_logits(reference, "Exaone4_5_"), **TOLERANCE)


def test_dbrx_is_rotated_by_the_theta_of_its_section():
    """transformers leaves it out where its own key is there."""
    config = config_of("dbrx")
    config["attn_config"]["rope_theta"] = 500000.0
    assert from_hugging_face(config).rope_theta == 500000.0
    scaled = {**config, "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}
    arch = from_hugging_face(scaled)
    assert arch.rope_theta == 500000.0
    assert arch.rope_scaling is not None
    del config["attn_config"]["rope_theta"]
    assert from_hugging_face(config).rope_theta == 10000.0


@pytest.mark.parametrize(
    ("section", "key", "value", "words"),
    [
        ("ffn_config", "moe_normalize_expert_weights", 2.0, "moe_normalize_expert_weights 2.0"),
        ("ffn_config", "ffn_act_fn", {"name": "gelu"}, "ffn_act_fn 'gelu'"),
    ],
)
def test_settings_of_dbrx_that_are_not_supported_are_named(section, key, value, words):
    config = config_of("dbrx")
    config[section][key] = value
    with pytest.raises(CheckpointError, match=words):
        from_hugging_face(config)


def test_positions_that_are_not_those_of_a_type_of_layers_are_refused():
    config = {**config_of("cohere-compass"), "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}
    with pytest.raises(CheckpointError, match="rope_parameters must have sliding_attention and full_attention"):
        from_hugging_face(config)


def test_padding_that_is_a_position_of_xglm_is_refused():
    with pytest.raises(CheckpointError, match="pad_token_id 5"):
        from_hugging_face({**config_of("xglm"), "pad_token_id": 5})


def test_older_files_of_modern_bert_say_how_far_windows_and_full_layers_are_apart():
    config = config_of("modern-bert")
    own = {key: value for key, value in config.items() if key not in ("rope_parameters", "layer_types")}
    older = {**own, "global_rope_theta": 40000.0, "local_rope_theta": 5000.0, "global_attn_every_n_layers": 3}
    assert from_hugging_face(older) == from_hugging_face(config)
    with pytest.raises(CheckpointError, match="classifier_activation 'selu'"):
        from_hugging_face({**config, "classifier_activation": "selu"})


def test_the_sections_of_dbrx_come_before_the_general_keys():
    config = config_of("dbrx")
    config["attn_config"] = {**config["attn_config"], "kv_n_heads": 2}
    assert config["num_key_value_heads"] == 1
    assert from_hugging_face(config).num_kv_heads == 2


def test_a_key_in_a_section_of_dbrx_that_is_not_known_is_named():
    config = config_of("dbrx")
    config["attn_config"]["attn_temperature"] = 2.0
    assert from_hugging_face(config).unknown_keys == ("attn_temperature",)


@pytest.mark.parametrize("kind", ["dbrx", "xglm", "neox-japanese"])
def test_quantized_copies_have_the_weights_that_their_files_arrange_otherwise_or_lack(tmp_path, kind):
    write_checkpoint(tmp_path / "original", kind)
    expected = found_logits(tmp_path / "original")
    save_quantized(tmp_path / "original", tmp_path / "int8", kind="int8")
    found = found_logits(tmp_path / "int8")
    assert 0 < (found - expected).norm() < 0.1 * expected.norm()
