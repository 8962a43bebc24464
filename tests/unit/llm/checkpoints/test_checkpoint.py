"""Checkpoints of all spellings give the same network; those that do not fit are refused by name."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from flambeau.llm.checkpoints.checkpoint import load_model, read_architecture
from flambeau.llm.checkpoints.parameter_filler import largest_first
from flambeau.llm.checkpoints.parameter_map import Placement, as_is
from flambeau.llm.checkpoints.weight_files import open_weights
from flambeau.llm.errors import CheckpointError, NoRoom
from flambeau.llm.models import presets
from flambeau.llm.models.transformer import Transformer
from support.checkpoints import write_checkpoint
from support.tiny_models import ARCH, tiny_model
from support.weights import (
    gpt_fast_tensors,
    hugging_face_tensors,
    logits_of,
    write_config,
    write_folder,
    write_shards,
)

MOE = replace(ARCH, num_experts=4, expert_size=24)


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def expected(model):
    return logits_of(model)


def write_only(folder: Path, model: Transformer, save, name: str, tensors=None) -> Path:
    write_config(folder, model.arch)
    save(hugging_face_tensors(model) if tensors is None else tensors, folder / name)
    return folder


def refusal(path: Path, **options) -> str:
    with pytest.raises(CheckpointError) as refused:
        load_model(path, **options)
    return str(refused.value)


# ---- spellings ----


def test_a_hugging_face_folder_is_loaded(tmp_path, model, expected):
    write_folder(tmp_path, model)
    assert torch.equal(logits_of(load_model(tmp_path)), expected)
    assert torch.equal(logits_of(load_model(tmp_path / "model.safetensors")), expected)


def test_shards_are_put_together(tmp_path, model, expected):
    write_config(tmp_path, model.arch)
    write_shards(tmp_path, hugging_face_tensors(model), save_file, "model", "safetensors")
    assert torch.equal(logits_of(load_model(tmp_path)), expected)


def test_files_of_torch_are_loaded(tmp_path, model, expected):
    whole = write_only(tmp_path / "whole", model, torch.save, "pytorch_model.bin")
    assert torch.equal(logits_of(load_model(whole)), expected)
    write_config(tmp_path / "shards", model.arch)
    write_shards(tmp_path / "shards", hugging_face_tensors(model), torch.save, "pytorch_model", "bin")
    assert torch.equal(logits_of(load_model(tmp_path / "shards")), expected)


def test_files_from_before_torch_1_6_are_loaded(tmp_path, model, expected):
    def save_as_before(tensors, path):
        torch.save(tensors, path, _use_new_zipfile_serialization=False)

    folder = write_only(tmp_path, model, save_as_before, "pytorch_model.bin")
    assert torch.equal(logits_of(load_model(folder)), expected)


def test_our_own_spelling_is_loaded(tmp_path, model, expected):
    folder = write_only(tmp_path, model, save_file, "model.safetensors", dict(model.state_dict()))
    assert torch.equal(logits_of(load_model(folder)), expected)


@pytest.mark.parametrize("fused", [True, False])
def test_gpt_fast_files_are_loaded_with_their_rotary_layout(tmp_path, model, expected, fused):
    tensors = gpt_fast_tensors(model, fused=fused)
    assert "layers.0.attention.wo.weight" in tensors
    folder = write_only(tmp_path, model, torch.save, "model.pth", tensors)
    assert torch.equal(logits_of(load_model(folder)), expected)
    assert torch.equal(logits_of(load_model(folder / "model.pth")), expected)


def test_a_folder_without_a_config_is_known_by_its_name(tmp_path, model, expected, monkeypatch):
    monkeypatch.setattr(presets, "PRESETS", {"Tiny": model.arch, "Tiny-1": ARCH})
    folder = tmp_path / "my-tiny-1-chat"
    folder.mkdir()
    torch.save(gpt_fast_tensors(model), folder / "model.pth")
    assert torch.equal(logits_of(load_model(folder)), expected)


def test_metas_own_folder_is_loaded(tmp_path, model):
    arch = replace(ARCH, intermediate_size=128)
    model = tiny_model(arch)
    params = {"dim": 48, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "vocab_size": -1, "multiple_of": 128}
    (tmp_path / "params.json").write_text(json.dumps({**params, "max_seq_len": 256}))
    tensors = gpt_fast_tensors(model, fused=False) | {"rope.freqs": torch.ones(6)}
    torch.save(tensors, tmp_path / "consolidated.00.pth")
    assert torch.equal(logits_of(load_model(tmp_path)), logits_of(model))
    assert read_architecture(tmp_path).vocab_size == arch.vocab_size


def test_experts_are_loaded_from_all_spellings(tmp_path):
    model = tiny_model(MOE)
    expected = logits_of(model)
    write_folder(tmp_path / "mixtral", model)
    qwen = {
        name.replace("block_sparse_moe", "mlp")
        .replace(".w1.", ".gate_proj.")
        .replace(".w2.", ".down_proj.")
        .replace(".w3.", ".up_proj."): tensor
        for name, tensor in hugging_face_tensors(model).items()
    }
    write_only(tmp_path / "qwen", model, save_file, "model.safetensors", qwen)
    write_only(tmp_path / "ours", model, save_file, "model.safetensors", dict(model.state_dict()))
    write_only(tmp_path / "gpt-fast", model, torch.save, "model.pth", gpt_fast_tensors(model))
    for name in ("mixtral", "qwen", "ours", "gpt-fast"):
        assert torch.equal(logits_of(load_model(tmp_path / name)), expected), name


def test_tied_embeddings_are_loaded_once(tmp_path):
    model = tiny_model(replace(ARCH, tied_embeddings=True))
    write_folder(tmp_path, model)
    path = tmp_path / "model.safetensors"
    assert torch.equal(logits_of(load_model(tmp_path)), logits_of(model))
    twice = hugging_face_tensors(model) | {"lm_head.weight": model.model.embed_tokens.weight.clone()}
    save_file(twice, path)
    assert torch.equal(logits_of(load_model(tmp_path)), logits_of(model))


def test_biases_of_queries_keys_and_values_are_put_together(tmp_path):
    model = tiny_model(replace(ARCH, qkv_bias=True, output_bias=True))
    for layer in model.model.layers:
        nn.init.normal_(layer.self_attn.qkv_proj.bias)
    write_folder(tmp_path, model)
    assert torch.equal(logits_of(load_model(tmp_path)), logits_of(model))


# ---- memory, types, progress ----


def file_behind(tensor: torch.Tensor) -> str:
    """The file whose pages a tensor's memory is."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, *_, name = line.split()
        start, end = (int(number, 16) for number in place.split("-"))
        if start <= tensor.data_ptr() < end:
            return name
    return ""


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="only Linux tells what is mapped")
def test_weights_are_the_mapped_file_itself_where_they_can_be(tmp_path, model):
    path = tmp_path / "model.safetensors"
    write_folder(tmp_path, model)
    loaded = load_model(tmp_path)
    for weight in (loaded.model.embed_tokens.weight, loaded.model.layers[0].mlp.down_proj.weight):
        assert file_behind(weight) == str(path)
    own = write_only(tmp_path / "own", model, torch.save, "model.pth", dict(model.state_dict()))
    assert {file_behind(weight) for weight in load_model(own).parameters()} == {str(own / "model.pth")}


def test_changing_a_mapped_network_leaves_the_file_alone(tmp_path, model, expected):
    write_folder(tmp_path, model)
    load_model(tmp_path).model.embed_tokens.weight.zero_()
    assert torch.equal(logits_of(load_model(tmp_path)), expected)


def test_weights_take_the_type_asked_for_or_the_files_own(tmp_path, model):
    write_only(tmp_path, model.to(torch.float32), save_file, "model.safetensors")
    assert load_model(tmp_path).lm_head.weight.dtype == torch.float32
    narrow = load_model(tmp_path, dtype=torch.bfloat16)
    assert {weight.dtype for weight in narrow.parameters()} == {torch.bfloat16}
    assert narrow.rotation.cos.dtype == torch.float32
    assert torch.get_default_dtype() == torch.float32
    halves = {name: tensor.half() for name, tensor in hugging_face_tensors(model).items()}
    save_file(halves, tmp_path / "model.safetensors")
    assert {weight.dtype for weight in load_model(tmp_path).parameters()} == {torch.float16}


def test_a_loaded_network_is_for_inference(tmp_path, model):
    write_folder(tmp_path, model)
    loaded = load_model(tmp_path)
    assert not loaded.training
    assert not any(weight.requires_grad for weight in loaded.parameters())
    assert not any(tensor.is_meta for tensor in (*loaded.parameters(), *loaded.buffers()))


def test_progress_ends_with_all_bytes_of_the_weights(tmp_path, model):
    write_folder(tmp_path, model)
    seen: list[tuple[int, int]] = []
    load_model(tmp_path, progress=lambda done, total: seen.append((done, total)))
    size = sum(tensor.nbytes for tensor in model.state_dict().values())
    assert {total for _, total in seen} == {size}
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert seen[-1] == (size, size)


# ---- refusals ----


def test_all_that_does_not_fit_is_named_at_once(tmp_path, model):
    tensors = hugging_face_tensors(model)
    for i in range(3):
        del tensors[f"model.layers.{i}.self_attn.k_proj.weight"]
        del tensors[f"model.layers.{i}.input_layernorm.weight"]
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(80, 47)
    tensors["model.layers.1.mlp.down_proj.weight"] = torch.zeros(48, 80, dtype=torch.int8)
    tensors["model.layers.0.self_attn.surprise"] = torch.zeros(1)
    write_only(tmp_path, model, save_file, "model.safetensors", tensors)
    said = refusal(tmp_path)
    assert str(tmp_path / "model.safetensors") in said
    assert "missing: " in said
    assert "model.layers.1.self_attn.k_proj.weight" in said
    assert "and 1 more" in said  # six are missing
    assert "not known: model.layers.0.self_attn.surprise" in said
    assert "model.layers.0.mlp.up_proj.weight ([80, 47] instead of [80, 48] in model.safetensors)" in said
    assert "model.layers.1.mlp.down_proj.weight (torch.int8 instead of torch.float32" in said


def test_a_missing_expert_is_named(tmp_path):
    model = tiny_model(MOE)
    tensors = hugging_face_tensors(model)
    del tensors["model.layers.2.block_sparse_moe.experts.3.w3.weight"]
    write_only(tmp_path, model, save_file, "model.safetensors", tensors)
    assert "missing: model.layers.2.mlp.experts.3.up_proj.weight" in refusal(tmp_path)


def test_angles_in_old_files_do_no_harm(tmp_path, model, expected):
    tensors = hugging_face_tensors(model) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(6)}
    write_only(tmp_path, model, save_file, "model.safetensors", tensors)
    assert torch.equal(logits_of(load_model(tmp_path)), expected)


@pytest.mark.parametrize("kept", [0, 4, 100, -1, -5000])
def test_a_cut_off_file_is_named(tmp_path, model, kept):
    write_folder(tmp_path, model)
    path = tmp_path / "model.safetensors"
    os.truncate(path, kept if kept >= 0 else path.stat().st_size + kept)
    said = refusal(tmp_path)
    assert str(path) in said
    assert "cut off or damaged" in said


@pytest.mark.parametrize("kept", [0, 100, -100])
def test_a_cut_off_file_of_torch_is_named(tmp_path, model, kept):
    write_only(tmp_path, model, torch.save, "model.pth")
    path = tmp_path / "model.pth"
    os.truncate(path, kept if kept >= 0 else path.stat().st_size + kept)
    assert str(path) in refusal(tmp_path)


@pytest.mark.parametrize(
    ("name", "opener", "error"),
    [
        ("model.safetensors", "safe_open", MemoryError("Cannot allocate memory (os error 12)")),
        ("model.pth", "torch.load", MemoryError()),
        ("model.pth", "torch.load", RuntimeError("unable to mmap 8 bytes: Cannot allocate memory (12)")),
        ("model.pth", "torch.load", RuntimeError("DefaultCPUAllocator: can't allocate memory")),
        ("model.pth", "torch.load", OSError(errno.ENOMEM, "Cannot allocate memory")),
    ],
)
def test_too_little_memory_is_not_the_fault_of_the_file(tmp_path, monkeypatch, name, opener, error):
    def fail(*_, **__):
        raise error

    (tmp_path / name).touch()
    monkeypatch.setattr(f"flambeau.llm.checkpoints.weight_files.{opener}", fail)
    with pytest.raises(NoRoom, match=f"{name} cannot be loaded: too little memory is free"):
        open_weights(tmp_path)


def test_a_damaged_header_is_named(tmp_path, model):
    write_folder(tmp_path, model)
    path = tmp_path / "model.safetensors"
    content = bytearray(path.read_bytes())
    content[8:20] = b"not json at a"[:12]
    path.write_bytes(content)
    assert f"{path} is cut off or damaged" in refusal(tmp_path)


def test_a_pointer_of_git_lfs_is_recognized(tmp_path, model):
    write_folder(tmp_path, model)
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")
    assert "git lfs pull" in refusal(tmp_path)


def test_code_in_a_file_is_not_run(tmp_path, model):
    class Danger:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "made"),))

    write_config(tmp_path, model.arch)
    torch.save({"model.embed_tokens.weight": Danger()}, tmp_path / "model.pth")
    assert "other things than tensors" in refusal(tmp_path)
    assert not (tmp_path / "made").exists()


def test_a_file_that_is_no_state_dict_is_refused(tmp_path, model):
    write_config(tmp_path, model.arch)
    torch.save({"model": {"a": torch.ones(1)}}, tmp_path / "model.pth")
    assert "must hold a state_dict" in refusal(tmp_path)


def test_missing_shards_and_broken_indexes_are_named(tmp_path, model):
    write_config(tmp_path, model.arch)
    write_shards(tmp_path, hugging_face_tensors(model), save_file, "model", "safetensors")
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    assert "1 are missing: model-00002-of-00003.safetensors" in refusal(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../other.safetensors"}}))
    assert "outside of its folder: ../other.safetensors" in refusal(tmp_path)
    index.write_text("{}")
    assert "has no weight_map" in refusal(tmp_path)


def test_a_folder_without_weights_says_what_was_looked_for(tmp_path, model):
    write_config(tmp_path, model.arch)
    assert "model.safetensors.index.json" in refusal(tmp_path)
    assert "does not exist" in refusal(tmp_path / "nowhere")


# ---- what is applied while loading ----


def halved(name: str, tensor: torch.Tensor, rank: int) -> torch.Tensor:
    """One of two shares: rows of what widens, columns of what narrows."""
    if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate_proj.weight", "up_proj.weight")):
        return tensor.chunk(2, dim=0)[rank]
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        return tensor.chunk(2, dim=1)[rank]
    return tensor


def share_of(arch):
    return replace(
        arch,
        num_heads=arch.num_heads // 2,
        num_kv_heads=arch.num_kv_heads // 2,
        intermediate_size=arch.intermediate_size // 2,
        expert_size=arch.expert_size // 2,
    )


@pytest.mark.parametrize("arch", [ARCH, MOE])
@pytest.mark.parametrize("spelling", ["theirs", "ours", "gpt-fast"])
def test_a_share_is_cut_from_queries_keys_and_values_apart(tmp_path, arch, spelling):
    model = tiny_model(arch)
    tensors = {
        "theirs": hugging_face_tensors,
        "ours": lambda m: dict(m.state_dict()),
        "gpt-fast": gpt_fast_tensors,
    }[spelling](model)
    write_only(tmp_path, model, torch.save, "model.pth", tensors)
    shares = [
        load_model(
            tmp_path,
            build=lambda arch: Transformer(share_of(arch)),
            shard=lambda name, tensor, rank=rank: halved(name, tensor, rank),
        )
        for rank in (0, 1)
    ]
    x = torch.randn(5, arch.hidden_size)
    with torch.inference_mode():
        for i, layer in enumerate(model.model.layers):
            parts = [share.model.layers[i] for share in shares]
            torch.testing.assert_close(sum(part.mlp(x) for part in parts), layer.mlp(x))
            rows = [part.self_attn.qkv_proj(x).unflatten(-1, (4, -1)) for part in parts]
            heads = layer.self_attn.qkv_proj(x).unflatten(-1, (8, -1))
            order = [0, 1, 4, 6], [2, 3, 5, 7]  # two queries, a key and a value each
            for found, own in zip(rows, order, strict=True):
                torch.testing.assert_close(found, heads[:, own])


def test_a_module_is_handed_over_once_it_is_whole_and_may_be_exchanged(tmp_path, model, expected):
    write_config(tmp_path, model.arch)
    write_shards(tmp_path, hugging_face_tensors(model), save_file, "model", "safetensors")
    seen: Counter[str] = Counter()

    class Doubled(nn.Module):
        def __init__(self, linear: nn.Linear) -> None:
            super().__init__()
            self.linear = linear

        def forward(self, x):
            return self.linear(x) * 2

    def arrived(name: str, module: nn.Module) -> nn.Module | None:
        seen[name] += 1
        assert not any(weight.is_meta for weight in module.parameters(recurse=False))
        return Doubled(module) if name == "lm_head" else None

    loaded = load_model(tmp_path, arrived=arrived)
    assert set(seen) == {name.rpartition(".")[0] for name in model.state_dict()}
    assert set(seen.values()) == {1}
    torch.testing.assert_close(logits_of(loaded), expected * 2)


def test_a_network_with_other_parameters_is_filled_from_a_file_that_has_them(tmp_path, model, expected):
    class Rounded(nn.Module):
        """Whole numbers and a scale for each row."""

        def __init__(self, rows: int, columns: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(rows, columns, dtype=torch.int8), requires_grad=False)
            self.register_buffer("scale", torch.ones(rows, dtype=torch.float32))

        def forward(self, x):
            return x @ (self.weight * self.scale[:, None]).t().to(x.dtype)

    def build(arch):
        network = Transformer(arch)
        for layer in network.model.layers:
            layer.self_attn.qkv_proj = Rounded(*layer.self_attn.qkv_proj.weight.shape)
        return network

    tensors = dict(model.state_dict())
    for name in [name for name in tensors if "qkv_proj" in name]:
        scale = tensors[name].abs().amax(1) / 127
        tensors[name.replace("weight", "scale")] = scale
        tensors[name] = (tensors[name] / scale[:, None]).round().to(torch.int8)
    write_only(tmp_path, model, save_file, "model.safetensors", tensors)
    loaded = load_model(tmp_path, build=build, dtype=torch.float32)
    assert loaded.model.layers[0].self_attn.qkv_proj.weight.dtype == torch.int8
    torch.testing.assert_close(logits_of(loaded), expected, atol=0.5, rtol=0.1)
    assert "not known" in refusal(tmp_path)


def test_loading_imports_no_compiler(tmp_path, model):
    """Which takes seconds, and which many an operation on tensors without memory does."""
    write_folder(tmp_path / "theirs", model)
    write_only(tmp_path / "gpt-fast", model, torch.save, "model.pth", gpt_fast_tensors(model))
    program = (
        "import sys; from flambeau.llm.checkpoints.checkpoint import load_model; "
        f"load_model({str(tmp_path / 'theirs')!r}); load_model({str(tmp_path / 'gpt-fast')!r}); "
        "sys.exit('sympy' in sys.modules or 'torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


# ---- folders that look like a model ----


def test_adapter_is_not_served_as_its_base(tmp_path):
    write_checkpoint(tmp_path, "llama-2")
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base", "peft_type": "LORA"}')
    with pytest.raises(CheckpointError, match=r"an adapter of org/base .*lora_adapters"):
        load_model(tmp_path)


def test_head_that_differs_from_tied_embeddings_is_rejected(tmp_path):
    write_checkpoint(tmp_path, "smol-lm")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file)
    load_model(tmp_path)  # a copy is fine
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 1}, file)
    with pytest.raises(CheckpointError, match="that differs from the embeddings"):
        load_model(tmp_path)


def test_weights_that_are_newer_than_those_in_use_are_warned_about(tmp_path, caplog):
    write_checkpoint(tmp_path, "llama-2", max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    other = tmp_path / "model.safetensors"
    other.write_bytes(b"")
    os.utime(other, (0, 0))
    load_model(tmp_path)
    assert not caplog.records
    os.utime(other, (2**32, 2**32))
    load_model(tmp_path)
    assert "model.safetensors is newer than" in caplog.text


def test_a_tensor_in_two_shards_must_be_the_same(tmp_path):
    """Which one is read would depend on the names of the files."""
    write_checkpoint(tmp_path, "llama-2", max_shard_size="60KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    name, tensor = next(iter(load_file(shards[0]).items()))
    others = load_file(shards[-1])
    save_file({**others, name: tensor}, shards[-1])
    load_model(tmp_path)
    save_file({**others, name: tensor + 1}, shards[-1])
    with pytest.raises(CheckpointError, match=f"different tensors of the name {name}"):
        load_model(tmp_path)


def test_the_largest_modules_are_filled_first():
    """What is made on the way is as large as the module; parts of one module stay together in their order."""
    sizes = {"a.weight": 3, "b.weight": 4, "a.bias": 2, "head.weight": 9, "c.weight": 4}
    placements = [
        Placement(stored=None, cut=as_is, parameter=name, region=(), num_bytes=size) for name, size in sizes.items()
    ]
    found = [placement.parameter for placement in largest_first(placements)]
    assert found == ["head.weight", "a.weight", "a.bias", "b.weight", "c.weight"]
