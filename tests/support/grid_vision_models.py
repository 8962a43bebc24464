"""Tiny random Qwen-VL models of three generations, as transformers writes them, with tokenizer and chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from support.tokenizer_files import byte_level_json, write_json_tokenizer

NAMES = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
END_OF_TEXT, _, EOS, BEGIN, END, IMAGE, VIDEO = range(len(NAMES))
VOCAB_SIZE = 448
PATCH = 4  # pixels of a side; that of a token has twice as many
KINDS = ("qwen_2", "qwen_2.5", "qwen_3", "qwen_3_moe", "qwen_3.5", "qwen_3.5_moe")
CLASSES = {
    "qwen_2": "Qwen2VL",
    "qwen_2.5": "Qwen2_5_VL",
    "qwen_3": "Qwen3VL",
    "qwen_3_moe": "Qwen3VLMoe",
    "qwen_3.5": "Qwen3_5",
    "qwen_3.5_moe": "Qwen3_5Moe",
}
TEMPLATE = """{% for message in messages %}<|im_start|>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}<|im_end|>
{% else %}{% for content in message['content'] %}{% if content['type'] == 'image' or 'image' in content %}\
<|vision_start|><|image_pad|><|vision_end|>{% elif content['type'] == 'video' %}\
<|vision_start|><|video_pad|><|vision_end|>{% elif 'text' in content %}{{ content['text'] }}{% endif %}{% endfor %}\
<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "processor_class": "Qwen2_5_VLProcessor",
    "min_pixels": 32 * 32,
    "max_pixels": 72 * 72,
    "patch_size": PATCH,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
VIDEO_PROCESSOR = {  # of Qwen3-VL; the others have the settings of images
    "video_processor_type": "Qwen3VLVideoProcessor",
    "size": {"shortest_edge": 4 * 32 * 32, "longest_edge": 6 * 48 * 48},
    "patch_size": PATCH,
    "fps": 2,
    "min_frames": 4,
    "max_frames": 768,
}
TEXT = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 1024,
    "bos_token_id": END_OF_TEXT,
    "eos_token_id": EOS,
}
ENCODER = {"depth": 4, "num_heads": 2, "in_channels": 3, "patch_size": PATCH}
ENCODERS = {
    "qwen_2": {**ENCODER, "embed_dim": 24, "hidden_size": 32, "mlp_ratio": 2},
    "qwen_2.5": {
        **ENCODER,
        "hidden_size": 24,
        "out_hidden_size": 32,
        "intermediate_size": 40,
        "window_size": 6 * PATCH,
        "fullatt_block_indexes": [1, 3],
    },
    "qwen_3": {
        **ENCODER,
        "hidden_size": 24,
        "out_hidden_size": 32,
        "intermediate_size": 40,
        "num_position_embeddings": 36,
        "deepstack_visual_indexes": [0, 2],
    },
}
ENCODERS["qwen_3_moe"] = ENCODERS["qwen_3"]
_FLAT = {key: value for key, value in ENCODERS["qwen_3"].items() if key != "deepstack_visual_indexes"}
ENCODERS["qwen_3.5"] = ENCODERS["qwen_3.5_moe"] = _FLAT
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
RECURRENT = {
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}


def grid_reference(kind: str, seed: int = 0, **text: Any) -> Any:
    """A random network of transformers; its weights lie far enough apart that choices are no matter of rounding."""
    import transformers

    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    own = {**TEXT, "rope_parameters": rope}
    if kind.startswith("qwen_3"):
        own |= {"head_dim": 16, "rope_parameters": {**rope, "mrope_section": [4, 2, 2], "mrope_interleaved": True}}
    if kind.startswith("qwen_3.5"):
        own |= RECURRENT
        own["rope_parameters"] = {**own["rope_parameters"], "partial_rotary_factor": 0.5}
    if kind == "qwen_3_moe":
        own |= {**EXPERTS, "mlp_only_layers": [1]}
    if kind == "qwen_3.5_moe":
        own |= {**EXPERTS, "shared_expert_intermediate_size": 48}
    config = getattr(transformers, f"{CLASSES[kind]}Config")(
        text_config={**own, **text},
        vision_config=ENCODERS[kind],
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=BEGIN,
        vision_end_token_id=END,
    )
    torch.manual_seed(seed)
    model = getattr(transformers, f"{CLASSES[kind]}ForConditionalGeneration")(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "norm" in name or "ln_q" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            torch.nn.init.normal_(parameter, std=0.3 if parameter.dim() > 1 else 0.1)
    model.lm_head.weight[: len(NAMES)] = 0  # it writes no token of an image, which would need one
    return model


def write_grid_tokenizer(folder: Path) -> Path:
    """A byte-level tokenizer, which puts no token before a prompt, and the chat template."""
    described = {**json.loads(byte_level_json(NAMES)), "post_processor": None}
    return write_json_tokenizer(folder, json.dumps(described), eos_token=NAMES[EOS], chat_template=TEMPLATE)


def write_grid_model(folder: Path, kind: str, *, seed: int = 0, **text: Any) -> Any:
    """A folder with everything that a server needs, and the network it was written from."""
    model = grid_reference(kind, seed, **text)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    write_grid_tokenizer(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    if kind.startswith("qwen_3"):
        (folder / "video_preprocessor_config.json").write_text(json.dumps(VIDEO_PROCESSOR))
    return model


def grid_processor_of(folder: Path, kind: str) -> Any:
    """The processor of transformers for such a folder, with the frames that the models' authors read."""
    import transformers
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    unused = ("image_processor_type", "video_processor_type", "processor_class")
    settings, of_videos = ({k: v for k, v in one.items() if k not in unused} for one in (PROCESSOR, VIDEO_PROCESSOR))
    names = {"qwen_2": "Qwen2VLProcessor", "qwen_2.5": "Qwen2_5_VLProcessor"}
    cls: Any = transformers.Qwen3VLVideoProcessor
    if not kind.startswith("qwen_3"):
        cls, of_videos = transformers.Qwen2VLVideoProcessor, {**settings, "fps": 2, "do_sample_frames": True}
    return getattr(transformers, names.get(kind, "Qwen3VLProcessor"))(
        image_processor=Qwen2VLImageProcessorPil(**settings),
        tokenizer=transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "tokenizer.json"), eos_token=NAMES[EOS], pad_token=NAMES[EOS]
        ),
        video_processor=cls(**of_videos, cap_pixels_per_frame=False),
        chat_template=TEMPLATE,
    )


def grid_prompt(*parts: list[int] | int) -> list[int]:
    """The ids of a prompt; a number: an image of so many tokens."""
    ids: list[int] = []
    for part in parts:
        ids += [BEGIN, *[IMAGE] * part, END] if isinstance(part, int) else part
    return ids
