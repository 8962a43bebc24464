"""LoRA adapters as PEFT saves them, and networks of transformers with such an adapter in their weights."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from support.checkpoints import read_checkpoint

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PREFIX = "base_model.model."


def layer_shapes(checkpoint: Path, leaves: Iterable[str] = PROJECTIONS) -> dict[str, tuple[int, int]]:
    """Outputs and inputs of the layers with these names in a checkpoint."""
    tensors = load_file(checkpoint / "model.safetensors")
    named = {name.removesuffix(".weight"): tensor.shape for name, tensor in tensors.items() if tensor.dim() == 2}
    return {name: tuple(shape) for name, shape in named.items() if name.rpartition(".")[2] in leaves}


def write_adapter(
    folder: Path,
    shapes: dict[str, tuple[int, int]],
    *,
    rank: int = 4,
    alpha: float = 8,
    seed: int = 1,
    **config: Any,
) -> Path:
    """An adapter whose effect is large enough to change greedy tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for module, (size_out, size_in) in shapes.items():
        tensors[f"{PREFIX}{module}.lora_A.weight"] = torch.randn(rank, size_in, generator=generator) * 0.3
        tensors[f"{PREFIX}{module}.lora_B.weight"] = torch.randn(size_out, rank, generator=generator) * 0.3
        if config.get("use_dora"):
            lengths = torch.rand(size_out, generator=generator) + 0.5
            tensors[f"{PREFIX}{module}.lora_magnitude_vector"] = lengths
    save_file(tensors, folder / "adapter_model.safetensors")
    document = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.1,
        "bias": "none",
        "target_modules": sorted({name.rpartition(".")[2] for name in shapes}),
        "modules_to_save": None,
        "use_dora": False,
        "use_rslora": False,
        "init_lora_weights": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps({**document, **config}))
    return folder


def merge(model: Any, folder: Path) -> Any:
    """Add an adapter to the weights of a network of transformers, by LoRA's formula, or DoRA's."""
    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    for name, a in tensors.items():
        if name.endswith("lora_A.weight"):
            module = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
            b = tensors[name.replace("lora_A", "lora_B")]
            root = math.sqrt(len(a)) if config["use_rslora"] else len(a)
            delta = b @ a * (config["lora_alpha"] / root)
            layer = model.get_submodule(module)
            with torch.no_grad():
                layer.weight += delta.T if type(layer).__name__ == "Conv1D" else delta
                if config["use_dora"]:
                    lengths = tensors[f"{PREFIX}{module}.lora_magnitude_vector"]
                    layer.weight *= (lengths / layer.weight.norm(dim=1)).unsqueeze(1)
    return model


def write_peft_adapter(checkpoint: Path, folder: Path, *, seed: int = 1, **options: Any) -> Path:
    """An adapter as peft itself makes and saves it, with random numbers that have an effect."""
    import peft

    model = read_checkpoint(checkpoint)
    model.name_or_path = ""  # peft looks there for changed embeddings
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, task_type="CAUSAL_LM", **options))
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if parameter.requires_grad:
                    scale = 0.2 if "lora_magnitude" in name else 0.3 if "lora_" in name else 0.1
                    parameter += torch.randn_like(parameter) * scale
        adapted.save_pretrained(folder)
    return folder


def read_peft_adapter(checkpoint: Path, folder: Path) -> Any:
    """A network of transformers with an adapter as peft reads it."""
    import peft

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.PeftModel.from_pretrained(read_checkpoint(checkpoint), folder).eval()
