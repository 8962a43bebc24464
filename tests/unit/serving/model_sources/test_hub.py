"""Names of the Hugging Face hub, and the files that are needed; the downloads are in the end-to-end tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from flambeau.config.value_types import read_model_path
from flambeau.serving.model_sources.hub import choose_files, read_hub_name


@pytest.mark.parametrize(
    ("path", "repo", "revision"),
    [
        ("acme/cls", "acme/cls", None),
        ("acme/cls-v1.5@main", "acme/cls-v1.5", "main"),
        ("acme/cls@refs/pr/4", "acme/cls", "refs/pr/4"),
        ("acme/cls@0123456789abcdef0123456789abcdef01234567", "acme/cls", "0123456789abcdef0123456789abcdef01234567"),
    ],
)
def test_names_of_the_hub(path, repo, revision):
    name = read_hub_name(Path(path))
    assert name is not None
    assert (name.repo, name.revision, str(name)) == (repo, revision, path)


@pytest.mark.parametrize(
    "path", ["acme", "/acme/cls", "../cls", "~/cls", "a/b/c", "store/model.mar", "a/net.pt", "a/h.py", "a/b@"]
)
def test_paths_are_not_names_of_the_hub(path):
    assert read_hub_name(Path(path)) is None


@pytest.mark.parametrize("path", ["./acme/cls", "acme/cls/"])
def test_spelled_as_a_path_it_is_no_name_of_the_hub(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert read_model_path(path) == tmp_path / "acme" / "cls"
    assert read_hub_name(read_model_path(path)) is None
    assert read_hub_name(read_model_path("acme/cls")) is not None


def test_misspelled_path_in_an_existing_folder_is_not_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    assert read_hub_name(Path("models/absent")) is None
    assert read_hub_name(Path("modles/absent")) is not None


CASES = {
    "safetensors before pickles, no code, no other frameworks": (
        ["config.json", "model.safetensors", "pytorch_model.bin", "tf_model.h5", "modeling_x.py", "tokenizer.json"],
        {"config.json", "model.safetensors", "tokenizer.json"},
    ),
    "parts instead of a second copy": (
        [
            "config.json",
            "consolidated.safetensors",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
            "original/params.json",
            "original/consolidated.00.pth",
        ],
        {
            "config.json",
            "model-00001-of-00002.safetensors",
            "model-00002-of-00002.safetensors",
            "model.safetensors.index.json",
            "original/params.json",
        },
    ),
    "one precision": (
        ["config.json", "model.safetensors", "model.fp16.safetensors"],
        {"config.json", "model.safetensors"},
    ),
    "pickles if there is nothing else": (
        ["config.json", "pytorch_model.bin", "training_args.bin", "vocab.txt", "rust_model.ot"],
        {"config.json", "pytorch_model.bin", "vocab.txt"},
    ),
    "sentence-transformers": (
        ["modules.json", "0_Transformer/config.json", "0_Transformer/pytorch_model.bin", "1_Pooling/config.json"],
        {"modules.json", "0_Transformer/config.json", "0_Transformer/pytorch_model.bin", "1_Pooling/config.json"},
    ),
    "ONNX if there is nothing else": (
        ["config.json", "onnx/model.onnx", "onnx/model_quantized.onnx"],
        {"config.json", "onnx/model.onnx"},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_needed_files(case):
    files, wanted = CASES[case]
    assert set(choose_files(files)) == wanted
