"""config.json of models that read images: what it leaves out, what it names, and what is rejected."""

from __future__ import annotations

import pytest

from flambeau.llm.errors import CheckpointError
from flambeau.llm.models.hugging_face import from_hugging_face
from flambeau.llm.models.vision_architecture import SiglipArchitecture

RELEASED = {  # what the files of the 4B model have; transformers has defaults for the rest
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    "vision_config": {
        "hidden_size": 1152,
        "image_size": 896,
        "intermediate_size": 4304,
        "model_type": "siglip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
        "vision_use_head": False,
    },
}


def with_vision(**changes: object) -> dict[str, object]:
    return {**RELEASED, "vision_config": {**RELEASED["vision_config"], **changes}}  # type: ignore[dict-item]


def test_the_released_settings_are_understood():
    arch = from_hugging_face(RELEASED)
    assert arch.vision == SiglipArchitecture(
        hidden_size=1152,
        num_layers=27,
        num_heads=16,
        intermediate_size=4304,
        image_size=896,
        patch_size=14,
        norm_epsilon=1e-6,
        activation="gelu_tanh",
        num_tokens=256,
        text_size=2560,
        image_id=262144,
        begin_id=255999,
        end_id=256000,
    )
    assert (arch.unknown_keys, arch.eos_ids, arch.dtype) == ((), (1, 106), "bfloat16")
    assert arch.tied_embeddings


def test_what_is_left_out_is_what_transformers_has():
    from transformers import Gemma3Config

    theirs, ours = Gemma3Config.from_dict(RELEASED), from_hugging_face(RELEASED)
    text, rope = theirs.text_config, theirs.text_config.rope_parameters
    assert (ours.vocab_size, ours.num_heads, ours.num_kv_heads) == (
        text.vocab_size,
        text.num_attention_heads,
        text.num_key_value_heads,
    )
    assert (ours.head_size, ours.max_length, ours.norm_epsilon) == (
        text.head_dim,
        text.max_position_embeddings,
        text.rms_norm_eps,
    )
    assert [window is not None for window in ours.windows] == [kind == "sliding_attention" for kind in text.layer_types]
    assert ours.rope_scaling is not None
    assert (ours.rope_theta, ours.rope_scaling.factor, ours.local_rope_theta) == (
        rope["full_attention"]["rope_theta"],
        rope["full_attention"]["factor"],
        rope["sliding_attention"]["rope_theta"],
    )
    assert ours.attention_scale == text.query_pre_attn_scalar**-0.5


def test_newer_names_of_tokens_are_known():
    config = {key: value for key, value in RELEASED.items() if not key.endswith("_token_index")}
    arch = from_hugging_face({**config, "image_token_id": 5, "boi_token_id": 6, "eoi_token_id": 7})
    assert arch.vision is not None
    assert (arch.vision.image_id, arch.vision.begin_id, arch.vision.end_id) == (5, 6, 7)
    assert arch.unknown_keys == ()


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (with_vision(model_type="clip_vision_model"), "clip_vision_model"),
        (with_vision(rope_theta=1.0), "rope_theta"),
        (with_vision(hidden_act="relu"), "relu"),
        (with_vision(num_channels=4), "num_channels"),
        (with_vision(patch_size=13), "patches of 13"),
        (with_vision(num_attention_heads=7), "7 heads"),
        (with_vision(image_size=[896, 896]), "image_size"),
        ({**RELEASED, "mm_tokens_per_image": 200}, "200"),
        ({**RELEASED, "vision_config": "large"}, "must be an object"),
    ],
)
def test_what_is_not_supported_is_rejected_by_name(config, reason):
    with pytest.raises(CheckpointError, match=reason):
        from_hugging_face(config)


def test_an_unknown_key_beside_the_sections_is_named():
    assert from_hugging_face({**RELEASED, "new_trick": 3}).unknown_keys == ("new_trick",)
