"""Encoders of images in GGUF files of their own (mmproj-*.gguf), as Hugging Face folders have them.

What such a file says becomes the vision_config of the whole model; its tensors get the names of the folder's.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flambeau.llm.checkpoints.gguf_parts import has_tensor
from flambeau.llm.checkpoints.gguf_tensors import read_tensor
from flambeau.llm.checkpoints.weight_files import StoredTensor, WeightFile
from flambeau.llm.errors import CheckpointError
from flambeau.llm.gguf_header import GgufHeader, GgufTensor, encoder_paths, read_header

logger = logging.getLogger(__name__)

PREFERRED = (32, 1, 0)  # general.file_type: bfloat16, float16, float32
GEMMA_3, QWEN_2, QWEN_2_5, QWEN_3 = "gemma3", "qwen2vl_merger", "qwen2.5vl_merger", "qwen3vl_merger"
CLASSES = {  # of whole models, by the architecture of the decoder and the kind of the encoder
    ("gemma3", GEMMA_3): "Gemma3ForConditionalGeneration",
    ("qwen2vl", QWEN_2): "Qwen2VLForConditionalGeneration",
    ("qwen2vl", QWEN_2_5): "Qwen2_5_VLForConditionalGeneration",
    ("qwen3vl", QWEN_3): "Qwen3VLForConditionalGeneration",
    ("qwen3vlmoe", QWEN_3): "Qwen3VLMoeForConditionalGeneration",
    ("qwen35", QWEN_3): "Qwen3_5ForConditionalGeneration",
    ("qwen35moe", QWEN_3): "Qwen3_5MoeForConditionalGeneration",
}
QWEN_TOKENS = {
    "image_token_id": "<|image_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
TOKENS: dict[str, Mapping[str, str]] = {  # the keys of config.json, and the tokens that they stand for
    GEMMA_3: {
        "image_token_index": "<image_soft_token>",
        "boi_token_index": "<start_of_image>",
        "eoi_token_index": "<end_of_image>",
    },
    **dict.fromkeys((QWEN_2, QWEN_2_5, QWEN_3), QWEN_TOKENS),
}
STAND_INS = {"<image_soft_token>": "<unused98>"}  # in files of Gemma 3 with the tokens of SentencePiece alone
NAMED = (3, 4)  # types of tokens: control, user-defined
POOLED = 4  # patches of a side of a token of Gemma 3, unless the file says it
WINDOW, WINDOWED = 112, 8  # of Qwen2.5-VL: pixels of a window, and layers of which the last one has none
IMAGE_KEYS = {
    "image_mean": "image_mean",
    "image_std": "image_std",
    "image_min_pixels": "min_pixels",
    "image_max_pixels": "max_pixels",
}
GEMMA_NAMES = {
    r"^v\.patch_embd\.": "vision_tower.embeddings.patch_embedding.",
    r"^v\.position_embd\.": "vision_tower.embeddings.position_embedding.",
    r"^v\.post_ln\.": "vision_tower.post_layernorm.",
    r"^v\.blk\.(\d+)\.ln([12])\.": r"vision_tower.encoder.layers.\1.layer_norm\2.",
    r"^v\.blk\.(\d+)\.attn_([qkv])\.": r"vision_tower.encoder.layers.\1.self_attn.\2_proj.",
    r"^v\.blk\.(\d+)\.attn_out\.": r"vision_tower.encoder.layers.\1.self_attn.out_proj.",
    r"^v\.blk\.(\d+)\.ffn_": r"vision_tower.encoder.layers.\1.mlp.",
    r"^mm\.input_projection\.weight$": "multi_modal_projector.mm_input_projection_weight",
    r"^mm\.soft_emb_norm\.": "multi_modal_projector.mm_soft_emb_norm.",
}
GRID_NAMES = {
    r"^v\.patch_embd\.": "visual.patch_embed.proj.",
    r"^v\.position_embd\.": "visual.pos_embed.",
    r"^v\.blk\.(\d+)\.ln([12])\.": r"visual.blocks.\1.norm\2.",
    r"^v\.blk\.(\d+)\.attn_qkv\.": r"visual.blocks.\1.attn.qkv.",
    r"^v\.blk\.(\d+)\.attn_out\.": r"visual.blocks.\1.attn.proj.",
    r"^v\.blk\.(\d+)\.ffn_": r"visual.blocks.\1.mlp.",
    r"^v\.deepstack\.(\d+)\.fc": r"visual.deepstack_merger_list.\1.linear_fc",
    r"^v\.deepstack\.(\d+)\.norm\.": r"visual.deepstack_merger_list.\1.norm.",
}
OLDER_MERGER = {r"^v\.post_ln\.": "visual.merger.ln_q.", r"^mm\.([02])\.": r"visual.merger.mlp.\1."}
NEWER_MERGER = {
    r"^v\.post_ln\.": "visual.merger.norm.",
    r"^mm\.0\.": "visual.merger.linear_fc1.",
    r"^mm\.2\.": "visual.merger.linear_fc2.",
}
LAYERS = {  # of feed-forward layers: up, gate and down
    GEMMA_3: ("fc1", "", "fc2"),
    QWEN_2: ("fc1", "", "fc2"),
    QWEN_2_5: ("up_proj", "gate_proj", "down_proj"),
    QWEN_3: ("linear_fc1", "", "linear_fc2"),
}
TENSOR_NAMES = {
    GEMMA_3: GEMMA_NAMES,
    QWEN_2: {**GRID_NAMES, **OLDER_MERGER},
    QWEN_2_5: {**GRID_NAMES, **OLDER_MERGER},
    QWEN_3: {**GRID_NAMES, **NEWER_MERGER},
}


def find_encoder(model: GgufHeader) -> GgufHeader | None:
    """The file with the encoder beside a model; of several, one of 16 bits. None: none, or one of an unknown kind."""
    found = [read_header(path) for path in encoder_paths(model.path)]
    fitting = [header for header in found if problem(model, header) is None]
    order = {kind: number for number, kind in enumerate(PREFERRED)}
    return min(
        fitting, key=lambda header: order.get(header.values.get("general.file_type", -1), len(order)), default=None
    )


def report_encoder(path: Path) -> None:
    """Log which file reads the images of a GGUF file's model."""
    if encoder := find_encoder(read_header(path)):
        logger.info("%s: images are read by the encoder in %s", path, encoder.path.name)


def warn_of_encoders(path: Path) -> None:
    """Say why the model of a GGUF file reads text only, if there are encoders beside it."""
    model = read_header(path)
    for header in (read_header(other) for other in encoder_paths(path)):
        logger.warning("%s is not used, and the model reads text only: %s", header.path, problem(model, header))


def problem(model: GgufHeader, encoder: GgufHeader) -> str | None:
    """Why an encoder cannot be that of a model; None: it can."""
    kind, size = projector(encoder), encoder.values.get("clip.vision.projection_dim")
    if (model.architecture, kind) not in CLASSES:
        return f"an encoder of the kind {kind!r} is not supported for {model.architecture!r}"
    missing = [name for name in TOKENS[kind].values() if token_id(model, name) is None]
    if missing:
        return f"the model's file has no token {', '.join(missing)}"
    if size not in (None, model.get("embedding_length")):
        return f"it is made for a model of the hidden size {size}, and this one has {model.get('embedding_length')}"
    return None


def projector(encoder: GgufHeader) -> str:
    values = encoder.values
    return str(values.get("clip.vision.projector_type") or values.get("clip.projector_type") or "")


def token_id(model: GgufHeader, name: str) -> int | None:
    """The id of a token by its name or that of one in its place, if it has an embedding and is found in texts."""
    tokens = model.values.get("tokenizer.ggml.tokens") or []
    types = model.values.get("tokenizer.ggml.token_type") or []
    rows = model.tensors["token_embd.weight"].shape[0] if "token_embd.weight" in model.tensors else len(tokens)
    for other in (name, STAND_INS.get(name)):
        found = tokens.index(other) if other in tokens else rows
        if found < min(rows, len(types)) and types[found] in NAMED:
            return int(found)
    return None


def with_encoder(model: GgufHeader, encoder: GgufHeader, config: Mapping[str, Any]) -> dict[str, Any]:
    """The config.json of the whole model, from that of its decoder."""
    kind = projector(encoder)
    tokens = {key: token_id(model, name) for key, name in TOKENS[kind].items()}
    found = {**config, **tokens, "architectures": [CLASSES[model.architecture, kind]]}
    if kind == GEMMA_3:
        return {**found, **gemma_vision(encoder)}
    sections = (model.get("rope.dimension_sections") or [])[:3]
    interleaved = {"mrope_interleaved": True} if kind == QWEN_3 else {}
    positions = {**(config.get("rope_parameters") or {}), "mrope_section": sections, **interleaved}
    vision = grid_vision(encoder, kind, int(config["hidden_size"]))
    return {**found, "vision_config": vision, "rope_parameters": positions}


def value(encoder: GgufHeader, key: str) -> int:
    found = encoder.values.get(f"clip.vision.{key}")
    if not isinstance(found, int) or found < 1:
        raise CheckpointError(f"{encoder.path} has {found!r} for clip.vision.{key}, which must be a number from 1")
    return found


def activation(encoder: GgufHeader) -> str:
    if encoder.values.get("clip.use_silu"):
        return "silu"
    return "gelu_pytorch_tanh" if encoder.values.get("clip.use_gelu") else "quick_gelu"


def gemma_vision(encoder: GgufHeader) -> dict[str, Any]:
    size, patch = value(encoder, "image_size"), value(encoder, "patch_size")
    pooled = encoder.values.get("clip.vision.projector.scale_factor") or POOLED
    vision = {
        "hidden_size": value(encoder, "embedding_length"),
        "intermediate_size": value(encoder, "feed_forward_length"),
        "num_hidden_layers": value(encoder, "block_count"),
        "num_attention_heads": value(encoder, "attention.head_count"),
        "image_size": size,
        "patch_size": patch,
        "hidden_act": activation(encoder),
        "layer_norm_eps": encoder.values.get("clip.vision.attention.layer_norm_epsilon", 1e-6),
    }
    return {"vision_config": vision, "mm_tokens_per_image": (size // patch // pooled) ** 2}


def grid_vision(encoder: GgufHeader, kind: str, text_size: int) -> dict[str, Any]:
    depth, size = value(encoder, "block_count"), value(encoder, "embedding_length")
    wide = inner_size(encoder, size)
    found = {
        "depth": depth,
        "num_heads": value(encoder, "attention.head_count"),
        "patch_size": value(encoder, "patch_size"),
        "spatial_merge_size": encoder.values.get("clip.vision.spatial_merge_size", 2),
        "temporal_patch_size": 2,
        "hidden_act": activation(encoder),
    }
    if kind == QWEN_2:
        if wide % size:
            raise CheckpointError(f"{encoder.path} has feed-forward layers of {wide}, no multiple of {size}")
        return {**found, "embed_dim": size, "hidden_size": text_size, "mlp_ratio": wide // size}
    found |= {"hidden_size": size, "out_hidden_size": text_size, "intermediate_size": wide}
    if kind == QWEN_2_5:
        period = encoder.values.get("clip.vision.n_wa_pattern", WINDOWED)
        full = [layer for layer in range(depth) if period and layer % period == period - 1]
        return {
            **found,
            "window_size": encoder.values.get("clip.vision.window_size", WINDOW),
            "fullatt_block_indexes": full,
        }
    deep = deep_layers(encoder)
    rows = encoder.tensors["v.position_embd.weight"].shape[0] if "v.position_embd.weight" in encoder.tensors else 0
    return {**found, "num_position_embeddings": rows, "deepstack_visual_indexes": deep}


def deep_layers(encoder: GgufHeader) -> list[int]:
    """The layers whose outputs go to the decoder, too."""
    flags = encoder.values.get("clip.vision.is_deepstack_layers") or []
    return [layer for layer, is_deep in enumerate(flags) if is_deep]


def inner_size(encoder: GgufHeader, size: int) -> int:
    """The size of feed-forward layers by their tensors: a key of Qwen2-VL has something else."""
    found = encoder.tensors.get("v.blk.0.ffn_up.weight")
    if found is None:
        raise CheckpointError(f"{encoder.path} has no v.blk.0.ffn_up.weight; download it again")
    return next((side for side in found.shape if side != size), size)


def read_image_settings(path: Path) -> Mapping[str, Any] | None:
    """What preprocessor_config.json would have, of the encoder beside a model; None: the file itself is there."""
    encoder = find_encoder(read_header(path))
    if encoder is None or (path.parent / "preprocessor_config.json").is_file():
        return None
    return {ours: encoder.values.get(f"clip.vision.{key}") for key, ours in IMAGE_KEYS.items()}


# ---- weights ----


@dataclass(frozen=True, slots=True)
class JoinedTensor:
    """A tensor of the folder, made of one or several of the file."""

    parts: Sequence[GgufTensor]
    shape: torch.Size
    join: Callable[[Sequence[Tensor]], Tensor]


class EncoderFile:
    """The tensors of an encoder by the names that Hugging Face folders have for them."""

    def __init__(self, header: GgufHeader) -> None:
        self.path = header.path
        self._header, self._kind = header, projector(header)
        self._tensors = dict(self._joined(dict(header.tensors)))

    def _joined(self, tensors: dict[str, GgufTensor]) -> Iterator[tuple[str, JoinedTensor]]:
        deep = deep_layers(self._header)
        while tensors:
            name = next(iter(tensors))
            if self._kind != GEMMA_3 and (found := re.match(r"^(v\.blk\.\d+\.attn_)[qkv]\.(weight|bias)$", name)):
                parts = self._taken(tensors, *(f"{found[1]}{part}.{found[2]}" for part in "qkv"))
                rows = sum(part.shape[0] for part in parts)
                shape = torch.Size((rows, *parts[0].shape[1:]))
                yield self._own(f"{found[1]}qkv.{found[2]}", deep), JoinedTensor(parts, shape, one_after_another)
            elif self._kind != GEMMA_3 and name.startswith("v.patch_embd.weight"):
                frames = self._taken(tensors, "v.patch_embd.weight", "v.patch_embd.weight.1")
                size, colors, *sides = frames[0].shape
                shape = torch.Size((size, colors, len(frames), *sides))
                yield self._own("v.patch_embd.weight", deep), JoinedTensor(frames, shape, in_frames)
            else:
                part, join = tensors.pop(name), first
                if name == "mm.soft_emb_norm.weight":
                    join = less_one
                yield self._own(name, deep), JoinedTensor([part], torch.Size(part.shape), join)

    def _taken(self, tensors: dict[str, GgufTensor], *names: str) -> list[GgufTensor]:
        """Tensors that belong together, taken out of the others."""
        if missing := [name for name in names if name not in tensors]:
            raise CheckpointError(f"{self.path} has no {', '.join(missing)}; download it again")
        return [tensors.pop(name) for name in names]

    def _own(self, name: str, deep: list[int]) -> str:
        """The name in a folder; unknown ones are kept."""
        found = re.match(r"^(v\.blk\.\d+\.ffn_)(up|gate|down)\.(weight|bias)$", name)
        if found is not None:
            up, gate, down = LAYERS[self._kind]
            is_first = found[2] == ("down" if self._is_swapped(found[1]) else "up")
            name = f"{found[1]}{gate if found[2] == 'gate' else up if is_first else down}.{found[3]}"
        if number := re.match(r"^v\.deepstack\.(\d+)\.", name):
            name = name.replace(number[1], str(deep.index(int(number[1]))), 1) if int(number[1]) in deep else name
        for pattern, replacement in TENSOR_NAMES[self._kind].items():
            name, count = re.subn(pattern, replacement, name)
            if count:
                break
        return name

    def _is_swapped(self, start: str) -> bool:
        """Whether the first layer is called down, as in the first files of Qwen2-VL."""
        tensor = self._header.tensors.get(f"{start}up.weight")
        size = value(self._header, "embedding_length")
        return tensor is not None and tensor.shape[0] == size != tensor.shape[1]

    def __iter__(self) -> Iterator[StoredTensor]:
        for name, tensor in self._tensors.items():
            yield StoredTensor(self, name, tensor.shape, torch.float32)

    def read(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        return tensor.join([read_tensor(self.path, part).float() for part in tensor.parts])


def first(parts: Sequence[Tensor]) -> Tensor:
    return parts[0]


def one_after_another(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([*parts])


def less_one(parts: Sequence[Tensor]) -> Tensor:
    """Of a norm whose file has the sum."""
    return parts[0] - 1


def in_frames(parts: Sequence[Tensor]) -> Tensor:
    return torch.stack([*parts], dim=2)


def encoder_files(model: GgufHeader) -> list[WeightFile]:
    encoder = find_encoder(model)
    return [] if encoder is None or not has_tensor(encoder, "v.") else [EncoderFile(encoder)]
