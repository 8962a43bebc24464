"""Tiny random models whose images transformers encodes, with their tokenizers, chat templates and processors."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from flambeau.llm.models.families.image_readers import IMAGE_READERS
from flambeau.llm.models.families.sound_readers import SOUND_READERS
from support.checkpoints import class_of, is_older
from support.tokenizer_files import byte_level_json, write_json_tokenizer

TILES = tuple(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5))
NAMES = (
    *("<bos>", "<eos>", "<image>", "<video>", "[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    *("<img>", "</img>", "<IMG_CONTEXT>", "<fake_token_around_image>", "<global-img>", *TILES),
    *("<|image|>", "<|patch|>", "<|image_start|>", "<|image_end|>", "<|tile_x_separator|>", "<|tile_y_separator|>"),
    *("<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_LINE_BREAK|>", "<|IMG_PATCH|>", "TILE_GLOBAL"),
    *(f"TILE_{number}" for number in range(1, 5)),
    *(f"<|img_row_{row}_col_{column}|>" for row in range(1, 4) for column in range(1, 4)),
    "<|img_thumbnail|>",
    *("<|audio|>", "<start_of_audio>", "<end_of_audio>", "<start_of_image>", "<end_of_image>"),
    *("<imgpad>", "<|box_start|>", "<|box_end|>"),
    *("<IMG_START>", "<IMG_ATOM>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>"),
)
ID = {name: number for number, name in enumerate(NAMES)}
VOCAB_SIZE = 480
LAST_ID = 421  # behind the tokens that all have
SIDE, PATCH = 28, 7  # pixels of a tile and of a patch
TEMPLATE = """{{ bos_token }}{% for message in messages %}{{ message['role'] }}:
{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for item in message['content'] -%}
{% if item['type'] == 'image' %}MARKER{% elif item['type'] == 'video' %}VIDEO{% elif item['type'] == 'audio' %}SOUND
{%- else %}{{ item['text'] }}{% endif %}{% endfor -%}
{% endif %}
{% endfor %}{% if add_generation_prompt %}answer:{% endif %}"""
TEXT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": ID["<bos>"],
    "eos_token_id": ID["<eos>"],
    "pad_token_id": ID["<eos>"],
}
LLAMA = {**TEXT, "model_type": "llama"}
MISTRAL = {**TEXT, "model_type": "mistral", "head_dim": 16, "sliding_window": None}
QWEN_2 = {**TEXT, "model_type": "qwen2"}
QWEN_3 = {**TEXT, "model_type": "qwen3", "head_dim": 16}
COHERE = {
    **TEXT,
    "model_type": "cohere2",
    "sliding_window": 16,
    "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
}
TOWER = {
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": SIDE,
    "patch_size": PATCH,
}
CLIP = {**TOWER, "model_type": "clip_vision_model", "projection_dim": 16}
SIGLIP = {**TOWER, "model_type": "siglip_vision_model", "vision_use_head": False}
PIXTRAL = {**TOWER, "model_type": "pixtral", "head_dim": 12, "image_size": 20 * PATCH}
COLORS = {"image_mean": [0.5, 0.45, 0.4], "image_std": [0.25, 0.26, 0.27], "do_convert_rgb": True}
SQUARE = {"height": SIDE, "width": SIDE}
PINPOINTS = [[SIDE, 2 * SIDE], [2 * SIDE, SIDE], [2 * SIDE, 2 * SIDE]]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A family with one of its encoders and decoders."""

    name: str  # of its classes in transformers
    config: Mapping[str, Any]
    processor: Mapping[str, Any]  # processor_config.json
    images: Mapping[str, Any]  # preprocessor_config.json
    marker: str = "<image>"
    sound_marker: str = "<|audio|>"
    tokens: Mapping[str, str] = field(default_factory=dict)  # further names in tokenizer_config.json
    last: tuple[str, ...] = ()  # further special tokens, behind all others
    videos: Mapping[str, Any] = field(default_factory=dict)  # video_preprocessor_config.json
    video_marker: str = ""
    suffix: str = "ForConditionalGeneration"  # of the name of its class
    renames: tuple[tuple[str, str], ...] = ()  # of tensors that transformers writes with names that no file has

    @property
    def class_name(self) -> str:
        return self.name + self.suffix


CLIP_IMAGES = {
    "image_processor_type": "CLIPImageProcessor",
    "size": {"shortest_edge": SIDE},
    "crop_size": SQUARE,
    **COLORS,
}
PIXTRAL_IMAGES = {
    "image_processor_type": "PixtralImageProcessor",
    "patch_size": {"height": PATCH, "width": PATCH},
    "size": {"longest_edge": 10 * PATCH},
    **COLORS,
}
PIXTRAL_PROCESSOR = {
    "processor_class": "PixtralProcessor",
    "patch_size": PATCH,
    "image_token": "[IMG]",
    "image_break_token": "[IMG_BREAK]",
    "image_end_token": "[IMG_END]",
}
LLAVA = {"text_config": LLAMA, "vision_config": CLIP, "image_token_index": ID["<image>"], "vision_feature_layer": -2}
GLM_4V = {
    **TEXT,
    "model_type": "glm4v_text",
    "hidden_size": 64,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [1, 2, 1],
    },
}
GLM_TOWER = {
    "depth": 2,
    "hidden_size": 24,
    "num_heads": 2,
    "image_size": SIDE,
    "patch_size": PATCH,
    "out_hidden_size": 64,
    "intermediate_size": 40,
}
GLM_TOKENS = {
    "image_token_id": ID["<|image|>"],
    "video_token_id": ID["<video>"],
    "image_start_token_id": ID["<|image_start|>"],
    "image_end_token_id": ID["<|image_end|>"],
    "video_start_token_id": ID["<img>"],
    "video_end_token_id": ID["</img>"],
}
GLM_IMAGES = {
    "patch_size": PATCH,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 14 * 14 * 4, "longest_edge": 14 * 14 * 2 * 40},
    **COLORS,
}
KINDS = {
    "mistral-3": Kind(
        name="Mistral3",
        config={
            "text_config": MISTRAL,
            "vision_config": PIXTRAL,
            "image_token_index": ID["[IMG]"],
            "spatial_merge_size": 2,
            "vision_feature_layer": -1,
        },
        processor={**PIXTRAL_PROCESSOR, "spatial_merge_size": 2},
        images=PIXTRAL_IMAGES,
        marker="[IMG]",
    ),
    "pixtral": Kind(
        name="Llava",
        config={
            **LLAVA,
            "text_config": MISTRAL,
            "vision_config": PIXTRAL,
            "image_token_index": ID["[IMG]"],
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
        },
        processor=PIXTRAL_PROCESSOR,
        images=PIXTRAL_IMAGES,
        marker="[IMG]",
    ),
    "llava": Kind(
        name="Llava",
        config={**LLAVA, "vision_feature_select_strategy": "default"},
        processor={
            "processor_class": "LlavaProcessor",
            "patch_size": PATCH,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
        images=CLIP_IMAGES,
    ),
    "internvl": Kind(
        name="InternVL",
        config={
            "text_config": QWEN_3,
            "vision_config": {
                **TOWER,
                "model_type": "internvl_vision",
                "image_size": [SIDE, SIDE],
                "patch_size": [PATCH, PATCH],
            },
            "image_token_id": ID["<IMG_CONTEXT>"],
            "image_seq_length": 4,
        },
        processor={"processor_class": "InternVLProcessor", "image_seq_length": 4},
        images={
            "image_processor_type": "GotOcr2ImageProcessor",
            "size": SQUARE,
            "crop_to_patches": True,
            "min_patches": 1,
            "max_patches": 6,
            **COLORS,
        },
        marker="<IMG_CONTEXT>",
        tokens={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
    ),
    "idefics-3": Kind(
        name="Idefics3",
        config={
            "text_config": LLAMA,
            "vision_config": {**TOWER, "model_type": "idefics3_vision"},
            "image_token_id": ID["<image>"],
            "scale_factor": 2,
        },
        processor={"processor_class": "Idefics3Processor", "image_seq_len": 4},
        images={
            "image_processor_type": "Idefics3ImageProcessor",
            "size": {"longest_edge": 3 * SIDE},
            "max_image_size": {"longest_edge": SIDE},
            **COLORS,
        },
    ),
    "llava-next": Kind(
        name="LlavaNext",
        config={**LLAVA, "vision_feature_select_strategy": "default", "image_grid_pinpoints": PINPOINTS},
        processor={
            "processor_class": "LlavaNextProcessor",
            "patch_size": PATCH,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
        images={**CLIP_IMAGES, "image_processor_type": "LlavaNextImageProcessor", "image_grid_pinpoints": PINPOINTS},
    ),
    "granite-vision": Kind(
        name="LlavaNext",
        config={
            **LLAVA,
            "text_config": {
                **TEXT,
                "model_type": "granite",
                "embedding_multiplier": 6.0,
                "residual_multiplier": 0.5,
                "attention_multiplier": 0.1,
                "logits_scaling": 4.0,
            },
            "vision_config": SIGLIP,
            "vision_feature_layer": [-3, -1],
            "vision_feature_select_strategy": "full",
            "image_grid_pinpoints": PINPOINTS,
        },
        processor={
            "processor_class": "LlavaNextProcessor",
            "patch_size": PATCH,
            "vision_feature_select_strategy": "full",
        },
        images={**CLIP_IMAGES, "image_processor_type": "LlavaNextImageProcessor", "image_grid_pinpoints": PINPOINTS},
    ),
    "llava-onevision": Kind(
        name="LlavaOnevision",
        config={
            "text_config": QWEN_2,
            "vision_config": SIGLIP,
            "image_token_index": ID["<image>"],
            "video_token_index": ID["<video>"],
            "image_grid_pinpoints": PINPOINTS,
        },
        processor={
            "processor_class": "LlavaOnevisionProcessor",
            "num_image_tokens": 16,
            "vision_feature_select_strategy": "full",
            "video_token": "<video>",
        },
        images={
            "image_processor_type": "LlavaOnevisionImageProcessor",
            "size": SQUARE,
            "image_grid_pinpoints": PINPOINTS,
            **COLORS,
        },
    ),
    "smolvlm": Kind(
        name="SmolVLM",
        config={
            "text_config": LLAMA,
            "vision_config": {**TOWER, "model_type": "smolvlm_vision"},
            "image_token_id": ID["<image>"],
            "scale_factor": 2,
        },
        processor={"processor_class": "SmolVLMProcessor", "image_seq_len": 4},
        images={
            "image_processor_type": "SmolVLMImageProcessor",
            "size": {"longest_edge": 3 * SIDE},
            "max_image_size": {"longest_edge": SIDE},
            **COLORS,
        },
    ),
    "llama-4": Kind(
        name="Llama4",
        config={
            "text_config": {
                **TEXT,
                "model_type": "llama4_text",
                "head_dim": 16,
                "intermediate_size_mlp": 56,
                "num_local_experts": 4,
                "num_hidden_layers": 4,
                "attention_chunk_size": 16,
                "no_rope_layers": [1, 1, 1, 0],
                "interleave_moe_layer_step": 2,
            },
            "vision_config": {
                "hidden_size": 24,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "intermediate_size": 96,
                "image_size": SIDE,
                "patch_size": PATCH,
                "vision_output_dim": 40,
                "projector_input_dim": 40,
                "projector_output_dim": 40,
            },
            "image_token_index": ID["<|patch|>"],
        },
        processor={"processor_class": "Llama4Processor", "patch_size": PATCH, "pixel_shuffle_ratio": 0.5},
        images={"image_processor_type": "Llama4ImageProcessor", "size": SQUARE, "max_patches": 4, **COLORS},
        marker="<|image|>",
    ),
    "lfm2-vl": Kind(
        name="Lfm2Vl",
        config={
            "text_config": {
                **TEXT,
                "model_type": "lfm2",
                "layer_types": ["conv", "full_attention", "conv"],
                "block_auto_adjust_ff_dim": False,
            },
            "vision_config": {
                **{key: value for key, value in TOWER.items() if key != "image_size"},
                "model_type": "siglip2_vision_model",
                "num_patches": 16,
                "vision_use_head": False,
            },
            "image_token_id": ID["<image>"],
            "projector_hidden_size": 40,
        },
        processor={"processor_class": "Lfm2VlProcessor"},
        images={
            "image_processor_type": "Lfm2VlImageProcessor",
            "encoder_patch_size": PATCH,
            "tile_size": 2 * SIDE,
            "min_tiles": 2,
            "max_tiles": 4,
            "min_image_tokens": 4,
            "max_image_tokens": 16,
            **COLORS,
        },
    ),
    "cohere-2-vision": Kind(
        name="Cohere2Vision",
        config={
            "text_config": COHERE,
            "vision_config": SIGLIP,
            "image_token_id": ID["<|IMG_PATCH|>"],
            "alignment_intermediate_size": 48,
        },
        processor={"processor_class": "Cohere2VisionProcessor"},
        images={
            "image_processor_type": "Cohere2VisionImageProcessor",
            "size": SQUARE,
            "patch_size": 2,
            "max_patches": 4,
            **COLORS,
        },
        marker="<|IMG_PATCH|>",
        tokens={
            "boi_token": "<|START_OF_IMG|>",
            "eoi_token": "<|END_OF_IMG|>",
            "image_token": "<|IMG_PATCH|>",
            "img_line_break_token": "<|IMG_LINE_BREAK|>",
        },
    ),
    "aya-vision": Kind(
        name="AyaVision",
        config={"text_config": COHERE, "vision_config": SIGLIP, "image_token_index": ID["<|IMG_PATCH|>"]},
        processor={
            "processor_class": "AyaVisionProcessor",
            "patch_size": PATCH,
            "img_size": SIDE,
            "downsample_factor": 2,
        },
        images={
            "image_processor_type": "GotOcr2ImageProcessor",
            "size": SQUARE,
            "crop_to_patches": True,
            "max_patches": 4,
            **COLORS,
        },
    ),
    "glm-4v": Kind(
        name="Glm4v",
        config={"text_config": GLM_4V, "vision_config": {**GLM_TOWER, "model_type": "glm4v_vision"}, **GLM_TOKENS},
        processor={"processor_class": "Glm4vProcessor"},
        images={**GLM_IMAGES, "image_processor_type": "Glm4vImageProcessor"},
        marker="<|image_start|><|image|><|image_end|>",
    ),
    "glm-4v-moe": Kind(
        name="Glm4vMoe",
        config={
            "text_config": {
                **GLM_4V,
                "model_type": "glm4v_moe_text",
                "head_dim": 16,
                "n_routed_experts": 6,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 24,
            },
            "vision_config": {**GLM_TOWER, "model_type": "glm4v_moe_vision"},
            **GLM_TOKENS,
        },
        processor={"processor_class": "Glm4vProcessor"},
        images={**GLM_IMAGES, "image_processor_type": "Glm4vImageProcessor"},
        marker="<|image_start|><|image|><|image_end|>",
    ),
    "glm-4.6v": Kind(
        name="Glm46V",
        config={"text_config": GLM_4V, "vision_config": {**GLM_TOWER, "model_type": "glm4v_vision"}, **GLM_TOKENS},
        processor={"processor_class": "Glm46VProcessor"},
        images={**GLM_IMAGES, "image_processor_type": "Glm46VImageProcessor"},
        marker="<|image_start|><|image|><|image_end|>",
    ),
}


def skip_where_too_old(kind: Kind, version: str) -> None:
    """Skip the test where the processor of this class was compared with a newer transformers only."""
    since = max(table[kind.class_name].since for table in (IMAGE_READERS, SOUND_READERS) if kind.class_name in table)
    if is_older(version, since):
        pytest.skip(f"transformers {version} is too old for {kind.class_name}")


def vision_reference(kind: Kind, seed: int = 0) -> Any:
    """A random network of transformers; its weights lie far enough apart that choices are no matter of rounding."""
    import transformers

    skip_where_too_old(kind, transformers.__version__)
    config_name = f"{kind.name}Config" if kind.suffix else f"{kind.name}_Config"
    config = class_of(transformers, config_name)(**json.loads(json.dumps(kind.config)))
    torch.manual_seed(seed)
    model = getattr(transformers, kind.class_name)(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            torch.nn.init.normal_(parameter, std=0.3 if parameter.dim() > 1 else 0.1)
    head = model.get_output_embeddings() or model.language_model.get_output_embeddings()
    head.weight[: len(NAMES)] = 0  # it writes no token of an image
    if kind.last:
        head.weight[LAST_ID:] = 0
    return model


def write_pretrained_vision_model(folder: Path, kind: Kind, *, seed: int = 0) -> Any:
    """A folder with everything that a server needs, and the network it was written from."""
    model = vision_reference(kind, seed)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    if kind.renames:
        tensors = load_file(folder / "model.safetensors")
        named = {reduce(lambda n, one: re.sub(*one, n), kind.renames, name): one for name, one in tensors.items()}
        save_file(named, folder / "model.safetensors", {"format": "pt"})
    described = {**json.loads(byte_level_json(NAMES)), "post_processor": None}
    assert described["added_tokens"][-1]["id"] == LAST_ID - 1
    like = {**described["added_tokens"][0], "special": True}
    described["added_tokens"] += [{**like, "id": LAST_ID + i, "content": name} for i, name in enumerate(kind.last)]
    template = TEMPLATE.replace("MARKER", kind.marker).replace("VIDEO", kind.video_marker)
    template = template.replace("SOUND", kind.sound_marker)
    write_json_tokenizer(
        folder,
        json.dumps(described),
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<eos>",
        chat_template=template,
        extra_special_tokens=dict(kind.tokens),
        tokenizer_class="PreTrainedTokenizerFast",
    )
    (folder / "processor_config.json").write_text(json.dumps(kind.processor))
    (folder / "preprocessor_config.json").write_text(json.dumps(kind.images))
    if kind.videos:
        (folder / "video_preprocessor_config.json").write_text(json.dumps(kind.videos))
    return model
