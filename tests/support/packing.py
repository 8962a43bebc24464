"""Archives of the networks in this folder, with random weights."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from flambeau.archive.pack import Recipe, pack

HANDLERS = Path(__file__).parent / "handlers"
NETWORKS = Path(__file__).parent / "networks"


def new_network(name: str, seed: int = 0) -> torch.nn.Module:
    """A network of this folder; the same seed gives the same weights."""
    [kind] = [
        value
        for value in vars(importlib.import_module(f"support.networks.{name}")).values()
        if isinstance(value, type) and value.__module__ == f"support.networks.{name}"
    ]
    torch.manual_seed(seed)
    return kind().eval()


def pack_network(
    folder: Path,
    model_name: str,
    handler: str,
    network: str,
    *,
    config: dict[str, Any] | None = None,
    extra_files: Sequence[Path] = (),
) -> torch.nn.Module:
    """Pack a network with its state dict as `<folder>/<model_name>.mar`, and return it."""
    model = new_network(network)
    weights = folder / f"{model_name}.pth"
    torch.save(model.state_dict(), weights)
    settings = None
    if config is not None:
        settings = folder / f"{model_name}.yaml"
        settings.write_text(yaml.safe_dump(config))
    recipe = Recipe(
        model_name=model_name,
        handler=handler,
        model_file=NETWORKS / f"{network}.py",
        serialized_file=weights,
        config_file=settings,
        extra_files=list(extra_files),
    )
    pack(recipe, folder)
    return model
