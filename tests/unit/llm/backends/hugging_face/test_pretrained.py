"""Checkpoints that transformers would read wrongly, or not at all, are refused by name."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from flambeau.llm.backends.hugging_face.pretrained import UNLIMITED, model_class, read_limits, read_pretrained
from flambeau.llm.config import EngineConfig
from flambeau.llm.errors import CheckpointError
from flambeau.llm.loader import load_engine, load_transformers, named_reason
from flambeau.llm.transformers_package import import_transformers
from support.checkpoints import reference
from support.other_networks import VOCAB_SIZE, load_other, write_other
from support.tokenizer_files import byte_level_json, write_json_tokenizer

CPU = {"device": torch.device("cpu"), "dtype": torch.float32, "trusts_code": False}


@pytest.fixture
def arcee(tmp_path):
    write_other(tmp_path, "Arcee")
    return tmp_path


def test_weights_that_are_missing_are_not_made_up(arcee):
    weights = load_file(arcee / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, arcee / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.up_proj"):
        read_pretrained(arcee, **CPU)


def test_weights_without_a_place_are_named_in_a_warning(arcee, caplog):
    weights = load_file(arcee / "model.safetensors")
    save_file({**weights, "model.layers.7.extra": torch.zeros(2)}, arcee / "model.safetensors", {"format": "pt"})
    read_pretrained(arcee, **CPU)
    assert "model.layers.7.extra" in caplog.text


def test_a_shape_of_another_configuration_is_refused(arcee):
    config = json.loads((arcee / "config.json").read_text())
    (arcee / "config.json").write_text(json.dumps({**config, "intermediate_size": 64}))
    with pytest.raises(CheckpointError):
        read_pretrained(arcee, **CPU)


def test_limits_come_from_config_and_generation_config(arcee, tmp_path):
    (arcee / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    limits = read_limits(arcee, trusts_code=False)
    assert (limits.max_length, limits.eos_ids, limits.vocab_size) == (128, (2, 7), VOCAB_SIZE)
    assert limits.dtype == "float32"


def test_a_state_has_no_length(tmp_path):
    write_other(tmp_path, "Mamba2")
    assert read_limits(tmp_path, trusts_code=False).max_length == UNLIMITED


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"architectures": ["T5ForConditionalGeneration"], "is_encoder_decoder": True}, "token by token"),
        ({"architectures": ["BertModel"]}, "token by token"),
        ({"architectures": ["UnheardOfForCausalLM"]}, "UnheardOfForCausalLM"),
        ({"model_type": "unheard_of"}, "unheard_of"),
        ({"architectures": ["JambaForCausalLM"], "model_type": "bamba"}, "model_type"),
        ({"architectures": ["Own"], "auto_map": {"AutoModelForCausalLM": "own.Own"}}, "flambeau serve FOLDER"),
    ],
)
def test_what_writes_no_text_is_refused(config, words):
    import transformers

    with pytest.raises(CheckpointError, match=words):
        model_class(transformers, config, trusts_code=False)


def test_a_network_of_another_task_is_named_once():
    import transformers

    for reason, start in (
        ("BertModel is not supported; …", "BertModel is not a"),
        ("no such norm; …", "no such norm; Ber"),
    ):
        with pytest.raises(CheckpointError) as caught, named_reason(reason):
            model_class(transformers, {"architectures": ["BertModel"]}, trusts_code=False)
        assert str(caught.value).startswith(start)
    assert "`flambeau serve FOLDER` instead of `flambeau llm serve`" in str(caught.value)


def test_a_network_that_looks_ahead_is_refused(tmp_path):
    from transformers import BertConfig, BertLMHeadModel

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    network = BertLMHeadModel(BertConfig(vocab_size=VOCAB_SIZE, **sizes))
    for parameter in network.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    network.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="BertLMHeadModel"):
        load_other(tmp_path)


def test_without_the_package_the_error_names_both_ways(arcee, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"Arcee is too new; .*flambeau\[transformers\]"):
        load_transformers(arcee, EngineConfig(), torch.device("cpu"), "Arcee is too new; supported are others")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quantization_config": {"quant_method": "unheard_of"}}, "'unheard_of' are not supported: use the original"),
        (
            {"architectures": ["MiniCPMForCausalLM"], "model_type": "minicpm", "sparse_config": {"a": 1}},
            "sparse_config",
        ),
    ],
)
def test_the_reason_is_named_where_transformers_cannot_help(tmp_path, changes, words):
    """Neither network can be loaded: what the engine's own does not support is the more useful half of the message."""
    reference("mistral").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    write_json_tokenizer(tmp_path, byte_level_json())
    with pytest.raises(CheckpointError, match=words):
        load_engine(tmp_path)


OWN_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own_llama"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_code_of_a_checkpoint_runs_only_if_it_is_trusted(tmp_path, monkeypatch):
    from transformers import LlamaConfig, LlamaForCausalLM

    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "own"
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    LlamaForCausalLM(LlamaConfig(vocab_size=VOCAB_SIZE, **sizes)).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    names = {"AutoConfig": "own_code.OwnConfig", "AutoModelForCausalLM": "own_code.OwnForCausalLM"}
    config |= {"architectures": ["OwnForCausalLM"], "model_type": "own_llama", "auto_map": names}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "own_code.py").write_text(OWN_CODE)
    with pytest.raises(CheckpointError, match="trust_remote_code"):
        load_other(folder)
    loaded = load_other(folder, trust_remote_code=True)
    assert type(loaded.backend.model).__name__ == "OwnForCausalLM"


def test_a_folder_without_weights_is_refused_before_transformers_is_imported(tmp_path, caplog, monkeypatch):
    """The import takes many seconds, of which a line of the log tells first."""
    monkeypatch.setattr(
        "flambeau.llm.backends.hugging_face.pretrained.import_transformers", lambda: pytest.fail("slow")
    )
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GraniteSpeechForConditionalGeneration"]}))
    tokenizer = write_json_tokenizer(tmp_path, byte_level_json())
    with (
        caplog.at_level("INFO"),
        pytest.raises(CheckpointError, match=r"GraniteSpeech.* has no weights"),
    ):
        load_engine(tmp_path, tokenizer=str(tokenizer))
    assert "GraniteSpeechForConditionalGeneration is not supported, because sounds switch on an adapter" in caplog.text
    assert "transformers, which may have it, is imported" in caplog.text


def test_a_torchvision_that_does_not_fit_is_named_with_the_remedy(monkeypatch):
    def import_module(name):
        raise RuntimeError("operator torchvision::nms does not exist")

    monkeypatch.setattr("flambeau.llm.transformers_package.importlib", SimpleNamespace(import_module=import_module))
    with pytest.raises(CheckpointError, match=r"torchvision::nms does not exist; .*`flambeau doctor`"):
        import_transformers()


def test_a_network_that_needs_more_than_tokens_is_refused_with_the_remedy(tmp_path):
    import transformers

    sizes = {"vocab_size": VOCAB_SIZE, "d_model": 32, "n_layer": 1, "n_head": 2, "d_inner": 32}
    transformers.XLNetLMHeadModel(transformers.XLNetConfig(**sizes)).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"needs more than the tokens of a text.*use a checkpoint of another"):
        load_other(tmp_path)
