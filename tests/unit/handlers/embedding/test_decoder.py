"""Decoders embed as transformers does on the same weights, computed by the engine's network."""

from __future__ import annotations

import json

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from flambeau.handlers.embedding.decoder import DecoderEncoder  # noqa: E402
from flambeau.handlers.embedding.encoders import PretrainedEncoder, load_encoder  # noqa: E402
from flambeau.handlers.embedding.sentence_model import read_folder  # noqa: E402
from support.checkpoints import write_checkpoint  # noqa: E402
from support.sentence_models import save_tokenizer, write_documents  # noqa: E402

IDS = np.array([[2, 9, 30, 12, 3, 40, 41, 42, 43, 44, 45, 46], [2, 40, 3, *[0] * 9]])
MASK = np.arange(12) < np.array([[12], [3]])


def sentence_folder(folder, kind, mode="pooling_mode_lasttoken"):
    write_checkpoint(folder, kind)
    save_tokenizer(folder)
    write_documents(folder, {"1_Pooling/config": {mode: True}})
    return folder


def expected(folder, row):
    network = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return network(torch.tensor([row])).last_hidden_state[0].numpy()


@pytest.mark.parametrize("kind", ["qwen-3", "qwen-2", "mistral", "llama-3.1"])
def test_the_last_token_is_that_of_transformers(tmp_path, kind):
    encoder = load_encoder(read_folder(sentence_folder(tmp_path, kind)), None)
    assert isinstance(encoder, DecoderEncoder)
    found = encoder.embed(IDS, MASK)
    for row, mask, vector in zip(IDS, MASK, found, strict=True):
        assert np.abs(vector - expected(tmp_path, row[mask].tolist())[-1]).max() < 1e-4


def test_files_without_an_output_layer_are_enough(tmp_path):
    model = write_checkpoint(tmp_path / "whole", "qwen-2")
    folder = sentence_folder(tmp_path / "headless", "qwen-2", "pooling_mode_mean_tokens")
    model.model.save_pretrained(folder)  # without the output layer, whose weights are not the embeddings
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["Qwen2Model"]
    encoder = load_encoder(read_folder(folder), None)
    assert isinstance(encoder, DecoderEncoder)
    found = encoder.embed(IDS, MASK)[0]
    assert np.abs(found - expected(folder, IDS[0].tolist()).mean(0)).max() < 1e-4


@pytest.mark.parametrize("change", [{"is_causal": False}, {"auto_map": {"AutoModel": "x.Y"}}, {"some_new_key": 3}])
def test_what_the_engine_may_compute_otherwise_is_left_to_transformers(tmp_path, change):
    folder = sentence_folder(tmp_path, "qwen-3")
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    assert isinstance(load_encoder(read_folder(folder), None), PretrainedEncoder)
