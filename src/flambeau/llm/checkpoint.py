"""Checkpoints: files → a network."""

from __future__ import annotations

from pathlib import Path

import torch

from flambeau.llm.models.transformer import Transformer


def load_model(path: Path, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> Transformer:
    """The network in a folder."""
    raise NotImplementedError(path)
