"""Adapters of packed weights on several ranks compute what peft computes with the weights that these stand for."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from flambeau.llm import network_loader
from flambeau.llm.adapters.adapter_store import AdapterStore
from flambeau.llm.adapters.lora_weights import AdapterTarget
from flambeau.llm.backends.cpu.packed_linear import PackedLinear
from flambeau.llm.backends.eager import EagerBackend
from flambeau.llm.checkpoints.checkpoint import read_architecture
from flambeau.llm.config import EngineConfig
from flambeau.llm.executor.shard import Shard, local_architecture
from flambeau.llm.executor.tensor_parallel import TensorParallelGroup, sum_over_ranks
from flambeau.llm.models.embeddings import NarrowEmbedding
from flambeau.llm.models.transformer import Transformer
from support.adapters import read_peft_adapter, write_peft_adapter
from support.checkpoints import reference
from support.cpu_kernels import need_cpu_kernels
from support.llm_steps import room
from support.packed_files import write_kind
from support.ranks import run_as_threads
from unit.llm.adapters.test_peft_kinds import EVERYTHING, EXPERTS, LINEARS, PROMPTS, expected_logits, logits_of
from unit.llm.executor import test_group_ranks

pytest.importorskip("peft")

SIZES = {**test_group_ranks.FOUR_HEADS, "hidden_size": 256, "intermediate_size": 768}
CPU = torch.device("cpu")
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "dora": ("qwen2", {"target_modules": EVERYTHING, "use_dora": True}),
    "whole layers": ("qwen2", {"target_modules": ["q_proj"], "modules_to_save": ["k_proj", "down_proj", "lm_head"]}),
    "biases": ("qwen2", {"target_modules": LINEARS, "bias": "all"}),
    "tokens": ("qwen2", {"target_modules": ["q_proj"], "trainable_token_indices": [5, 40, 3, 41]}),
    "experts": ("qwen3moe", {"target_modules": ["q_proj", "o_proj"], "target_parameters": EXPERTS}),
}
# Weights that are off by 6e-8 of their size, a rounding of float32, change these logits by 1e-4 in float64, too.
OWN_BOUND = {"dora": 4e-4}


def write_files(folder: Path, architecture: str) -> tuple[Path, Path]:
    """A GGUF file, and a folder with the weights that it stands for."""
    if architecture == "qwen2":
        model, values = reference("qwen-2", **SIZES), {}
    else:
        sizes = {**test_group_ranks.EXPERT_SIZES, **test_group_ranks.FOUR_HEADS}
        model, values = reference("qwen-3-moe-normalized", **sizes), test_group_ranks.EXPERTS
    path, _ = test_group_ranks.written(folder, model, architecture, test_group_ranks.mixed, values)
    model.save_pretrained(folder / "plain")
    return path, folder / "plain"


def adapted(part: Transformer, shard: Shard, adapter: Path) -> list[torch.Tensor]:
    """The logits of one rank with the adapter."""
    local, ranks = local_architecture(shard.arch, shard.size), TensorParallelGroup(shard.rank, shard.size, None)  # type: ignore[arg-type]
    target = AdapterTarget(arch=shard.arch, local=local, shard=shard, device=CPU, dtype=torch.float32)
    store = AdapterStore(target, part)
    store.load(1, adapter, partial(sum_over_ranks, ranks=ranks))
    return logits_of(EagerBackend(part, room(part, len(PROMPTS)), adapters=store), [1] * 4)


@pytest.mark.parametrize("kind", KINDS)
def test_packed_weights_of_gguf_files(kind, tmp_path, monkeypatch):
    architecture, options = KINDS[kind]
    path, plain = write_files(tmp_path, architecture)
    adapter = write_peft_adapter(plain, tmp_path / "adapter", **options)
    expected = expected_logits(read_peft_adapter(plain, adapter))
    arch = read_architecture(path)
    for size, keeps in ((2, test_group_ranks.CPU), (4, test_group_ranks.GPU)):
        parts = test_group_ranks.parts_of(path, size, keeps)

        def compute(rank: int, parts: list[Transformer] = parts) -> list[torch.Tensor]:
            return adapted(parts[rank], Shard(arch, rank, len(parts)), adapter)

        for found in run_as_threads(monkeypatch, compute, size):
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, atol=OWN_BOUND.get(kind, 1e-4), rtol=0)


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj", "embed_tokens"]},
        {"target_modules": ["q_proj", "lm_head"], "use_dora": True},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
        {"target_modules": ["q_proj"], "trainable_token_indices": [5, 40, 41]},
    ],
)
def test_tied_embeddings_that_are_packed_for_the_last_layer(options, tmp_path, monkeypatch):
    need_cpu_kernels()
    folder = write_kind(tmp_path / "model", "bfloat16", "tied")
    adapter = write_peft_adapter(folder, tmp_path / "adapter", **options)
    expected = expected_logits(read_peft_adapter(folder, adapter))
    arch = read_architecture(folder)
    monkeypatch.setattr(network_loader, "minimum_of_ranks", lambda number, ranks: number)
    config = EngineConfig(device="cpu", num_blocks=8, max_num_seqs=2, tensor_parallel_size=2)
    parts = [
        network_loader.load_network(folder, config, CPU, TensorParallelGroup(rank, 2, None)).backend.model  # type: ignore[arg-type]
        for rank in range(2)
    ]
    for part in parts:
        assert isinstance(part, Transformer)
        assert isinstance(part.model.embed_tokens, NarrowEmbedding)
        assert isinstance(part.lm_head, PackedLinear)

    def compute(rank: int) -> list[torch.Tensor]:
        return adapted(parts[rank], Shard(arch, rank, 2), adapter)  # type: ignore[arg-type]

    for found in run_as_threads(monkeypatch, compute):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
