"""Sentence models other than BERT are built by transformers."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from flambeau.handlers.embedding.encoders import PretrainedEncoder, load_encoder  # noqa: E402
from flambeau.handlers.embedding.sentence_model import normalize, pool, read_folder  # noqa: E402
from support import pretrained_models  # noqa: E402
from support.sentence_models import write_documents  # noqa: E402

IDS = np.array([[2, 9, 30, 12, 3], [2, 40, 3, 1, 1]])
MASK = IDS != 1


@pytest.mark.parametrize(("suffix", "mode"), [("safetensors", "mean"), ("bin", "cls"), ("safetensors", "last")])
def test_vectors_are_those_of_the_network_without_padding(tmp_path, suffix, mode):
    folder = pretrained_models.save_roberta(tmp_path)
    key = {"mean": "pooling_mode_mean_tokens", "cls": "pooling_mode_cls_token", "last": "pooling_mode_lasttoken"}[mode]
    write_documents(folder, {"1_Pooling/config": {key: True}})
    if suffix == "bin":
        from safetensors.torch import load_file

        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    model = read_folder(folder)
    assert model.max_seq_length == 62  # two positions before the first are never used
    encoder = load_encoder(model, None)
    assert isinstance(encoder, PretrainedEncoder)
    found = encoder.embed(IDS, MASK)
    network = transformers.RobertaModel.from_pretrained(folder, add_pooling_layer=False).eval()
    for row, vector in zip(IDS, found, strict=True):
        own = torch.tensor([[token for token in row if token != 1]])
        with torch.inference_mode():
            hidden = network(own).last_hidden_state
        wanted = {"mean": hidden.mean(1), "cls": hidden[:, 0], "last": hidden[:, -1]}[mode][0]
        assert np.abs(vector - wanted.numpy()).max() < 1e-5
    assert np.allclose(np.linalg.norm(normalize(found), axis=1), 1)


def test_last_token_is_pooled_alike_in_numpy_and_torch():
    hidden = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    mask = np.array([[1, 1, 0], [1, 1, 1]], np.float32)
    [found] = pool(hidden, mask, ["last"])
    assert found.tolist() == [hidden[0, 1].tolist(), hidden[1, 2].tolist()]
    assert pool(torch.from_numpy(hidden), torch.from_numpy(mask), ["last"])[0].tolist() == found.tolist()
