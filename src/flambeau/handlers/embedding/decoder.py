"""DecoderEncoder: embeddings by a decoder of the engine (Qwen3-Embedding, E5-Mistral), with PyTorch's attention."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from flambeau.handlers.device import choose_device
from flambeau.handlers.embedding.encoders import pool_tensors
from flambeau.handlers.embedding.sentence_model import SentenceModel
from flambeau.handlers.onnx.npy import Array
from flambeau.llm.backends.eager import WholeAttention
from flambeau.llm.checkpoints.checkpoint import load_model
from flambeau.llm.checkpoints.weight_files import open_weights
from flambeau.llm.errors import CheckpointError
from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.hugging_face import from_hugging_face


def can_embed(config: Mapping[str, Any], folder: Path) -> bool:
    """Whether the engine computes this network as its config.json says."""
    if config.get("auto_map") or config.get("is_causal") is False:  # code of its own, or bidirectional
        return False
    try:
        return not architecture_of(config, folder).unknown_keys
    except CheckpointError:
        return False


class DecoderEncoder:
    """A causal network: padding on the right changes nothing before it."""

    def __init__(self, model: SentenceModel, gpu_id: int | None) -> None:
        self.device, _ = choose_device(gpu_id)
        folder = model.weights.parent
        dtype = torch.float32 if self.device.type == "cpu" else None
        self.model = load_model(folder, device=self.device, dtype=dtype, arch=architecture_of(model.config, folder))
        self.modes = model.modes

    def embed(self, ids: Array, mask: Array, is_pooled: Array | None = None) -> Array:
        """Token ids and a mask of the same shape → one vector per text."""
        with torch.inference_mode():
            positions = torch.arange(ids.shape[1], device=self.device).expand(*ids.shape)
            hidden = self.model(torch.from_numpy(ids).to(self.device), positions, WholeAttention()).float()
            return pool_tensors(hidden, torch.from_numpy(mask).to(self.device), self.modes, is_pooled)


def architecture_of(config: Mapping[str, Any], folder: Path) -> Architecture:
    """The network of config.json. One without an output layer is a …Model, and has the parts of its …ForCausalLM."""
    names = [str(name) for name in config.get("architectures") or ()]
    whole = [f"{name.removesuffix('Model')}ForCausalLM" if name.endswith("Model") else name for name in names]
    arch = from_hugging_face({**config, "architectures": whole})
    stored = {one.name for file in open_weights(folder) for one in file}
    return arch if "lm_head.weight" in stored else replace(arch, tied_embeddings=True)
