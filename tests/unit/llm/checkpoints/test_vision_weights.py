"""The encoder of images is found under all names that checkpoints have for it, and must be whole."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from flambeau.llm.checkpoints.checkpoint import load_model, read_architecture
from flambeau.llm.checkpoints.quantized import save_quantized
from flambeau.llm.checkpoints.vision_weights import VisionNetwork, load_vision
from flambeau.llm.errors import CheckpointError
from support.vision_models import write_vision_model

NAMES = {  # what each kind of file has instead of the names of the first
    "4.50": [(r"^vision_tower\.", "vision_tower.vision_model.")],
    "4.52": [
        (r"^vision_tower\.", "model.vision_tower.vision_model."),
        (r"^multi_modal_projector\.", "model.multi_modal_projector."),
        (r"^language_model\.model\.", "model.language_model."),
    ],
    "5": [
        (r"^vision_tower\.", "model.vision_tower."),
        (r"^multi_modal_projector\.", "model.multi_modal_projector."),
        (r"^language_model\.model\.", "model.language_model."),
    ],
}


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("gemma")
    write_vision_model(folder)
    return folder


def changed(written: Path, folder: Path, change) -> Path:
    shutil.copytree(written, folder, dirs_exist_ok=True)
    file = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    save_file(change(tensors), file)
    return folder


def load(folder: Path) -> VisionNetwork:
    arch = read_architecture(folder).vision
    assert arch is not None
    return load_vision(folder, arch, device="cpu", dtype=torch.float32)


def renamed(name: str, kind: str) -> str:
    for pattern, other in NAMES[kind]:
        name = re.sub(pattern, other, name)
    return name


@pytest.mark.parametrize("kind", NAMES)
def test_files_of_other_versions_give_the_same_networks(written, tmp_path, kind):
    other = changed(written, tmp_path, lambda tensors: {renamed(n, kind): tensor for n, tensor in tensors.items()})
    for one, two in ((load(written), load(other)), (load_model(written), load_model(other))):
        assert one.state_dict().keys() == two.state_dict().keys()
        assert all(torch.equal(tensor, two.state_dict()[name]) for name, tensor in one.state_dict().items())


def test_a_head_that_is_not_used_is_left_out(written, tmp_path):
    load(changed(written, tmp_path, lambda tensors: {**tensors, "vision_tower.head.probe": torch.zeros(3)}))


@pytest.mark.parametrize(
    ("name", "tensor", "reason"),
    [
        ("vision_tower.post_layernorm.weight", None, r"missing: vision_tower\.post_layernorm\.weight"),
        ("vision_tower.other.weight", torch.zeros(3), r"not known: vision_tower\.other\.weight"),
        ("multi_modal_projector.mm_input_projection_weight", torch.zeros(3, 4), "of another shape"),
    ],
)
def test_weights_that_do_not_fit_are_named(written, tmp_path, name, tensor, reason):
    def change(tensors):
        tensors.pop(name, None)
        return tensors if tensor is None else {**tensors, name: tensor}

    with pytest.raises(CheckpointError, match=reason):
        load(changed(written, tmp_path, change))


def test_a_quantized_copy_is_refused(written, tmp_path):
    with pytest.raises(CheckpointError, match=r"would lose the encoder of images; .* --quantization int8"):
        save_quantized(written, tmp_path / "smaller", "int8")
    assert not (tmp_path / "smaller").exists()
