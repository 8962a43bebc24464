"""GGUF files with an encoder beside them (mmproj-*.gguf) read images as the Hugging Face folder of the model does."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file

from flambeau.handlers.generation.chat_images import ChatImages
from flambeau.llm.checkpoints.checkpoint import read_architecture
from flambeau.llm.checkpoints.gguf_encoders import EncoderFile
from flambeau.llm.engine import Engine
from flambeau.llm.gguf_header import read_header
from flambeau.llm.images.image_files import ImageFile
from flambeau.llm.sampling_params import SamplingParams
from flambeau.wire.generation import MediaInput
from support import grid_vision_models, vision_models
from support.gguf_converter import arranged, header_of
from support.gguf_files import add, write_gguf
from support.grid_vision_models import grid_prompt, write_grid_model
from support.pictures import jpeg
from support.tokenizer_files import byte_level_json
from support.vision_models import prompt_with, write_vision_model

KINDS = {
    "gemma": ("gemma3", "gemma3"),
    "qwen_2": ("qwen2vl", "qwen2vl_merger"),
    "qwen_2.5": ("qwen2vl", "qwen2.5vl_merger"),
    "qwen_3": ("qwen3vl", "qwen3vl_merger"),
    "qwen_3_moe": ("qwen3vlmoe", "qwen3vl_merger"),
    "qwen_3.5": ("qwen35", "qwen3vl_merger"),
}
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
OPTIONS: dict[str, Any] = {"compile": False, "device": "cpu"}
RECURRENT = {
    "ssm.conv_kernel": 4,
    "ssm.state_size": 16,
    "ssm.group_count": 2,
    "ssm.time_step_rank": 4,
    "ssm.inner_size": 64,
    "rope.dimension_count": 16,
}
INPUTS = [MediaInput(name="wide", data=jpeg(1, 120, 40))]
PICTURES = [ImageFile(data=jpeg(1, 120, 40), name="wide"), ImageFile(data=jpeg(2, 50, 75), name="tall")]


def tokenizer_of(kind, model):
    """The tokens of a file, which has no padding beyond them."""
    is_gemma = kind == "gemma"
    names, template = (
        (vision_models.NAMES, vision_models.TEMPLATE)
        if is_gemma
        else (grid_vision_models.NAMES, grid_vision_models.TEMPLATE)
    )
    saved = json.loads(byte_level_json(names))["model"]
    vocab = saved["vocab"]
    tokens = sorted(vocab, key=vocab.get)
    values = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": tokens,
        "token_type": [3 if token in names else 1 for token in tokens],
        "merges": [" ".join(merge) for merge in saved["merges"]],
        "bos_token_id": 0,
        "eos_token_id": names.index("<eos>" if is_gemma else "<|im_end|>"),
        "add_bos_token": is_gemma,
    }
    return {"chat_template": template, **{f"ggml.{key}": value for key, value in values.items()}}


def write_decoder(path, kind, model, tensors):
    architecture, _ = KINDS[kind]
    config = model.config.text_config
    more = {}
    if kind == "gemma":
        more = {"attention.sliding_window": vision_models.WINDOW}
        more |= {"attention.sliding_window_pattern": [True, True, False]}
    if kind.startswith("qwen"):
        more = {"rope.dimension_sections": [*config.rope_parameters["mrope_section"], 0]}
    if kind in ("qwen_3", "qwen_3_moe"):
        more |= {"n_deepstack_layers": 2}
    if kind == "qwen_3_moe":
        more |= {"expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": 48}
    more |= RECURRENT if kind == "qwen_3.5" else {}
    own = {}
    for name, tensor in tensors.items():
        if "visual." in name or "vision_tower" in name or "projector" in name:
            continue
        name = name.replace("language_model.model.", "model.").replace("language_model.", "")
        tensor = tensor + 1 if kind == "gemma" and "norm" in name else tensor
        if ".experts." in name:
            tensor = tensor.transpose(1, 2)  # as the files of other families have them
        own |= arranged(name, tensor, config, architecture)
    if model.config.tie_word_embeddings or kind == "gemma":
        own.pop("lm_head.weight", None)
    write_gguf(path, architecture, own, header_of(config, **more), tokenizer=tokenizer_of(kind, model))


def write_encoder(path, kind, model, tensors, **more):
    """As llama.cpp's converter writes it."""
    path.parent.mkdir(exist_ok=True)
    vision, is_gemma = model.config.vision_config, kind == "gemma"
    writer = gguf.GGUFWriter(path, "clip")
    sizes = {
        "projection_dim": model.config.text_config.hidden_size,
        "image_size": vision.image_size if is_gemma else 560,
        "patch_size": vision.patch_size,
        "embedding_length": vision.embed_dim if kind == "qwen_2" else vision.hidden_size,
        "feed_forward_length": vision.hidden_size if kind == "qwen_2" else vision.intermediate_size,
        "block_count": vision.num_hidden_layers if is_gemma else vision.depth,
        "attention.head_count": vision.num_attention_heads if is_gemma else vision.num_heads,
        "attention.layer_norm_epsilon": 1e-6,
        "image_mean": [0.5, 0.5, 0.5] if is_gemma else [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.5, 0.5, 0.5] if is_gemma else [0.26862954, 0.26130258, 0.27577711],
    }
    if is_gemma:
        sizes["projector.scale_factor"] = 2
    else:
        sizes |= {"image_min_pixels": 32 * 32, "image_max_pixels": 72 * 72}
    if kind == "qwen_2.5":
        sizes |= {"n_wa_pattern": 2, "window_size": vision.window_size}
    deep = getattr(vision, "deepstack_visual_indexes", None) or []
    if kind.startswith("qwen_3"):
        sizes["is_deepstack_layers"] = [layer in deep for layer in range(vision.depth)]
    values = {"clip.has_vision_encoder": True, "clip.projector_type": KINDS[kind][1]}
    values |= {f"clip.vision.{key}": value for key, value in sizes.items()}
    values |= {"clip.use_silu": True} if kind == "qwen_2.5" else {}
    values |= {"clip.use_gelu": True} if is_gemma or kind.startswith("qwen_3") else {}
    for key, value in (values | more).items():
        add(writer, key, value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 10)
    for name, tensor in tensors.items():
        for theirs, one in encoder_tensor(name, tensor, names, deep).items():
            writer.add_tensor(theirs, one.float().contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def encoder_tensor(name, tensor, names, deep):
    """One tensor as the converter has it."""
    if "projector" in name:
        name = name.removeprefix("model.")
        if name.endswith("mm_input_projection_weight"):
            return {"mm.input_projection.weight": tensor}
        return {"mm.soft_emb_norm.weight": tensor + 1}
    if "vision_tower" in name:
        name = name.removeprefix("model.").replace("vision_tower.", "vision_tower.vision_model.")
        name = name.replace("vision_model.vision_model", "vision_model")
        return {names.get_name(name, try_suffixes=(".weight", ".bias")): tensor}
    if "visual." not in name:
        return {}
    name = name.removeprefix("model.")
    if name.endswith("patch_embed.proj.weight"):
        return {"v.patch_embd.weight": tensor[:, :, 0], "v.patch_embd.weight.1": tensor[:, :, 1]}
    if ".deepstack_merger_list." in name:
        _, _, number, layer, leaf = name.split(".")
        return {f"v.deepstack.{deep[int(number)]}.{layer.replace('linear_', '')}.{leaf}": tensor}
    if ".merger.linear_fc" in name:
        return {f"mm.{0 if 'fc1' in name else 2}.{name.rpartition('.')[2]}": tensor}
    if ".merger.norm." in name:
        return {f"v.post_ln.{name.rpartition('.')[2]}": tensor}
    if ".attn.qkv." in name and len(deep) == 0:  # of Qwen 2
        start, leaf = f"v.blk.{name.split('.')[2]}.attn_", name.rpartition(".")[2]
        return {f"{start}{part}.{leaf}": one for part, one in zip("qkv", tensor.chunk(3), strict=True)}
    return {names.get_name(name, try_suffixes=(".weight", ".bias")): tensor}


def write(base, kind):
    """The folder of a model, and that of its files."""
    folder, files = base / "folder", base / "files"
    text = {"mlp_only_layers": []} if kind == "qwen_3_moe" else {}
    model = write_vision_model(folder) if kind == "gemma" else write_grid_model(folder, kind, **text)
    if kind == "gemma":  # the size by which queries are scaled is that of a head in files of all but the largest model
        config = json.loads((folder / "config.json").read_text())
        config["text_config"]["query_pre_attn_scalar"] = config["text_config"]["head_dim"]
        (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    write_decoder(files / "model.gguf", kind, model, tensors)
    write_encoder(files / "mmproj-model-f16.gguf", kind, model, tensors)
    return folder, files


@pytest.fixture(scope="module", params=KINDS)
def made(request, tmp_path_factory):
    return request.param, *write(tmp_path_factory.mktemp("model"), request.param)


def test_images_are_read_as_from_the_folder(made):
    kind, folder, files = made
    found, expected = (Engine.from_pretrained(path, **OPTIONS) for path in (files, folder))
    assert found.images is not None
    chats = [
        ChatImages.of(engine.images.arch, engine.images.processor, engine.tokenizer) for engine in (found, expected)
    ]
    assert chats[0].texts(INPUTS) == chats[1].texts(INPUTS)
    assert (chats[0].marker, chats[0].around) == (chats[1].marker, chats[1].around)
    both = [engine.encode_images(PICTURES) for engine in (found, expected)]
    for ours, theirs in zip(*both, strict=True):
        assert ours.grid == theirs.grid
        torch.testing.assert_close(ours.features, theirs.features, atol=1e-5, rtol=1e-5)
    numbers = [len(image.features) for image in both[0]]
    parts = [[25], numbers[0], [50, 60], numbers[1], [90]]
    prompt = prompt_with([25], None, [50, 60], None, [90]) if kind == "gemma" else grid_prompt(*parts)
    texts = [
        engine.generate([prompt], GREEDY, logprobs=1, media=[images])[0]
        for engine, images in zip((found, expected), both, strict=True)
    ]
    assert texts[0].token_ids == texts[1].token_ids
    logprobs = [torch.tensor([token.logprob for token in text.tokens]) for text in texts]
    torch.testing.assert_close(*logprobs, atol=1e-4, rtol=0)


def test_the_architecture_is_that_of_the_folder(made):
    _, folder, files = made
    found, expected = read_architecture(files), read_architecture(folder)
    assert replace(found.vision, norm_epsilon=1e-6, video_id=expected.vision.video_id) == expected.vision
    assert found.vision.norm_epsilon == pytest.approx(1e-6)
    assert found.position_axes == expected.position_axes
    assert found.unknown_keys == ()


def test_other_encoders_leave_a_model_of_text_and_other_names_are_found(tmp_path, caplog):
    _, files = write(tmp_path, "qwen_2")
    header = read_header(files / "mmproj-model-f16.gguf")
    swapped = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}  # as in the first files of Qwen2-VL
    tensors = {}
    for name, tensor in header.tensors.items():
        part = next((part for part in swapped if part in name), None)
        tensors[name.replace(part, swapped[part]) if part else name] = tensor
    other = type(header)(header.path, header.values, tensors)
    assert {one.name: one.shape for one in EncoderFile(other)} == {one.name: one.shape for one in EncoderFile(header)}
    (files / "mmproj-model-f16.gguf").unlink()
    writer = gguf.GGUFWriter(files / "mmproj-other.gguf", "clip")
    writer.add_string("clip.projector_type", "pixtral")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with caplog.at_level(logging.WARNING):
        engine = Engine.from_pretrained(files, **OPTIONS)
    assert engine.images is None
    assert (
        "mmproj-other.gguf is not used, and the model reads text only: an encoder of the kind 'pixtral'" in caplog.text
    )
