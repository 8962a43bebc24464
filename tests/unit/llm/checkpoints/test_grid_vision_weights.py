"""Weights of Qwen-VL are found under the names of old and of new files, and must be whole."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from flambeau.llm.checkpoints.checkpoint import load_model, read_architecture
from flambeau.llm.checkpoints.quantized import save_quantized
from flambeau.llm.checkpoints.vision_weights import VisionNetwork, load_vision
from flambeau.llm.engine import Engine
from flambeau.llm.errors import CheckpointError, InvalidRequest
from flambeau.llm.images.image_files import ImageFile
from flambeau.llm.sampling_params import SamplingParams
from support.grid_vision_models import KINDS, grid_prompt, write_grid_model
from support.packed_checkpoints import is_linear
from support.pictures import jpeg
from unit.llm.checkpoints.test_gptq import AWQ, awq

NAMES = {  # what each kind of file has
    "4.45": [(r"^model\.visual\.", "visual."), (r"^model\.language_model\.", "model.")],
    "4.52": [(r"^visual\.", "model.visual."), (r"^model\.(?=layers|norm|embed)", "model.language_model.")],
    "others": [
        (r"^model\.visual\.", "visual."),
        (r"^(model\.language_model|model)\.(?!visual)", "language_model.model."),
    ],
}


@pytest.fixture(scope="module", params=KINDS)
def written(request, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("qwen")
    write_grid_model(folder, request.param)
    return folder


def changed(written: Path, folder: Path, change) -> Path:
    shutil.copytree(written, folder, dirs_exist_ok=True)
    file = folder / "model.safetensors"
    save_file(change({name: tensor.clone() for name, tensor in load_file(file).items()}), file)
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


@pytest.mark.parametrize("written", ["qwen_3_moe"], indirect=True)
def test_stacks_of_experts_may_be_transposed(written, tmp_path):
    """As in the released files."""

    def change(tensors):
        return {n: t.transpose(1, 2).contiguous() if ".experts." in n else t for n, t in tensors.items()}

    one, two = load_model(written).state_dict(), load_model(changed(written, tmp_path, change)).state_dict()
    assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())


@pytest.mark.parametrize(
    ("name", "tensor", "reason"),
    [
        ("blocks.1.attn.qkv.bias", None, r"missing: blocks\.1\.attn\.qkv\.bias"),
        ("blocks.9.attn.qkv.bias", torch.zeros(3), r"not known: .*visual\.blocks\.9\.attn\.qkv\.bias"),
        ("patch_embed.proj.weight", torch.zeros(24, 3, 1, 4, 4), "of another shape"),
    ],
)
def test_weights_that_do_not_fit_are_named(written, tmp_path, name, tensor, reason):
    def change(tensors):
        prefix = "model.visual." if "model.visual.patch_embed.proj.weight" in tensors else "visual."
        tensors.pop(prefix + name, None)
        return tensors if tensor is None else {**tensors, prefix + name: tensor}

    with pytest.raises(CheckpointError, match=reason):
        load(changed(written, tmp_path, change))


def test_weights_of_a_constant_are_left_out(written, tmp_path):
    load(changed(written, tmp_path, lambda tensors: {**tensors, "visual.rotary_pos_emb.inv_freq": torch.zeros(3)}))


@pytest.mark.parametrize("written", ["qwen_2", "qwen_2.5"], indirect=True)  # later ones always had sections
def test_a_flat_file_of_settings_gives_the_same_network(written, tmp_path):
    config = json.loads((written / "config.json").read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    scaling = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    flat = {**text, **config, "rope_theta": rope["rope_theta"], "rope_scaling": scaling}
    other = changed(written, tmp_path, lambda tensors: tensors)
    (other / "config.json").write_text(json.dumps(flat))
    assert read_architecture(other) == read_architecture(written)


def test_without_an_encoder_the_model_reads_text_only(written, tmp_path, caplog):
    """As one that was trained on texts; a copy with quantized weights can be made of it."""

    def change(tensors):
        return {name: tensor for name, tensor in tensors.items() if "visual" not in name}

    text = changed(written, tmp_path / "text", change)
    (text / "preprocessor_config.json").unlink()
    save_quantized(text, tmp_path / "smaller", "int8")
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    expected = Engine.from_pretrained(written, compile=False, device="cpu").generate([[20, 30, 40]], params)
    for folder in (text, tmp_path / "smaller"):
        engine = Engine.from_pretrained(folder, compile=False, device="cpu")
        assert "the model reads text only" in caplog.text
        [found] = engine.generate([[20, 30, 40]], params)
        assert len(found.token_ids) == 20
        assert folder != text or found.token_ids == expected[0].token_ids
        with pytest.raises(InvalidRequest, match="reads no images"):
            engine.encode_images([ImageFile(data=jpeg(1), name="image")])


def test_a_quantized_copy_is_refused(written, tmp_path):
    with pytest.raises(CheckpointError, match="would lose the encoder of images"):
        save_quantized(written, tmp_path / "smaller", "int8")


def test_decoders_quantized_by_awq_read_images(written, tmp_path):
    """As the published ones, whose encoders are not quantized."""
    tensors, plain, packed = load_file(written / "model.safetensors"), {}, {}
    for name, tensor in tensors.items():
        if "visual" in name or not is_linear(name) or tensor.dim() != 2 or len(tensor) % 8:
            plain[name] = packed[name] = tensor
            continue
        parts, plain[name] = awq(tensor, group_size=8)
        packed |= {name.removesuffix("weight") + leaf: part.contiguous() for leaf, part in parts.items()}
    settings = json.loads((written / "config.json").read_text())
    quantization = {**AWQ, "group_size": 8, "modules_to_not_convert": ["visual"]}
    engines = []
    for name, weights, more in (("plain", plain, {}), ("packed", packed, {"quantization_config": quantization})):
        shutil.copytree(written, tmp_path / name)
        save_file({key: value.contiguous() for key, value in weights.items()}, tmp_path / name / "model.safetensors")
        (tmp_path / name / "config.json").write_text(json.dumps({**settings, **more}))
        engines.append(Engine.from_pretrained(tmp_path / name, compile=False, device="cpu"))
    found = []
    for engine in engines:
        images = engine.encode_images([ImageFile(data=jpeg(1, 120, 40), name="")])
        prompt = grid_prompt([20, 30], len(images[0].features), [40])
        params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        [completion] = engine.generate([prompt], params, media=[images])
        found.append(completion.token_ids)
    assert found[0] == found[1]
