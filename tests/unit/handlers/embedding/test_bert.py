"""The encoder, against the same computed step by step."""

from __future__ import annotations

from pathlib import Path

import pytest

from flambeau.errors import HandlerError

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from safetensors.torch import save_file  # noqa: E402

from flambeau.handlers.embedding.bert import load_bert, read_config  # noqa: E402
from support.plain_bert import plain_forward  # noqa: E402
from support.sentence_models import CONFIG, bert_tensors  # noqa: E402

CPU = torch.device("cpu")


def load(tmp_path, tensors):
    save_file(tensors, tmp_path / "model.safetensors")
    return load_bert(tmp_path / "model.safetensors", read_config(CONFIG), CPU)


def test_encoder_equals_the_plain_computation(tmp_path):
    tensors = bert_tensors()
    ids = [2, 4, 7, 9, 3]
    expected = plain_forward(tensors, ids, num_layers=2, num_heads=4)
    with torch.inference_mode():
        got = load(tmp_path, tensors)(torch.tensor([ids]))[0]
    torch.testing.assert_close(got.double(), expected, atol=1e-5, rtol=1e-5)


def test_padding_changes_nothing(tmp_path):
    encoder = load(tmp_path, bert_tensors())
    short, long = [2, 4, 3], [2, 5, 6, 7, 8, 9, 3]
    ids = torch.tensor([short + [11] * 4, long])  # any token may stand for padding
    mask = torch.tensor([[True] * 3 + [False] * 4, [True] * 7])
    with torch.inference_mode():
        together = encoder(ids, mask)
        alone = encoder(torch.tensor([short]))
    torch.testing.assert_close(together[0, :3], alone[0], atol=1e-5, rtol=1e-5)


def test_other_spellings_of_the_same_weights_load(tmp_path):
    tensors = bert_tensors()
    ids = torch.tensor([[2, 4, 3]])
    with torch.inference_mode():
        expected = load(tmp_path, tensors)(ids)
        prefixed = {f"bert.{name}": tensor for name, tensor in tensors.items()}
        prefixed |= {"cls.predictions.bias": torch.zeros(3), "bert.pooler.dense.bias": torch.zeros(2)}
        prefixed["bert.embeddings.position_ids"] = torch.arange(12)[None]
        torch.testing.assert_close(load(tmp_path, prefixed)(ids), expected)
        halves = load(tmp_path, {name: tensor.half() for name, tensor in tensors.items()})(ids)
    assert halves.dtype == torch.float32
    torch.testing.assert_close(halves, expected, atol=0.02, rtol=0.02)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="this system does not tell what is mapped")
def test_weights_are_pages_of_the_file(tmp_path):
    encoder = load(tmp_path, bert_tensors())
    lines = Path("/proc/self/maps").read_text().splitlines()
    maps = [line.split() for line in lines if line.endswith("model.safetensors")]
    ranges = [[int(end, 16) for end in fields[0].split("-")] for fields in maps if str(tmp_path) in fields[-1]]
    for name, weight in encoder.named_parameters():
        assert any(low <= weight.data_ptr() < high for low, high in ranges), f"{name} was copied"


def test_tensors_that_do_not_fit_are_named(tmp_path):
    tensors = bert_tensors()
    del tensors["encoder.layer.1.output.dense.bias"]
    tensors["encoder.layer.2.output.dense.bias"] = torch.zeros(16)
    tensors["embeddings.word_embeddings.weight"] = torch.zeros(3, 16)
    with pytest.raises(HandlerError) as caught:
        load(tmp_path, tensors)
    assert str(caught.value) == (
        "model.safetensors does not fit config.json in 3 tensors: "
        "embeddings.word_embeddings.weight is [3, 16], not [16, 16]; "
        "encoder.layer.1.output.dense.bias is missing; encoder.layer.2.output.dense.bias is unknown"
    )


def test_broken_file_is_named(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"\x10\x00\x00\x00")
    with pytest.raises(HandlerError, match=r"model\.safetensors could not be loaded as safetensors"):
        load_bert(tmp_path / "model.safetensors", read_config(CONFIG), CPU)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "roberta"}, "a roberta model .* Export the model to ONNX"),
        ({"position_embedding_type": "relative_key"}, "relative_key positions"),
        ({"hidden_act": "swish"}, "activation 'swish'"),
    ],
)
def test_other_models_are_rejected(change, reason):
    with pytest.raises(HandlerError, match=reason):
        read_config({**CONFIG, **change})


def test_incomplete_config_is_rejected():
    with pytest.raises(HandlerError, match="vocab_size"):
        read_config({name: value for name, value in CONFIG.items() if name != "vocab_size"})
