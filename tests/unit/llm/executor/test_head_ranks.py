"""Heads that propose tokens beside a network on two ranks: texts are those without them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from flambeau.llm.checkpoints.checkpoint import load_model, read_declared
from flambeau.llm.checkpoints.layer_formats import KeptForms
from flambeau.llm.checkpoints.mtp_weights import load_mtp, read_mtp
from flambeau.llm.loader import load_engine
from flambeau.llm.quantize.quantizer import ExpertStack
from flambeau.llm.quantize.row_scaled import Fp8Linear
from flambeau.llm.sampling_params import SamplingParams
from support.cpu_kernels import need_cpu_kernels
from support.packed_files import COMMON, FILES, write_kind
from support.sharded import OPTIONS, generate_on_ranks
from support.tiny_heads import published_eagle, tiny_head

PROMPTS = [[*range(40, 56)], [9] * 20, [77]]
LAYERS = 4


def expected_of(folder: Path) -> list[list[int]]:
    engine = load_engine(folder, **OPTIONS)
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    return [completion.token_ids for completion in engine.generate(PROMPTS, params)]


def write_eagle(folder: Path, target: Path, kind: str) -> Path:
    """A random head for a network of this folder."""
    model = load_model(target)
    head = tiny_head(kind, model, draft_vocab_size=100 if kind == "eagle3" else 0)
    tensors = {name: value.clone().contiguous() for name, value in published_eagle(head).items()}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    config = {**json.loads((target / "config.json").read_text()), "num_hidden_layers": 1}
    if kind == "eagle3":
        config |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 100}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("kind", ["eagle3", "eagle"])
def test_an_eagle_head_proposes_beside_two_ranks(kind, compile, tmp_path):
    if compile:
        need_cpu_kernels()
    target = write_kind(tmp_path / "target", "float32", "dense", num_hidden_layers=LAYERS)
    head = write_eagle(tmp_path / "head", target, kind)
    found = generate_on_ranks(target, PROMPTS, draft=str(head), compile=compile)
    assert found.tokens == expected_of(target)
    assert found.num_drafted > 0


def write_block_head(folder: Path, target: Path) -> Path:
    """A random DFlash head for a network of this folder."""
    given = json.loads((target / "config.json").read_text())
    size, generator, tensors = given["hidden_size"], torch.Generator().manual_seed(1), {}
    wide, narrow = 64, 32
    shapes: dict[str, tuple[int, ...]] = {"fc": (size, 2 * size), "hidden_norm": (size,), "norm": (size,)}
    shapes |= {"layers.0.input_layernorm": (size,), "layers.0.post_attention_layernorm": (size,)}
    shapes |= {f"layers.0.self_attn.{name}_norm": (16,) for name in "qk"}
    shapes |= {"layers.0.self_attn.q_proj": (wide, size), "layers.0.self_attn.o_proj": (size, wide)}
    shapes |= {f"layers.0.self_attn.{name}_proj": (narrow, size) for name in "kv"}
    shapes |= {f"layers.0.mlp.{name}_proj": (narrow, size) for name in ("gate", "up")}
    shapes["layers.0.mlp.down_proj"] = (size, narrow)
    for name, shape in shapes.items():
        tensors[f"{name}.weight"] = torch.randn(shape, generator=generator) * 0.1 + float(len(shape) == 1)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    config = {"architectures": ["DFlashDraftModel"], "vocab_size": given["vocab_size"], "hidden_size": size}
    config |= {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config |= {"intermediate_size": narrow, "block_size": 6, "mask_token_id": 5, "target_layer_ids": [0, 1]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_block_is_proposed_beside_two_ranks(tmp_path):
    target = write_kind(tmp_path / "target", "float32", "dense", num_hidden_layers=LAYERS)
    found = generate_on_ranks(target, PROMPTS, draft=str(write_block_head(tmp_path / "head", target)))
    assert found.tokens == expected_of(target)
    assert found.num_drafted > 0


def write_mtp(folder: Path, kind: str) -> Path:
    """A checkpoint of DeepSeek with one more layer, which is like the last one and predicts a further token."""
    write_kind(folder, kind, "latent", num_nextn_predict_layers=1)
    tensors, number = load_file(folder / "model.safetensors"), COMMON["num_hidden_layers"]
    last, mtp, hidden = f"model.layers.{number - 1}.", f"model.layers.{number}.", 256
    tensors |= {name.replace(last, mtp): value.clone() for name, value in tensors.items() if name.startswith(last)}
    tensors |= {
        f"{mtp}{name}.weight": tensors["model.norm.weight"].clone() for name in ("enorm", "hnorm", "shared_head.norm")
    }
    pack = FILES.KINDS[kind].pack
    parts = {"weight": FILES.some_floats(hidden, 2 * hidden)} if pack is None else pack(hidden, 2 * hidden)
    tensors |= {f"{mtp}eh_proj.{leaf}": part for leaf, part in parts.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("kind", ["bfloat16", "fp8 blocks"])
def test_a_layer_of_multi_token_prediction_proposes_beside_two_ranks(kind, tmp_path):
    folder = write_mtp(tmp_path / "checkpoint", kind)
    found = generate_on_ranks(folder, PROMPTS, speculation="mtp")
    assert found.tokens == expected_of(folder)
    assert found.num_drafted > 0


def test_its_blocks_stay_fp8_beside_two_ranks(tmp_path):
    folder = write_mtp(tmp_path / "checkpoint", "fp8 blocks")
    settings, naming = read_mtp(folder, read_declared(folder))
    options = {"device": torch.device("cpu"), "dtype": torch.float32, "forms": KeptForms(blocks=True)}
    layer: Any = load_mtp(folder, settings, naming, load_model(folder), **options).model.layers[0]
    assert isinstance(layer.self_attn.o_proj, Fp8Linear)
    assert isinstance(layer.mlp.experts.down_proj, ExpertStack)


def test_prefixes_that_two_ranks_keep_have_the_entries_of_the_head(tmp_path):
    """That of the head is on rank 0, whose blocks are larger."""
    target = write_kind(tmp_path / "target", "float32", "dense", num_hidden_layers=LAYERS)
    options = {
        "draft": str(write_eagle(tmp_path / "head", target, "eagle3")),
        "kv_disk_folder": str(tmp_path / "kv"),
        "kv_host_memory_mb": 8,
    }
    expected = expected_of(target)
    for has_files in (False, True):
        found = generate_on_ranks(target, PROMPTS, **options)
        assert found.tokens == expected
        assert found.num_drafted > 0
        assert (found.num_restored > 0) == has_files
