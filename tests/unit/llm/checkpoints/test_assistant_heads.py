"""Gemma 4's drafters propose what those of transformers do, and texts are those without them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flambeau.llm.checkpoints.assistant_weights import is_assistant, read_assistant
from flambeau.llm.checkpoints.checkpoint import read_architecture
from flambeau.llm.config import EngineConfig
from flambeau.llm.errors import CheckpointError, LLMError
from flambeau.llm.proposers import check_head
from flambeau.llm.speculation.adaptive_k import AdaptiveK
from support.checkpoints import GEMMA_4_HEADS, random_weights, read_checkpoint, reference
from support.distributions import check_distribution
from support.head_engines import head_engine, run_with_head

CPU = torch.device("cpu")
SIZE = 105  # of the vocabulary, in clusters of 7
# The target, its drafter's class, and what the heads of its keys need.
FAMILIES = {
    "gemma-4": ("Gemma4", {"use_ordered_embeddings": True}, {}),  # as E2B
    "gemma-4-moe": (  # as 26B-A4B
        "Gemma4",
        {},
        {"attention_k_eq_v": True, "num_key_value_heads": 4, "num_global_key_value_heads": 2},
    ),
    "gemma-4-unified": ("Gemma4Unified", {}, {}),  # as 12B
}


@pytest.fixture(autouse=True)
def _always(monkeypatch):
    """Whether it pays is another matter."""
    monkeypatch.setattr(AdaptiveK, "num_ahead", lambda self, _: max(self._numbers))


@pytest.fixture(autouse=True)
def drafters_can_be_made(monkeypatch):
    """All layers of a drafter use the keys of its target. transformers 5.23.0 refuses that, and stores no such keys."""
    import transformers

    for family, *_ in FAMILIES.values():
        config = getattr(transformers, f"{family}TextConfig")
        if hasattr(config, "kv_sharing_modes"):
            monkeypatch.setattr(config, "kv_sharing_modes", property(sharing_modes))


def sharing_modes(config):
    """The last layer of a kind that has keys of its own stores them."""
    kinds, num_own = config.layer_types, config.num_hidden_layers - config.num_kv_shared_layers
    last = {kind: i for i, kind in enumerate(kinds[:num_own])}
    return ["reuse" if i >= num_own else "store" if last[kind] == i else None for i, kind in enumerate(kinds)]


def drafter(state_size: int, family: str, options: dict[str, object], heads: dict[str, object]):
    """A random drafter of transformers for a model with hidden states of this size."""
    import transformers

    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    text = {**GEMMA_4_HEADS, "vocab_size": SIZE, "num_attention_heads": 4, "num_key_value_heads": 2}
    text |= {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 3, "layer_types": kinds}
    text |= {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, **heads}
    config = getattr(transformers, f"{family}AssistantConfig")(
        text_config=getattr(transformers, f"{family}TextConfig")(**text),
        backbone_hidden_size=state_size,
        **{"num_centroids": SIZE // 7, "centroid_intermediate_top_k": 5, **options},
    )
    torch.manual_seed(8)
    made = getattr(transformers, f"{family}AssistantForCausalLM")(config).eval().requires_grad_(False)
    random_weights(made)
    made.tie_weights()
    if made.masked_embedding is not None:
        made.masked_embedding.token_ordering.copy_(torch.randperm(SIZE))
    return made


def write(folder: Path, kind: str):
    """Both checkpoints, and both networks of transformers."""
    more = {"vocab_size_per_layer_input": SIZE} if kind == "gemma-4" else {}
    reference(kind, vocab_size=SIZE, **more).save_pretrained(folder / "target")
    model = read_checkpoint(folder / "target")
    head = drafter(model.config.get_text_config().hidden_size, *FAMILIES[kind])
    head.save_pretrained(folder / "drafter")
    return model, head


def proposed(model, head, tokens: list[int], number: int) -> list[int]:
    """What assisted generation of transformers proposes after a prompt and its first token."""
    from transformers import GenerationConfig
    from transformers.generation.candidate_generator import SinglePositionMultiTokenCandidateGenerator

    head.generation_config.num_assistant_tokens = number
    generator = SinglePositionMultiTokenCandidateGenerator(
        head, model.get_input_embeddings(), GenerationConfig(max_length=500)
    )
    ids = torch.tensor([tokens])
    output = model(ids[:, :-1], output_hidden_states=True, return_shared_kv_states=True)
    found, _ = generator.get_candidates(ids, {}, output, False, 0)
    return found[0, len(tokens) :].tolist()


@pytest.mark.parametrize(("kind", "compiles"), [("gemma-4", True), ("gemma-4-moe", True), ("gemma-4-unified", False)])
def test_proposals_are_those_of_transformers(kind, compiles, tmp_path):
    """After prompts, prefixes, preemptions, rejected tokens and windows; texts are those without the drafter."""
    model, head = write(tmp_path, kind)
    config = EngineConfig(device="cpu", num_blocks=24, block_size=4, max_num_seqs=4, speculate_k=4, compile=compiles)
    found = run_with_head(tmp_path / "target", config, draft=str(tmp_path / "drafter"))
    assert found.kind == "assistant"
    assert found.num_preempted > 0
    assert len(found.rounds) > 10
    for tokens, ids in found.rounds:
        assert proposed(model, head, tokens, len(ids)) == ids


def test_every_token_is_accepted_where_both_compute_the_same(tmp_path):
    """Layers that add nothing, and a drafter that reads the last token's embedding only."""
    model = reference("gemma-4-unified", vocab_size=SIZE)
    size = model.config.get_text_config().hidden_size
    head = drafter(size, "Gemma4Unified", {}, {"hidden_size": size})
    for name, parameter in (*model.named_parameters(), *head.named_parameters()):
        if name.endswith(("post_attention_layernorm.weight", "post_feedforward_layernorm.weight")):
            parameter.data.zero_()
        if name.endswith("layer_scalar"):
            parameter.data.fill_(1.0)
    head.pre_projection.weight.data = torch.cat((torch.eye(size), torch.zeros(size, size)), dim=1)
    head.model.norm.weight.data.copy_(model.model.norm.weight)
    head.lm_head.weight.data.copy_(model.lm_head.weight)
    model.save_pretrained(tmp_path / "target")
    head.save_pretrained(tmp_path / "drafter")
    config = EngineConfig(device="cpu", compile=False, num_blocks=40, draft=str(tmp_path / "drafter"), speculate_k=4)
    engine = head_engine(tmp_path / "target", config)
    for options in ({"temperature": 0.0}, {"temperature": 0.9, "seed": 3}, {"temperature": 0.9}):
        found = engine.generate([[5, 6, 7], [40, 41]], max_tokens=11, ignore_eos=True, **options)
        counts = [each.counts for each in found]
        assert [(each.num_accepted, each.num_drafted) for each in counts] == [(8, 8)] * 2


CHANGES = {
    "vocab_size": (150, "has 150 tokens and the model 105"),
    "head_dim": (8, "keys of 2 heads of 8 numbers in layers with a window, and the model has 2 of 16"),
    "global_head_dim": (8, "keys of 2 heads of 8 numbers in layers without a window, and the model has 2 of 32"),
    "sliding_window": (5, "a window of 5 tokens, and the model one of 9"),
    "enable_moe_block": (True, "enable_moe_block True"),
    "backbone_hidden_size": (16, "hidden states of 16 numbers, and the model's have 32"),
    "centroid_intermediate_top_k": (0, "needs centroid_intermediate_top_k, a number from 1"),
    "num_centroids": (4, "4 clusters of 105 tokens, which must be equally large"),
}


def test_a_drafter_of_another_model_is_refused(tmp_path):
    reference("gemma-4-unified", vocab_size=SIZE).save_pretrained(tmp_path / "target")
    folder = tmp_path / "drafter"
    drafter(32, "Gemma4Unified", {"use_ordered_embeddings": True}, {}).save_pretrained(folder)
    arch = read_architecture(tmp_path / "target")
    assert is_assistant(folder)
    assert read_assistant(folder, arch).num_clusters == 15
    given = json.loads((folder / "config.json").read_text())
    given["text_config"].pop("per_layer_config", None)
    given["text_config"]["global_head_dim"] = 32
    for key, (value, words) in CHANGES.items():
        place = given if key in given else given["text_config"]
        changed = {**place, key: value}
        whole = changed if place is given else given | {"text_config": changed}
        (folder / "config.json").write_text(json.dumps(whole))
        with pytest.raises((LLMError, CheckpointError), match=words):
            read_assistant(folder, arch)
    (folder / "config.json").write_text(json.dumps(given))
    with pytest.raises(LLMError, match="reads the keys and values of a Gemma 4, and this model is none"):
        read_assistant(folder, replace(arch, scales_layers=False))
    with pytest.raises(LLMError, match="reads keys and values of all heads, which 2 ranks have in parts"):
        check_head(EngineConfig(draft=str(folder), tensor_parallel_size=2), arch)


def test_without_a_seed_the_distribution_is_the_targets(tmp_path):
    write(tmp_path, "gemma-4")
    config = EngineConfig(
        device="cpu", compile=False, num_blocks=700, block_size=4, max_num_seqs=64, max_step_tokens=1024
    )
    engine = head_engine(tmp_path / "target", replace(config, draft=str(tmp_path / "drafter"), speculate_k=2))
    check_distribution(engine, engine.model)
