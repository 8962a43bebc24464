"""Every kind of LoRA adapter that peft writes computes what peft computes: mixed with others in a batch, and merged."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from flambeau.llm.adapters.adapter_store import AdapterStore
from flambeau.llm.adapters.lora_weights import AdapterTarget
from flambeau.llm.adapters.merge import MergeOnLoad
from flambeau.llm.backends.cpu.backend import CpuBackend
from flambeau.llm.backends.cpu.network import can_compute
from flambeau.llm.backends.eager import EagerBackend
from flambeau.llm.checkpoints.checkpoint import load_model, read_architecture
from flambeau.llm.executor.shard import Shard, local_architecture
from flambeau.llm.executor.tensor_parallel import TensorParallelGroup, sum_over_ranks
from support.adapters import layer_shapes, merge, read_peft_adapter, write_adapter, write_peft_adapter
from support.checkpoints import read_checkpoint, write_checkpoint
from support.llm_steps import room, step_inputs
from support.ranks import run_as_threads
from support.sharded import load_part

pytest.importorskip("peft")

TOLERANCE = {"atol": 1e-4, "rtol": 0.0}
PROMPTS = [[5, 9, 40, 41], [7] * 9, [1, 2, 3], [88, 3]]
NUMBERS = [1, 0, 2, 1]  # the adapter, none, another one
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
EVERYTHING = [*LINEARS, "lm_head", "embed_tokens"]
KINDS = {
    "the head": ("mistral-v0.3", {"target_modules": ["q_proj", "lm_head"]}),
    "the head of tied embeddings": ("qwen-3", {"target_modules": ["q_proj", "lm_head"]}),
    "embeddings": ("mistral-v0.3", {"target_modules": ["q_proj", "embed_tokens"]}),
    "tied embeddings": ("qwen-3", {"target_modules": ["embed_tokens"]}),
    "tied embeddings that stay tied": ("qwen-3", {"target_modules": ["embed_tokens"], "ensure_weight_tying": True}),
    "scaled embeddings": ("gemma-2", {"target_modules": ["v_proj", "embed_tokens"]}),
    "smaller embeddings": ("opt-350m", {"target_modules": "all-linear"}),
    "all linear layers": ("llama-biased", {"target_modules": "all-linear"}),
    "dora": ("mistral-v0.3", {"target_modules": EVERYTHING, "use_dora": True}),
    "dora with biases": ("llama-biased", {"target_modules": LINEARS, "use_dora": True, "bias": "all"}),
    "dora of fused layers": ("phi-3", {"target_modules": ["qkv_proj", "o_proj", "gate_up_proj"], "use_dora": True}),
    "dora of transposed layers": ("gpt-2", {"target_modules": ["c_attn", "c_proj"], "use_dora": True}),
    "dora of rotated halves": ("glm", {"target_modules": ["q_proj", "k_proj"], "use_dora": True}),
    "dora of latent attention": ("minicpm-3", {"target_modules": ["q_b_proj", "o_proj"], "use_dora": True}),
    "whole head and embeddings": (
        "mistral-v0.3",
        {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
    ),
    "whole tied embeddings": ("gemma-2", {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]}),
    "a whole head of tied embeddings": ("gemma-2", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
    "whole tied embeddings that stay tied": (
        "qwen-3",
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ),
    "whole layers": ("llama-biased", {"target_modules": ["q_proj"], "modules_to_save": ["k_proj", "down_proj"]}),
    "norms": (
        "qwen-3",
        {"target_modules": ["q_proj"], "modules_to_save": ["input_layernorm", "norm", "q_norm", "k_norm"]},
    ),
    "norms with biases": ("gpt-2", {"target_modules": ["c_attn"], "modules_to_save": ["ln_1", "ln_f"]}),
    "all biases": ("llama-biased", {"target_modules": ["q_proj", "down_proj"], "bias": "all"}),
    "all biases of layer norms": ("gpt-2", {"target_modules": ["c_attn"], "bias": "all"}),
    "biases of adapted layers": ("llama-biased", {"target_modules": ["q_proj", "down_proj"], "bias": "lora_only"}),
    "biases of rotated halves": ("glm", {"target_modules": ["q_proj", "k_proj"], "bias": "lora_only"}),
    "own biases": ("mistral-v0.3", {"target_modules": LINEARS, "lora_bias": True}),
    "tokens": ("mistral-v0.3", {"target_modules": ["q_proj"], "trainable_token_indices": [5, 40, 3, 41]}),
    "tokens of tied embeddings": ("gemma-2", {"target_modules": ["q_proj"], "trainable_token_indices": [5, 40, 41]}),
    "tokens of head and embeddings": (
        "mistral-v0.3",
        {"target_modules": ["q_proj"], "trainable_token_indices": {"embed_tokens": [5, 40], "lm_head": [7, 9]}},
    ),
    "experts": ("mixtral", {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
    "one matrix of experts": ("qwen-3-moe", {"target_modules": ["q_proj"], "target_parameters": EXPERTS[1:]}),
    "interleaved experts": ("gpt-oss", {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
    "experts and routers": ("mixtral", {"target_modules": "all-linear"}),
    "routers in float32": ("glm-4.5", {"target_modules": ["q_proj"], "target_parameters": ["mlp.gate.weight"]}),
    "gates of shared experts": ("qwen-2-moe", {"target_modules": ["shared_expert_gate", "up_proj"]}),
    "experts with ranks of their own": (
        "mixtral",
        {
            "target_modules": ["q_proj"],
            "target_parameters": EXPERTS,
            "use_rslora": True,
            "rank_pattern": {"experts.down_proj": 2},
            "alpha_pattern": {"experts.down_proj": 3, "q_proj": 5},
        },
    ),
    "patterns": (
        "mistral-v0.3",
        {
            "target_modules": r".*\.(q_proj|v_proj|down_proj)",
            "use_rslora": True,
            "rank_pattern": {"q_proj": 7, r"layers\.1\.mlp\.down_proj": 2},
            "alpha_pattern": {"v_proj": 3, r"model\.layers\.0\.self_attn\.q_proj": 11},
        },
    ),
    "some layers": (
        "mistral-v0.3",
        {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": "layers"},
    ),
    "excluded layers": ("mistral-v0.3", {"target_modules": "all-linear", "exclude_modules": r".*layers\.0\..*"}),
}


def target_of(model) -> AdapterTarget:
    cpu = torch.device("cpu")
    return AdapterTarget(arch=model.arch, local=model.arch, shard=None, device=cpu, dtype=torch.float32)


def logits_of(backend, numbers) -> list[torch.Tensor]:
    """All logits of each prompt and of one token after it."""
    found = []
    steps = [(0, prompt) for prompt in PROMPTS], [(len(prompt), [11]) for prompt in PROMPTS]
    for tokens, query_len in zip(steps, (0, 1), strict=True):
        inputs = step_inputs(dict(enumerate(tokens)), query_len=query_len)
        inputs.adapters_T = torch.tensor(numbers).repeat_interleave(inputs.query_starts.diff())
        logits = backend.decode(inputs) if query_len else backend.prefill(inputs, torch.arange(len(inputs.ids_T)))
        found.append(logits.split([len(ids) for _, ids in tokens]))
    return [torch.cat(each) for each in zip(*found, strict=True)]


def expected_logits(network) -> list[torch.Tensor]:
    with torch.inference_mode():
        return [network(torch.tensor([[*prompt, 11]])).logits[0].float() for prompt in PROMPTS]


@pytest.fixture(scope="module", params=KINDS)
def adapted(request, tmp_path_factory):
    """A checkpoint, an adapter of this kind, and the logits that peft finds with it."""
    family, options = KINDS[request.param]
    folder = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(folder, family)
    adapter = write_peft_adapter(folder, folder / "adapter", **options)
    return folder, adapter, expected_logits(read_peft_adapter(folder, adapter))


def test_logits_are_those_of_peft(tmp_path, adapted):
    folder, adapter, with_it = adapted
    shapes = {name: shape for name, shape in layer_shapes(folder, ("o_proj", "k_proj")).items() if shape[1] > 1}
    other = write_adapter(tmp_path / "other", shapes) if shapes else adapter
    plain = expected_logits(read_checkpoint(folder))
    with_other = expected_logits(merge(read_checkpoint(folder), other)) if shapes else with_it
    assert (torch.cat(with_it) - torch.cat(plain)).abs().max() > 0.05
    expected = [(plain, with_it, with_other)[number][i] for i, number in enumerate(NUMBERS)]

    model = load_model(folder)
    store = AdapterStore(target_of(model), model)
    store.load(1, adapter)
    store.load(2, other)
    backends = [EagerBackend(model, room(model, len(PROMPTS)), adapters=store)]
    if can_compute(model, room(model, 1)):
        packed = CpuBackend(load_model(folder), room(model, len(PROMPTS)), adapters=store)
        packed.wait_until_compiled()
        assert packed.decode_path == "CPU kernels"
        backends.append(packed)
        store = AdapterStore(target_of(model), packed.model)  # its changes come from packed weights
        store.load(1, adapter)
        store.load(2, other)
        backends.append(CpuBackend(packed.model, room(model, len(PROMPTS)), adapters=store))
        backends[-1].wait_until_compiled()
    for backend in backends:
        if backend.greedy is not None:
            logits_of(backend, NUMBERS)
            inputs = step_inputs({i: (len(prompt), [11]) for i, prompt in enumerate(PROMPTS)}, query_len=1)
            inputs.adapters_T = torch.tensor(NUMBERS)
            assert torch.equal(backend.greedy.argmax(inputs), backend.decode(inputs).argmax(-1))
        for one, other_one in zip(logits_of(backend, NUMBERS), expected, strict=True):
            torch.testing.assert_close(one, other_one, **TOLERANCE)

    merging = MergeOnLoad(adapter, target_of(model), None)
    merged = load_model(folder, arrived=merging)
    merging.finish(merged)
    for one, other_one in zip(
        logits_of(EagerBackend(merged, room(merged, len(PROMPTS))), [0] * 4), with_it, strict=True
    ):
        torch.testing.assert_close(one, other_one, **TOLERANCE)


def test_two_ranks_compute_what_peft_computes(monkeypatch, adapted):
    folder, adapter, expected = adapted
    arch, cpu, ranks = read_architecture(folder), torch.device("cpu"), TensorParallelGroup(0, 2, None)

    def compute(rank: int) -> list[list[torch.Tensor]]:
        shard, local = Shard(arch, rank, 2), local_architecture(arch, 2)
        target = AdapterTarget(arch=arch, local=local, shard=shard, device=cpu, dtype=torch.float32)
        total = partial(sum_over_ranks, ranks=ranks)
        part = load_part(folder, rank)
        store = AdapterStore(target, part)
        store.load(1, adapter, total)
        added = EagerBackend(part, room(part, len(PROMPTS)), adapters=store)
        merging = MergeOnLoad(adapter, target, None, total)
        merged = load_part(folder, rank, arrived=merging)
        merging.finish(merged)
        return [logits_of(added, [1] * 4), logits_of(EagerBackend(merged, room(merged, len(PROMPTS))), [0] * 4)]

    for found in run_as_threads(monkeypatch, compute):
        for logits in found:
            for one, other in zip(logits, expected, strict=True):
                torch.testing.assert_close(one, other, **TOLERANCE)
