"""EAGLE-3 heads in the forms that are published for other networks than Llama: a dense layer of Llama for each."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from flambeau.llm.checkpoints.checkpoint import load_model
from flambeau.llm.checkpoints.eagle_weights import eagle_architecture, read_eagle
from flambeau.llm.config import EngineConfig
from flambeau.llm.models.draft_heads import HeadSettings
from flambeau.llm.models.head_kinds import make_head
from flambeau.llm.speculation.adaptive_k import AdaptiveK
from support.checkpoints import VOCAB_SIZE, reference
from support.head_engines import run_with_head
from support.tiny_heads import published_eagle

CPU = torch.device("cpu")
HEAD = {
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": VOCAB_SIZE,
}
# What the files of a family say beside that; the names of layers mean their outputs in eagle_config, else their inputs.
SPECFORGE = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 40, "pad_token_id": 0}
FORMS = {
    "gpt-oss": SPECFORGE
    | {"model_type": "gpt_oss", "num_local_experts": 16, "experts_per_token": 4}
    | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True}},
    "llama-4": {  # as in the speculators package
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.1.0",
        "speculators_config": {"algorithm": "eagle3", "verifier": {"architectures": ["Llama4ForCausalLM"]}},
        "draft_vocab_size": 40,
        "target_hidden_size": 32,
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    },
    "qwen-3-moe": SPECFORGE
    | {
        "fc_norm": True,
        "norm_output": True,
        "model_type": "llama",
        "max_window_layers": 48,
        "use_sliding_window": False,
    }
    | {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]},
    "deepseek-v3": SPECFORGE | {"model_type": "llama", "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}},
}


@pytest.mark.parametrize("kind", FORMS)
def test_texts_are_those_without_the_head(kind, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(AdaptiveK, "num_ahead", lambda self, _: max(self._numbers))
    reference(kind, **({} if kind == "llama-4" else {"num_hidden_layers": 4})).save_pretrained(tmp_path / "target")
    target = load_model(tmp_path / "target", device=CPU, dtype=torch.float32)
    form = FORMS[kind]
    config = form | {"transformer_layer_config": HEAD} if "speculators_version" in form else HEAD | form
    settings = HeadSettings(
        kind="eagle3",
        arch=eagle_architecture(config, target.arch),
        layers=(1, 2, 3),
        state_size=32,
        draft_vocab_size=40,
        norms_each=bool(form.get("fc_norm")),
        norms_output=bool(form.get("norm_output")),
    )
    with torch.random.fork_rng():
        torch.manual_seed(2)
        head = make_head(settings).requires_grad_(False)
        for parameter in head.parameters():
            torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.15)
    head.target_ids_D = torch.arange(40) * 2
    folder = tmp_path / "head"
    folder.mkdir()
    save_file({name: x.clone().contiguous() for name, x in published_eagle(head).items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    config = EngineConfig(device="cpu", num_blocks=60, block_size=4, max_num_seqs=4, speculate_k=3)
    found = run_with_head(tmp_path / "target", config, draft=str(folder))
    assert found.kind == "eagle3"
    assert len(found.rounds) > 10
    read = read_eagle(folder, target.arch)
    assert read == replace(settings, arch=read.arch)
