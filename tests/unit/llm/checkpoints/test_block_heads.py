"""DFlash heads propose what Muse Glimmer's assistant of transformers does, and texts are those without them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from flambeau.llm.checkpoints.block_weights import block_layers, is_block_head, read_block_head
from flambeau.llm.checkpoints.checkpoint import read_architecture
from flambeau.llm.config import EngineConfig
from flambeau.llm.errors import CheckpointError, LLMError
from flambeau.llm.speculation.adaptive_k import AdaptiveK
from support.checkpoints import VOCAB_SIZE, random_weights, read_checkpoint, reference
from support.distributions import check_distribution
from support.head_engines import head_engine, run_with_head

CPU = torch.device("cpu")
LAYERS = [0, 1, 2]  # of the target, after which hidden states are read
MASK = VOCAB_SIZE - 1
SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 40}


@pytest.fixture(autouse=True)
def _always(monkeypatch):
    """Whether it pays is another matter."""
    monkeypatch.setattr(AdaptiveK, "num_ahead", lambda self, _: max(self._numbers))


def write_head(folder: Path, form: str):
    """A head in a published form, and the network of transformers."""
    import transformers

    kinds = ["full_attention", "full_attention" if form == "z-lab" else "sliding_attention"]
    config = transformers.MuseGlimmerAssistantConfig(
        **SIZES,
        hidden_size=32,
        num_hidden_layers=2,
        layer_types=kinds,
        sliding_window=9,
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
        block_size=6,
        mask_token_id=MASK,
        target_layer_ids=LAYERS,
    )
    torch.manual_seed(3)
    head = transformers.MuseGlimmerAssistantModel(config).eval().requires_grad_(False)
    random_weights(head)
    head.save_pretrained(folder)
    if form == "Muse":
        return head
    names = {"encoder.fc.": "fc.", "encoder.output_norm_enc.": "hidden_norm."}
    tensors = load_file(folder / "model.safetensors")
    for old, new in names.items():
        tensors = {name.replace(old, new): value for name, value in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    own = {"mask_token_id": MASK, "target_layer_ids": LAYERS}
    written = SIZES | {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", "block_size": 6}
    written |= {
        "sliding_window": 9,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "layer_types": kinds,
        "vocab_size": VOCAB_SIZE,
    }
    written |= {"rope_theta": 5000.0, "rms_norm_eps": config.rms_norm_eps, "dflash_config": own}
    (folder / "config.json").write_text(json.dumps(written))
    return head


def proposed(model, head, tokens: list[int], form: str) -> list[int]:
    """The block after these tokens."""
    from transformers.cache_utils import DFlashCache

    cache = DFlashCache(config=head.config)
    cache.activate_past_recording()
    cache.set_previous_accepted_tokens(len(tokens) - 1)
    ids = torch.tensor([tokens])
    states = model(ids[:, :-1], output_hidden_states=True).hidden_states  # the first one is that of the embeddings
    chosen = [states[i + 1] for i in LAYERS]
    keys = torch.arange(len(tokens) - 1 + head.config.block_size)
    distances = keys[-head.config.block_size :, None] - keys
    masks = {"full_attention": torch.ones_like(distances) > 0, "sliding_attention": (distances >= 0) & (distances < 9)}
    others = {"attention_mask": {kind: mask[None, None] for kind, mask in masks.items()}}
    block = torch.tensor([[tokens[-1], *[MASK] * (head.config.block_size - 1)]])
    found = head(
        noise_embeds=model.get_input_embeddings()(block),
        context_hidden_states=torch.cat(chosen, dim=-1),
        position_ids=torch.arange(len(tokens) - 1 + block.shape[1])[None],
        **(others if form == "z-lab with windows" else {"past_key_values": cache}),
    )
    return model.lm_head(found.last_hidden_state[:, 1:]).argmax(-1)[0].tolist()


@pytest.mark.parametrize(("form", "compiles"), [("z-lab", True), ("z-lab with windows", False), ("Muse", False)])
def test_proposals_are_those_of_transformers(form, compiles, tmp_path):
    """After prompts in chunks, prefixes, preemptions and rejected tokens."""
    reference("qwen-3", num_hidden_layers=4).save_pretrained(tmp_path / "target")
    model, head = read_checkpoint(tmp_path / "target"), write_head(tmp_path / "head", form)
    config = EngineConfig(
        device="cpu",
        num_blocks=24,
        block_size=4,
        max_num_seqs=4,
        max_step_tokens=40,
        speculate_k=7,
        compile=compiles,
    )
    found = run_with_head(tmp_path / "target", config, draft=str(tmp_path / "head"))
    assert found.kind == "dflash"
    assert found.num_preempted > 0
    assert max(len(ids) for _, ids in found.rounds) == 5
    assert len(found.rounds) > 10
    for tokens, ids in found.rounds:
        assert proposed(model, head, tokens, form)[: len(ids)] == ids


CHANGES = {
    "vocab_size": (150, "has 150 tokens and the model 101"),
    "hidden_size": (48, "hidden states of 48 numbers and the model of 32"),
    "block_size": (1, "needs block_size, a whole number from 2"),
    "num_target_layers": (36, "for a model of 36 layers, and this one has 4"),
    "is_neox_style": (False, "is_neox_style False"),
    "layer_types": (["sliding_attention"] * 3, "need a sliding_window, and 2 layers"),
    "dflash_config": ({"mask_token_id": 9, "use_swa": True}, "has use_swa, which is not supported"),
}


def test_a_head_of_another_model_is_refused(tmp_path):
    reference("qwen-3", num_hidden_layers=4).save_pretrained(tmp_path / "target")
    folder, arch = tmp_path / "head", read_architecture(tmp_path / "target")
    write_head(folder, "z-lab")
    assert is_block_head(folder)
    assert read_block_head(folder, arch).layers == (1, 2, 3)
    with pytest.raises(LLMError, match="reads the layers 0, 1, 2, and the model has 2"):
        read_block_head(folder, replace(arch, num_layers=2))
    given = json.loads((folder / "config.json").read_text())
    for key, (value, words) in CHANGES.items():
        (folder / "config.json").write_text(json.dumps({**given, key: value}))
        with pytest.raises((LLMError, CheckpointError), match=words):
            read_block_head(folder, arch)
    (folder / "config.json").write_text(json.dumps({**given, "dflash_config": {"mask_token_id": -1}}))
    with pytest.raises(CheckpointError, match="needs mask_token_id, a whole number from 0"):
        read_block_head(folder, arch)
    for is_causal, layers in ((True, {0, 1}), (False, set()), (None, {1})):
        kinds = {"layer_types": ["full_attention", "sliding_attention"], "is_causal": is_causal}
        (folder / "config.json").write_text(json.dumps(given | kinds))
        assert read_block_head(folder, arch).causal_layers == layers
    own = {"mask_token_id": MASK, "target_layer_ids": [0, 1]}
    (folder / "config.json").write_text(json.dumps({**given, "dflash_config": own}))
    with pytest.raises(LLMError, match="reads 96 numbers of a token, and 2 hidden states of the model have 64"):
        read_block_head(folder, arch)


def test_layers_that_no_file_names_are_spread():
    """As in z-lab's code."""
    assert block_layers(None, 5, 36) == (2, 10, 18, 26, 34)
    assert block_layers(None, 1, 36) == (19,)


def test_without_a_seed_the_distribution_is_the_targets(tmp_path):
    reference("qwen-3", num_hidden_layers=4).save_pretrained(tmp_path / "target")
    write_head(tmp_path / "head", "z-lab")
    config = EngineConfig(
        device="cpu", compile=False, num_blocks=700, block_size=4, max_num_seqs=64, max_step_tokens=1024
    )
    engine = head_engine(tmp_path / "target", replace(config, draft=str(tmp_path / "head"), speculate_k=2))
    check_distribution(engine, engine.model)
