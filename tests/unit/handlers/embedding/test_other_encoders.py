"""Sentence models other than BERT are built by transformers."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from flambeau.errors import HandlerError  # noqa: E402
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


SIZE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 60}
NOMIC = {
    "model_type": "nomic_bert",
    "auto_map": {"AutoModel": "nomic-ai/nomic-bert-2048--modeling_hf_nomic_bert.NomicBertModel"},
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_inner": 48,
    "n_positions": 128,
    "vocab_size": 60,
    "rotary_emb_base": 500,
    "rotary_emb_fraction": 1.0,
    "activation_function": "swiglu",
    "layer_norm_epsilon": 1e-6,
}
NEW = {
    **SIZE,
    "model_type": "new",
    "architectures": ["NewModel"],
    "rope_theta": 20000.0,
    "max_position_embeddings": 128,
}
NEW |= {
    "rope_scaling": {"type": "ntk", "factor": 8.0},
    "position_embedding_type": "rope",
    "layer_norm_type": "layer_norm",
}


def published_folder(folder, network, config):
    network.save_pretrained(folder)
    pretrained_models.wordpiece(folder)
    write_documents(folder, {"config": config, "1_Pooling/config": {"pooling_mode_cls_token": True}})
    return folder


def check_vectors(folder, network):
    encoder = load_encoder(read_folder(folder), None)
    assert isinstance(encoder, PretrainedEncoder)
    found = encoder.embed(IDS, MASK)
    for row, vector in zip(IDS, found, strict=True):
        with torch.inference_mode():
            wanted = network(torch.tensor([[token for token in row if token != 1]])).last_hidden_state[0, 0]
        assert np.abs(vector - wanted.numpy()).max() < 1e-5


def test_nomic_has_the_sizes_and_positions_of_its_own_config(tmp_path, caplog):
    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": 500.0}
    config = transformers.NomicBertConfig(**SIZE, rope_parameters=rope, layer_norm_eps=1e-6, initializer_range=0.3)
    network = transformers.NomicBertModel(config).eval()
    folder = published_folder(tmp_path, network, NOMIC)
    check_vectors(folder, network)
    assert "code of the repository (nomic-ai/nomic-bert-2048" in caplog.text
    assert read_folder(folder).max_seq_length == 64  # of the tokenizer
    write_documents(folder, {"config": {**NOMIC, "rotary_scaling_factor": 2, "max_trained_positions": 16}})
    assert read_folder(folder).max_seq_length == 16
    write_documents(folder, {"config": {**NOMIC, "num_experts": 8}})
    with pytest.raises(HandlerError, match="num_experts: 8"):
        load_encoder(read_folder(folder), None)


def test_the_new_model_of_alibaba_is_gte_with_scaled_frequencies(tmp_path):
    torch.manual_seed(0)
    network = transformers.GteModel(transformers.GteConfig(**SIZE, pad_token_id=1, initializer_range=0.3)).eval()
    powers = torch.arange(0, 8, 2) / 8  # of heads with 8 numbers
    network.rotary_emb.inv_freq = 1 / (20000.0 * 8) ** powers / 8 ** (2 / 8)
    check_vectors(published_folder(tmp_path, network, {**NEW, "pad_token_id": 1}), network)
    for change, reason in (
        ({"rope_scaling": {"type": "ntk", "factor": 8.0, "mixed_b": 0.6}}, "rope_scaling"),
        ({"layer_norm_type": "rms_norm"}, "layer_norm_type: 'rms_norm'"),
    ):
        write_documents(tmp_path, {"config": {**NEW, **change}})
        with pytest.raises(HandlerError, match=reason):
            load_encoder(read_folder(tmp_path), None)
