"""config.json of Qwen-VL: old files and new ones, what they leave out, and what is rejected."""

from __future__ import annotations

from typing import Any

import pytest

from flambeau.llm.errors import CheckpointError
from flambeau.llm.models.hugging_face import from_hugging_face
from flambeau.llm.models.vision_architecture import GridArchitecture
from support.grid_vision_models import CLASSES, KINDS

TOKENS = {
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
    "vision_token_id": 151654,
}
FLAT = {  # as the released files of the 7B models of the second generation
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 3584,
    "initializer_range": 0.02,
    "intermediate_size": 18944,
    "max_position_embeddings": 128000,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.41.2",
    "use_cache": True,
    "use_sliding_window": False,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    "vocab_size": 152064,
    **TOKENS,
}
RELEASED: dict[str, dict[str, Any]] = {
    "qwen_2": {
        **FLAT,
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        "vision_config": {
            "depth": 32,
            "embed_dim": 1280,
            "mlp_ratio": 4,
            "num_heads": 16,
            "in_chans": 3,
            "hidden_size": 3584,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "spatial_patch_size": 14,
            "temporal_patch_size": 2,
        },
    },
    "qwen_2.5": {
        **FLAT,
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "vision_config": {
            "depth": 32,
            "hidden_act": "silu",
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "in_chans": 3,
            "out_hidden_size": 3584,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "spatial_patch_size": 14,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
            "tokens_per_second": 2,
            "temporal_patch_size": 2,
        },
    },
    "qwen_3": {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "text_config": {
            "attention_bias": False,
            "attention_dropout": 0.0,
            "bos_token_id": 151643,
            "dtype": "bfloat16",
            "eos_token_id": 151645,
            "head_dim": 128,
            "hidden_act": "silu",
            "hidden_size": 4096,
            "initializer_range": 0.02,
            "intermediate_size": 12288,
            "max_position_embeddings": 262144,
            "model_type": "qwen3_vl_text",
            "num_attention_heads": 32,
            "num_hidden_layers": 36,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-06,
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
            "rope_theta": 5000000,
            "use_cache": True,
            "vocab_size": 151936,
        },
        "tie_word_embeddings": False,
        "transformers_version": "4.57.0.dev0",
        "vision_config": {
            "deepstack_visual_indexes": [8, 16, 24],
            "depth": 27,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 1152,
            "in_channels": 3,
            "initializer_range": 0.02,
            "intermediate_size": 4304,
            "model_type": "qwen3_vl",
            "num_heads": 16,
            "num_position_embeddings": 2304,
            "out_hidden_size": 4096,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        **TOKENS,
    },
}
RELEASED["qwen_3_moe"] = {  # 30B-A3B
    **RELEASED["qwen_3"],
    "architectures": ["Qwen3VLMoeForConditionalGeneration"],
    "model_type": "qwen3_vl_moe",
    "text_config": {
        **RELEASED["qwen_3"]["text_config"],
        "decoder_sparse_step": 1,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "mlp_only_layers": [],
        "model_type": "qwen3_vl_moe_text",
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
    },
    "vision_config": {
        **RELEASED["qwen_3"]["vision_config"],
        "model_type": "qwen3_vl_moe",
        "out_hidden_size": 2048,
    },
}
LATER_TOKENS = {
    "image_token_id": 248056,
    "video_token_id": 248057,
    "vision_start_token_id": 248053,
    "vision_end_token_id": 248054,
}
RELEASED["qwen_3.5"] = {  # 9B
    **RELEASED["qwen_3"],
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "text_config": {
        "attention_bias": False,
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "eos_token_id": 248044,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "num_attention_heads": 16,
        "num_hidden_layers": 32,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "use_cache": True,
        "vocab_size": 248320,
    },
    "vision_config": {
        **RELEASED["qwen_3"]["vision_config"],
        "deepstack_visual_indexes": [],
        "model_type": "qwen3_5",
    },
    **LATER_TOKENS,
}
RELEASED["qwen_3.5_moe"] = {
    **RELEASED["qwen_3.5"],
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "model_type": "qwen3_5_moe",
    "text_config": {
        **{k: v for k, v in RELEASED["qwen_3.5"]["text_config"].items() if k != "intermediate_size"},
        "hidden_size": 2048,
        "mlp_only_layers": [],
        "model_type": "qwen3_5_moe_text",
        "moe_intermediate_size": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 40,
        "num_key_value_heads": 2,
        "shared_expert_intermediate_size": 512,
    },
    "vision_config": {
        **RELEASED["qwen_3.5"]["vision_config"],
        "model_type": "qwen3_5_moe",
        "out_hidden_size": 2048,
    },
}


def with_vision(kind: str, **changes: object) -> dict[str, Any]:
    return {**RELEASED[kind], "vision_config": {**RELEASED[kind]["vision_config"], **changes}}


def nested(config: dict[str, Any], **changes: object) -> dict[str, Any]:
    """As newer versions write it: the decoder has a section; `changes` are made in it."""
    outer = {key: config[key] for key in ("architectures", "model_type", "vision_config", *TOKENS)}
    text = {key: value for key, value in config.items() if key not in outer}
    return {**outer, "text_config": {**text, "model_type": f"{config['model_type']}_text", **changes}}


@pytest.mark.parametrize("kind", KINDS)
def test_the_released_settings_are_those_of_transformers(kind):
    import transformers

    theirs = getattr(transformers, f"{CLASSES[kind]}Config").from_dict(RELEASED[kind])
    ours, text, vision = from_hugging_face(RELEASED[kind]), theirs.text_config, theirs.vision_config
    assert ours.unknown_keys == ()
    assert (ours.hidden_size, ours.num_layers, ours.num_heads, ours.num_kv_heads) == (
        text.hidden_size,
        text.num_hidden_layers,
        text.num_attention_heads,
        text.num_key_value_heads,
    )
    assert ours.intermediate_size == getattr(text, "intermediate_size", ours.expert_size)
    assert (ours.max_length, ours.norm_epsilon, ours.rope_theta, ours.windows, ours.rope_scaling) == (
        text.max_position_embeddings,
        text.rms_norm_eps,
        text.rope_parameters["rope_theta"],
        (),
        None,
    )
    assert [ours.position_axes.count(axis) for axis in range(3)] == text.rope_parameters["mrope_section"]
    encoder = ours.vision
    assert isinstance(encoder, GridArchitecture)
    assert (encoder.num_layers, encoder.num_heads, encoder.patch_size, encoder.text_size) == (
        vision.depth,
        vision.num_heads,
        vision.patch_size,
        text.hidden_size,
    )
    assert (encoder.image_id, encoder.begin_id, encoder.end_id) == (
        theirs.image_token_id,
        theirs.vision_start_token_id,
        theirs.vision_end_token_id,
    )
    assert encoder.intermediate_size == (5120 if kind == "qwen_2" else vision.intermediate_size)
    assert encoder.window == (8 if kind == "qwen_2.5" else 0)


@pytest.mark.parametrize("kind", KINDS[:4])  # the sizes of Qwen 3.5 are required
def test_what_is_left_out_is_what_transformers_has(kind):
    import transformers

    classes = {"architectures": RELEASED[kind]["architectures"], "model_type": RELEASED[kind]["model_type"]}
    theirs = getattr(transformers, f"{CLASSES[kind]}Config")()
    text, vision = theirs.text_config, theirs.vision_config
    out = {"hidden_size" if kind == "qwen_2" else "out_hidden_size": text.hidden_size}
    ours = from_hugging_face({**classes, "vision_config": out})
    assert (ours.hidden_size, ours.num_layers, ours.vocab_size, ours.max_length, ours.norm_epsilon) == (
        text.hidden_size,
        text.num_hidden_layers,
        text.vocab_size,
        text.max_position_embeddings,
        text.rms_norm_eps,
    )
    assert ours.rope_theta == text.rope_parameters["rope_theta"]
    encoder = ours.vision
    assert isinstance(encoder, GridArchitecture)
    assert (encoder.num_layers, encoder.num_heads, encoder.patch_size, encoder.merge_size, encoder.frames) == (
        vision.depth,
        vision.num_heads,
        vision.patch_size,
        vision.spatial_merge_size,
        vision.temporal_patch_size,
    )
    assert encoder.hidden_size == (vision.embed_dim if kind == "qwen_2" else vision.hidden_size)
    assert (encoder.image_id, encoder.begin_id) == (theirs.image_token_id, theirs.vision_start_token_id)
    deep = () if kind.startswith("qwen_3.5") else getattr(vision, "deepstack_visual_indexes", ())
    assert encoder.deep_layers == tuple(deep)
    assert encoder.full_layers == set(getattr(vision, "fullatt_block_indexes", ()))


@pytest.mark.parametrize("kind", ["qwen_2", "qwen_2.5"])
def test_a_section_of_the_decoder_comes_before_what_is_beside_it(kind):
    """Files of one version have both."""
    flat = RELEASED[kind]
    assert from_hugging_face(nested(flat)) == from_hugging_face(flat)
    both = {**flat, **nested(flat, num_hidden_layers=5, image_token_id=None, vision_start_token_id=7)}
    arch = from_hugging_face(both)
    assert (arch.num_layers, arch.unknown_keys) == (5, ())
    assert arch.vision is not None
    assert arch.vision.begin_id == 151652


@pytest.mark.parametrize("kind", KINDS)
def test_embeddings_are_tied_where_transformers_ties_them(kind):
    import transformers

    released = RELEASED[kind]
    text = {**released.get("text_config", released), "tie_word_embeddings": True}
    for config in (released, {**released, "tie_word_embeddings": True}, {**released, "text_config": text}):
        theirs = getattr(transformers, f"{CLASSES[kind]}Config").from_dict(config)
        assert from_hugging_face(config).tied_embeddings == theirs.tie_word_embeddings


def test_longer_texts_by_yarn_keep_the_sections():
    """As the model's page says, for texts above 32,768 tokens."""
    scaling = {"type": "yarn", "mrope_section": [16, 24, 24], "factor": 4, "original_max_position_embeddings": 32768}
    arch = from_hugging_face({**RELEASED["qwen_2.5"], "rope_scaling": scaling})
    assert arch.rope_scaling is not None
    assert (arch.rope_scaling.kind, arch.rope_scaling.factor, arch.unknown_keys) == ("yarn", 4, ())
    assert len(arch.position_axes) == 64


def test_sections_of_the_third_generation_take_turns():
    axes = from_hugging_face(RELEASED["qwen_3"]).position_axes
    assert axes[:7] == (0, 1, 2, 0, 1, 2, 0)
    assert axes[57:] == (0, 1, 2, 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (with_vision("qwen_2.5", model_type="siglip_vision_model"), "siglip_vision_model"),
        (with_vision("qwen_2.5", rope_theta=1.0), "rope_theta"),
        (with_vision("qwen_2.5", rope_parameters={"rope_type": "linear", "factor": 2}), "axial"),
        (with_vision("qwen_2", hidden_act="relu"), "relu"),
        (with_vision("qwen_2", in_chans=4), "4 channels"),
        (with_vision("qwen_2", embed_dim=1281), "16 heads of 1281"),
        (with_vision("qwen_2", window_size=112), "window_size"),
        (with_vision("qwen_2", hidden_size=4096), "hidden_size 4096, and the decoder's hidden size is 3584"),
        (with_vision("qwen_2.5", window_size=20), "window_size 20"),
        (with_vision("qwen_2.5", fullatt_block_indexes=[40]), "fullatt_block_indexes"),
        (with_vision("qwen_2.5", patch_size=[14, 14]), "patch_size"),
        (with_vision("qwen_3", num_position_embeddings=2305), "2305 is not a square"),
        (with_vision("qwen_3", deepstack_visual_indexes=[3, 3]), "deepstack_visual_indexes"),
        (with_vision("qwen_3.5", deepstack_visual_indexes=[3]), r"deepstack_visual_indexes \[3\] are not supported"),
        (with_vision("qwen_3", deepstack_visual_indexes=[3, "4"]), "deepstack_visual_indexes"),
        ({**RELEASED["qwen_2"], "image_token_id": "x"}, "image_token_id"),
        ({**RELEASED["qwen_2"], "rope_scaling": {"type": "mrope", "mrope_section": [16, 24]}}, "mrope_section"),
        ({**RELEASED["qwen_2"], "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 25]}}, "add up to 64"),
        (
            {**RELEASED["qwen_2"], "rope_scaling": {"type": "mrope", "mrope_interleaved": True}},
            "mrope_interleaved True",
        ),
        ({**RELEASED["qwen_2"], "rope_scaling": {"type": "ntk", "mrope_section": [16, 24, 24]}}, "ntk"),
        ({**RELEASED["qwen_2"], "vision_config": "large"}, "must be an object"),
        (
            {
                **RELEASED["qwen_3_moe"],
                "text_config": {**RELEASED["qwen_3_moe"]["text_config"], "norm_topk_prob": False},
            },
            "norm_topk_prob False",
        ),
    ],
)
def test_what_is_not_supported_is_rejected_by_name(config, reason):
    with pytest.raises(CheckpointError, match=reason):
        from_hugging_face(config)


@pytest.mark.parametrize("kind", KINDS)
def test_an_unknown_key_is_named_wherever_it_is(kind):
    assert from_hugging_face({**RELEASED[kind], "new_trick": 3}).unknown_keys == ("new_trick",)
    text = RELEASED[kind].get("text_config", RELEASED[kind])
    name = "rope_parameters" if "rope_parameters" in text else "rope_scaling"
    text = {**text, name: {**text[name], "trick": 1}}
    assert from_hugging_face({**RELEASED[kind], "text_config": text}).unknown_keys == (f"{name}.trick",)
