"""A tiny random Gemma 3 that reads images, as transformers writes it, with its tokenizer and chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from support.tokenizer_files import byte_level_json, write_json_tokenizer

NAMES = (
    "<bos>",
    "<eos>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<start_of_image>",
    "<image_soft_token>",
    "<end_of_image>",
)
BOS, EOS, _, _, BEGIN, IMAGE, END = range(len(NAMES))
VOCAB_SIZE = 448
TOKENS = 16  # of an image
SIDE = 32  # pixels
WINDOW = 9  # shorter than an image
TEMPLATE = """{{ bos_token }}{% for message in messages %}<start_of_turn>{{ message['role'] }}
{% if message['content'] is string %}{{ message['content'] }}{% else %}{% for item in message['content'] -%}
{% if item['type'] == 'image' %}<start_of_image>{% else %}{{ item['text'] }}{% endif %}{% endfor -%}
{% endif %}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<start_of_turn>model
{% endif %}"""
PROCESSOR = {
    "do_convert_rgb": None,
    "do_normalize": True,
    "do_pan_and_scan": None,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_processor_type": "Gemma3ImageProcessor",
    "image_seq_length": TOKENS,
    "image_std": [0.5, 0.5, 0.5],
    "resample": 2,
    "rescale_factor": 1 / 255,
    "size": {"height": SIDE, "width": SIDE},
}


def vision_reference(seed: int = 0) -> Any:
    """A random network of transformers; its weights lie far enough apart that choices are no matter of rounding."""
    import transformers

    text = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 56,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "sliding_window": WINDOW,
        "query_pre_attn_scalar": 20,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    }
    vision = {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "image_size": SIDE,
        "patch_size": 4,
        "vision_use_head": False,
    }
    config = transformers.Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=TOKENS,
        boi_token_index=BEGIN,
        eoi_token_index=END,
        image_token_index=IMAGE,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    torch.manual_seed(seed)
    model = transformers.Gemma3ForConditionalGeneration(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        else:
            torch.nn.init.normal_(parameter, std=0.3 if parameter.dim() > 1 else 0.1)
    return model


def write_vision_model(folder: Path, *, seed: int = 0) -> Any:
    """A folder with everything that a server needs, and the network it was written from."""
    model = vision_reference(seed)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    write_json_tokenizer(
        folder,
        byte_level_json(NAMES),
        bos_token=NAMES[BOS],
        eos_token=NAMES[EOS],
        chat_template=TEMPLATE,
    )
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return model


def prompt_with(*parts: list[int] | None) -> list[int]:
    """The ids of a prompt; None: an image."""
    ids = [BOS]
    for part in parts:
        ids += [BEGIN, *[IMAGE] * TOKENS, END] if part is None else part
    return ids
