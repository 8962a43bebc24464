"""load_vision: the encoder of images from the files of a checkpoint."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from flambeau.llm.checkpoints.checkpoint import open_files
from flambeau.llm.checkpoints.gguf_encoders import encoder_files
from flambeau.llm.checkpoints.loading_progress import progress_of
from flambeau.llm.checkpoints.parameter_filler import fill
from flambeau.llm.checkpoints.parameter_map import Placement, WeightMismatches, listed, mismatch
from flambeau.llm.checkpoints.weight_files import WeightFile
from flambeau.llm.errors import CheckpointError
from flambeau.llm.gguf_header import gguf_path, read_header
from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.families.config_parts import OUTPUTS
from flambeau.llm.models.grid_vision import GridEncoder
from flambeau.llm.models.meta_device import on_meta_device
from flambeau.llm.models.sound_architecture import SOUNDS
from flambeau.llm.models.tensor_names import vision_name
from flambeau.llm.models.vision import SiglipEncoder
from flambeau.llm.models.vision_architecture import (
    GridArchitecture,
    PretrainedVision,
    SiglipArchitecture,
    VisionArchitecture,
)

UNUSED = "vision_tower.head."  # pools an image to one vector, for other tasks
CONSTANTS = (".position_ids", "rotary_pos_emb.inv_freq")
PLAIN = (torch.float32, torch.float16, torch.bfloat16, torch.int64)  # and numbers of positions
VisionNetwork = SiglipEncoder | GridEncoder


def make_encoder(arch: VisionArchitecture) -> VisionNetwork:
    if isinstance(arch, GridArchitecture):
        return GridEncoder(arch)
    assert isinstance(arch, SiglipArchitecture)
    return SiglipEncoder(arch)


def vision_files(path: Path) -> list[WeightFile]:
    """The files with the encoder: those of the model, or a GGUF file of its own beside it."""
    gguf = gguf_path(path)
    return open_files(path) if gguf is None else encoder_files(read_header(gguf))


def has_vision(path: Path, arch: Architecture) -> bool:
    """Whether a checkpoint holds any weights of an encoder; those of models that were trained on text may not."""
    names = (stored.name for file in vision_files(path) for stored in file)
    if isinstance(arch.vision, PretrainedVision):
        others = re.compile(f"{SOUNDS.pattern}|{OUTPUTS}")
        return any(re.search(arch.unused, name) and not others.search(name) for name in names)
    return any(vision_name(name) is not None for name in names)


def has_sounds(path: Path) -> bool:
    """Whether a checkpoint holds any weights of an encoder of sounds."""
    return gguf_path(path) is None and any(SOUNDS.search(stored.name) for file in open_files(path) for stored in file)


def check_plain(path: Path, arch: Architecture) -> None:
    """Raise for a quantized encoder: transformers would take its integers for weights."""
    files = open_files(path)
    coded = [
        stored.name
        for file in files
        for stored in file
        if re.search(arch.unused, stored.name) and not re.search(OUTPUTS, stored.name) and stored.dtype not in PLAIN
    ]
    if coded:
        raise CheckpointError(
            f"{path} has an encoder of images or sounds whose weights are quantized, which is not supported: "
            f"{listed(coded)}; use a checkpoint that leaves it as it was, or set read_images: false and read_sounds: "
            "false to serve the model for text alone"
        )


def load_vision(
    path: Path, arch: VisionArchitecture, *, device: torch.device | str, dtype: torch.dtype
) -> VisionNetwork:
    """The encoder, ready to run; raises CheckpointError if the files do not fit it."""
    files = vision_files(path)
    with on_meta_device(dtype):
        encoder = make_encoder(arch).eval().requires_grad_(False)
    targets = encoder.state_dict(keep_vars=True)
    mismatches, placements = WeightMismatches(), []
    for stored in (stored for file in files for stored in file):
        name = vision_name(stored.name)
        if name is None or name.startswith(UNUSED) or name.endswith(CONSTANTS):
            continue
        if name not in targets:
            mismatches.unknown.append(f"{stored.name} ({stored.file.path.name})")
            continue
        given = torch.empty(stored.shape, dtype=stored.dtype, device="meta")
        if problem := mismatch(given, targets[name]):
            mismatches.ill_shaped.append(f"{stored.name} ({problem} in {stored.file.path.name})")
            continue
        placements.append(
            Placement(stored=stored, cut=lambda tensor: tensor, parameter=name, region=(), num_bytes=given.nbytes)
        )
    mismatches.missing += sorted(targets.keys() - {placement.parameter for placement in placements})
    mismatches.raise_if_any(files)
    fill(encoder, placements, torch.device(device), progress_of(f"{path.name} (images)"), None)
    return encoder
