"""Tiny random checkpoints of architectures that the engine's own network does not have, and what transformers says.

Importing transformers takes seconds: it is imported by the first test that uses it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from flambeau.llm import Engine
from flambeau.llm.config import EngineConfig
from flambeau.llm.loader import load_transformers
from flambeau.llm.network_loader import LoadedNetwork

VOCAB_SIZE = 99
NEW_TOKENS = 16
Way = Literal["paged", "states", "caches"]  # how the engine runs a network

TINY: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
STATE = {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
GPT = {"vocab_size": VOCAB_SIZE, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 8}
EXPERTS = {"moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1}
GROUPS = {**EXPERTS, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 12}
LINEAR = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 4, "linear_num_value_heads": 4}


@dataclass(frozen=True, slots=True)
class Other:
    """How a class of transformers is run, and the settings of its tiny network."""

    way: Way
    options: dict[str, Any] = field(default_factory=dict)
    base: dict[str, Any] = field(default_factory=lambda: TINY)
    whole_prompts: bool = False


OTHERS: dict[str, Other] = {
    # attention alone, through transformers' interface
    "Afmoe": Other("paged", {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "num_dense_layers": 1}),
    "Apertus": Other("paged"),
    "Arcee": Other("paged"),
    "BioGpt": Other("paged"),
    "BitNet": Other("paged"),
    "CTRL": Other("paged", {"dff": 48}, GPT),
    "Dbrx": Other(
        "paged",
        {
            "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        },
        {"vocab_size": VOCAB_SIZE, "d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128},
    ),
    "DeepseekV2": Other("paged", {**GROUPS, **LATENT, "num_key_value_heads": 4}),
    "DeepseekV3": Other("paged", {**GROUPS, **LATENT, "num_key_value_heads": 4}),
    "Dots1": Other("paged", GROUPS),
    "Ernie4_5_Moe": Other("paged", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 16}),
    "FlexOlmo": Other("paged", {"num_experts": 4, "num_experts_per_tok": 2, "pad_token_id": 0}),
    "GPTBigCode": Other("paged", {}, GPT),
    "HunYuanDenseV1": Other("paged", {"head_dim": 8}),
    "HunYuanMoEV1": Other("paged", {"head_dim": 8, "num_experts": 4, "moe_topk": 2}),
    "JetMoe": Other("paged", {"kv_channels": 16, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "ModernBertDecoder": Other("paged", {"local_attention": 16, "pad_token_id": 0}),
    "NanoChat": Other("paged"),
    "Persimmon": Other("paged"),
    "Phimoe": Other("paged", {"num_local_experts": 4}),
    "VaultGemma": Other("paged", {"head_dim": 8, "sliding_window": 8}),
    # layers with a state
    "Bamba": Other("states", {**MAMBA, "num_hidden_layers": 3, "attn_layer_indices": [1]}),
    "FalconH1": Other("states", {**MAMBA, "mamba_d_ssm": 64}),
    "FalconMamba": Other("states", {}, STATE, whole_prompts=True),
    "GraniteMoeHybrid": Other(
        "states",
        {**MAMBA, "layer_types": ["mamba", "attention"], "num_local_experts": 4, "shared_intermediate_size": 16},
    ),
    "Jamba": Other(
        "states",
        {
            "num_hidden_layers": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "expert_layer_period": 2,
            "num_experts": 4,
            "mamba_d_state": 8,
            "use_mamba_kernels": False,
        },
        whole_prompts=True,
    ),
    "Lfm2": Other("states", {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8}),
    "Mamba": Other("states", {}, STATE, whole_prompts=True),
    "Mamba2": Other("states", {"num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 8}, STATE),
    "NemotronH": Other(
        "states",
        {
            **EXPERTS,
            "num_hidden_layers": 4,
            "layers_block_type": ["mamba", "attention", "moe", "mamba"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "n_groups": 2,
            "ssm_state_size": 8,
            "chunk_size": 8,
            "head_dim": 8,
            "moe_shared_expert_intermediate_size": 16,
            "use_mamba_kernels": False,
        },
    ),
    "OlmoHybrid": Other("states", {**LINEAR, "layer_types": ["linear_attention", "full_attention"], "pad_token_id": 0}),
    "Qwen3Next": Other(
        "states",
        {
            **LINEAR,
            "head_dim": 8,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "RecurrentGemma": Other(
        "caches",
        {
            "num_hidden_layers": 3,
            "attention_window_size": 16,
            "lru_width": 32,
            "block_types": ["recurrent", "recurrent", "attention"],
            "num_key_value_heads": 1,
        },
        whole_prompts=True,
    ),
    "Rwkv": Other("caches", {"attention_hidden_size": 32, "intermediate_size": 48, "context_length": 128}, STATE),
    "Zamba2": Other(
        "caches",
        {
            "num_hidden_layers": 6,
            "mamba_d_state": 8,
            "n_mamba_heads": 8,
            "mamba_headdim": 8,
            "chunk_size": 8,
            "layers_block_type": ["mamba", "mamba", "hybrid"] * 2,
            "num_mem_blocks": 1,
            "use_mem_rope": True,
            "num_key_value_heads": 4,
        },
        whole_prompts=True,
    ),
    "xLSTM": Other(
        "caches", {"hidden_size": 64, "num_heads": 4, "chunk_size": 8, "qk_dim_factor": 1.0, "v_dim_factor": 1.0}, STATE
    ),
    # attention of another form
    "CodeGen": Other("caches", {"n_ctx": 128, "rotary_dim": 4}, GPT),
    "DiffLlama": Other("caches"),
    "Doge": Other("caches"),
    "GPTNeo": Other(
        "caches",
        {"num_heads": 4, "num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 8},
        {"vocab_size": VOCAB_SIZE, "hidden_size": 32, "max_position_embeddings": 128},
    ),
    "Llama4": Other(
        "caches",
        {
            "head_dim": 8,
            "intermediate_size_mlp": 48,
            "num_local_experts": 4,
            "attention_chunk_size": 16,
            "no_rope_layers": [1, 0],
        },
    ),
    "OpenAIGPT": Other("caches", {}, GPT),
    "XGLM": Other(
        "caches",
        {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4},
        {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 128},
    ),
}
CONFIGS = {"Llama4": "Llama4TextConfig"}
CLASSES = {"CTRL": "CTRLLMHeadModel", "OpenAIGPT": "OpenAIGPTLMHeadModel"}


def other_network(name: str, **changes: Any) -> Any:
    """A random network of transformers whose choices are no matter of rounding."""
    import transformers

    known = OTHERS[name]
    config_class = getattr(transformers, CONFIGS.get(name, f"{name}Config"))
    config = config_class(**{**known.base, **known.options, **changes}, bos_token_id=1, eos_token_id=2)
    torch.manual_seed(0)
    model = getattr(transformers, CLASSES.get(name, f"{name}ForCausalLM"))(config).eval().requires_grad_(False)
    for key, parameter in model.named_parameters():
        if parameter.dim() > 1 and "norm" not in key and "A_log" not in key:
            torch.nn.init.normal_(parameter, std=0.3 if parameter.shape[-1] < 200 else 0.1)
    return model


def write_other(folder: Path, name: str, **changes: Any) -> Any:
    """A folder as transformers writes it, and the network it was written from."""
    model = other_network(name, **changes)
    model.save_pretrained(folder)
    return model


def some_prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCAB_SIZE, (n,), generator=generator).tolist() for n in (23, 5, 1, 37)]


def greedy_tokens(model: Any, prompt: list[int], number: int = NEW_TOKENS) -> list[int]:
    """What `generate` of transformers writes."""
    ids = torch.tensor([prompt])
    found = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=number, do_sample=False, eos_token_id=None
    )
    tokens: list[int] = found[0, len(prompt) :].tolist()
    return tokens


def load_other(folder: Path, **options: Any) -> LoadedNetwork:
    given = {"device": "cpu", "num_blocks": 64, "block_size": 4, "max_step_tokens": 16, **options}
    config = EngineConfig(**given)
    return load_transformers(folder, config, torch.device(config.device), "model_impl: transformers")


def engine_of(loaded: LoadedNetwork, device: str = "cpu") -> Engine:
    """An engine without a tokenizer."""
    return Engine(
        loaded.arch,
        loaded.backend,
        num_blocks=loaded.num_blocks,
        config=loaded.config,
        device=device,
        draft=loaded.draft,
        whole_prompts=loaded.whole_prompts,
    )
