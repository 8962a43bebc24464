"""The configuration and the weights of a head that proposes tokens, whatever its kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from flambeau.llm.checkpoints.layer_formats import NO_FORMS, KeptForms
from flambeau.llm.checkpoints.loading_progress import progress_of
from flambeau.llm.checkpoints.parameter_filler import Arrived, fill
from flambeau.llm.checkpoints.parameter_map import map_weights
from flambeau.llm.checkpoints.quantization_methods import as_unpacked, has_packed_layers, is_packed, unpack_weights
from flambeau.llm.checkpoints.weight_files import StoredTensor, WeightFile
from flambeau.llm.gguf_header import gguf_path
from flambeau.llm.models.draft_heads import DraftHead, HeadSettings
from flambeau.llm.models.head_kinds import make_head
from flambeau.llm.models.hugging_face import read_config
from flambeau.llm.models.meta_device import on_meta_device
from flambeau.llm.quantize.quantizer import empty_layer, replace_layers
from flambeau.llm.quantize.settings import read_quantization


class SelectedTensors:
    """A file of which only some tensors are read."""

    def __init__(self, file: WeightFile, keeps: Callable[[str], bool]) -> None:
        self.path = file.path
        self._file, self._keeps = file, keeps

    def __iter__(self) -> Iterator[StoredTensor]:
        return (stored for stored in self._file if self._keeps(stored.name))

    def read(self, name: str) -> torch.Tensor:
        """The tensor of this name."""
        return self._file.read(name)


def head_config(path: Path) -> Mapping[str, Any]:
    """The config.json of a folder, or beside a file, that may hold a head; empty for GGUF, and if there is none."""
    folder = path.parent if path.is_file() else path
    if gguf_path(path) is not None or not (folder / "config.json").is_file():
        return {}
    return read_config(folder)


def load_files(
    path: Path,
    files: list[WeightFile],
    settings: HeadSettings,
    *,
    device: torch.device,
    dtype: torch.dtype,
    arrived: Arrived | None = None,
    forms: KeptForms = NO_FORMS,
) -> DraftHead:
    arch = settings.arch
    if is_packed(arch):
        if gguf_path(path) is None and has_packed_layers(files, arch):  # GGUF files are read dequantized
            unpacked = unpack_weights(files, arch, forms)
            files, arch = unpacked.files, as_unpacked(arch, unpacked.settings)
        else:
            arch = as_unpacked(arch, None)
        settings = replace(settings, arch=arch)
    with on_meta_device(dtype):
        head = make_head(settings).eval().requires_grad_(False)
        if (written := read_quantization(arch.source)) is not None:
            replace_layers(head, written, empty_layer)
    fill(head, map_weights(head, arch, files, None), device, progress_of(f"the head of {path.name}"), arrived)
    head.rotation.make_tables(device)
    return head
