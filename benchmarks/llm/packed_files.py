"""Random checkpoints of every kind that is read, for `load_memory.py`: files as other tools write them.

Numbers are random bytes, so a checkpoint of hundreds of megabytes is made in a moment. A kind is a network, the type
of its files or how its linear layers are stored, and settings of the engine.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from flambeau.llm.quantize.settings import QuantizationSettings

FP8 = torch.float8_e4m3fn
BLOCK, GROUP = 128, 128
SHARD_BYTES = 64 << 20

Parts = dict[str, Tensor]
Pack = Callable[[int, int], Parts]  # outputs and inputs → the tensors that a linear layer is stored as
Shapes = dict[str, tuple[int, ...]]


# ---- networks ----

COMMON = {"max_position_embeddings": 512, "rms_norm_eps": 1e-5, "hidden_act": "silu", "torch_dtype": "bfloat16"}
NETWORKS: dict[str, dict[str, Any]] = {
    "dense": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 8192,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
    },
    "tied": {  # most of a small network may be its embeddings
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 65536,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
    },
    "experts": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "vocab_size": 8192,
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "moe_intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "latent": {  # DeepSeek V3: the CPU kernels compute its layers one by one
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "vocab_size": 8192,
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "moe_intermediate_size": 512,
        "num_hidden_layers": 4,
        "first_k_dense_replace": 1,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "q_lora_rank": 512,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 64,
        "v_head_dim": 64,
        "n_routed_experts": 32,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "n_group": 4,
        "topk_group": 2,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
    "gpt-oss": {
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "vocab_size": 8192,
        "hidden_size": 1024,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "num_local_experts": 16,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "swiglu_limit": 7.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},  # tables for few places
    },
}


LARGE: dict[str, dict[str, Any]] = {  # for a GPU, where what a step takes would be much of a small network
    "dense": {
        **NETWORKS["dense"],
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 12,
        "num_key_value_heads": 32,
    },
    "experts": {
        **NETWORKS["experts"],
        "hidden_size": 2048,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 6,
        "num_attention_heads": 32,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    },
    "gpt-oss": {
        **NETWORKS["gpt-oss"],
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 8,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "num_local_experts": 32,
    },
}


def shapes_of(network: Mapping[str, Any]) -> Shapes:
    """The tensors of a checkpoint in 16 or 32 bits."""
    hidden = network["hidden_size"]
    found: Shapes = {"model.embed_tokens.weight": (network["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    if not network.get("tie_word_embeddings"):
        found["lm_head.weight"] = (network["vocab_size"], hidden)
    for i in range(network["num_hidden_layers"]):
        start = f"model.layers.{i}"
        found |= {f"{start}.{norm}.weight": (hidden,) for norm in ("input_layernorm", "post_attention_layernorm")}
        attention = latent_attention(network) if "kv_lora_rank" in network else attention_of(network)
        found |= {f"{start}.self_attn.{name}": shape for name, shape in attention.items()}
        found |= {f"{start}.mlp.{name}": shape for name, shape in feed_forward(network, i).items()}
    return found


def attention_of(network: Mapping[str, Any]) -> Shapes:
    hidden, heads = network["hidden_size"], network["num_attention_heads"]
    size = network.get("head_dim", hidden // heads)
    rows = {"q_proj": heads * size, "k_proj": network["num_key_value_heads"] * size}
    rows["v_proj"] = rows["k_proj"]
    found: Shapes = {f"{name}.weight": (count, hidden) for name, count in rows.items()}
    found["o_proj.weight"] = (hidden, heads * size)
    if network["model_type"] == "qwen3_moe":
        found |= {"q_norm.weight": (size,), "k_norm.weight": (size,)}
    if network["model_type"] == "gpt_oss":
        found |= {f"{name}.bias": (count,) for name, count in rows.items()}
        found |= {"o_proj.bias": (hidden,), "sinks": (heads,)}
    return found


def latent_attention(network: Mapping[str, Any]) -> Shapes:
    hidden, heads = network["hidden_size"], network["num_attention_heads"]
    queries, latent = network["q_lora_rank"], network["kv_lora_rank"]
    plain, rotated, value = network["qk_nope_head_dim"], network["qk_rope_head_dim"], network["v_head_dim"]
    return {
        "q_a_proj.weight": (queries, hidden),
        "q_a_layernorm.weight": (queries,),
        "q_b_proj.weight": (heads * (plain + rotated), queries),
        "kv_a_proj_with_mqa.weight": (latent + rotated, hidden),
        "kv_a_layernorm.weight": (latent,),
        "kv_b_proj.weight": (heads * (plain + value), latent),
        "o_proj.weight": (hidden, heads * value),
    }


def feed_forward(network: Mapping[str, Any], layer: int) -> Shapes:
    hidden = network["hidden_size"]
    if network["model_type"] == "gpt_oss":
        count, size = network["num_local_experts"], network["intermediate_size"]
        return {
            "router.weight": (count, hidden),
            "router.bias": (count,),
            "experts.gate_up_proj": (count, 2 * size, hidden),  # stored in MXFP4 only
            "experts.gate_up_proj_bias": (count, 2 * size),
            "experts.down_proj": (count, hidden, size),
            "experts.down_proj_bias": (count, hidden),
        }
    num_experts = network.get("num_experts", network.get("n_routed_experts", 0))
    if not num_experts or layer < network.get("first_k_dense_replace", 0):
        return gated(hidden, network["intermediate_size"])
    size = network["moe_intermediate_size"]
    found: Shapes = {"gate.weight": (num_experts, hidden)}
    if "n_routed_experts" in network:
        found["gate.e_score_correction_bias"] = (num_experts,)
        found |= {f"shared_experts.{name}": shape for name, shape in gated(hidden, size).items()}
    for expert in range(num_experts):
        found |= {f"experts.{expert}.{name}": shape for name, shape in gated(hidden, size).items()}
    return found


def gated(hidden: int, size: int) -> Shapes:
    return {"gate_proj.weight": (size, hidden), "up_proj.weight": (size, hidden), "down_proj.weight": (hidden, size)}


# ---- how linear layers are stored ----


def some_bytes(*shape: int) -> Tensor:
    words_of_8 = torch.randint(-(1 << 63), (1 << 63) - 1, (-(-math.prod(shape) // 8),))
    return words_of_8.view(torch.uint8)[: math.prod(shape)].view(shape)


def words(*shape: int) -> Tensor:
    return some_bytes(*shape, 4).view(torch.int32).squeeze(-1)


def some_floats(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Numbers up to 0.125 in size, with random digits."""
    if dtype == torch.float32:  # which 16 bits do not represent
        bits = some_bytes(*shape, 4).view(torch.int32).squeeze(-1)
        return (bits & (0x81FFFFFF - (1 << 32)) | 0x3C000000).view(torch.float32)
    bits = some_bytes(*shape, 2).view(torch.int16).squeeze(-1)
    return (bits & (0x81FF - (1 << 16)) | 0x3C00).view(torch.bfloat16).to(dtype)


def some_fp8(*shape: int) -> Tensor:
    numbers = some_bytes(*shape)
    return (numbers & 0x80 | (numbers & 0x7F).clamp_max(0x70)).view(FP8)


def scales(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (0.0005 * (1 + torch.rand(shape))).to(dtype)


def gptq(rows: int, columns: int) -> Parts:
    groups = columns // GROUP
    return {
        "qweight": words(columns // 8, rows),
        "qzeros": torch.full((groups, rows // 8), 0x77777777, dtype=torch.int32),
        "scales": scales(groups, rows, dtype=torch.float16),
        "g_idx": (torch.arange(columns) // GROUP).int(),
    }


def awq(rows: int, columns: int) -> Parts:
    groups = columns // GROUP
    return {
        "qweight": words(columns, rows // 8),
        "qzeros": words(groups, rows // 8),
        "scales": scales(groups, rows, dtype=torch.float16),
    }


def compressed_int4(rows: int, columns: int) -> Parts:
    return {
        "weight_packed": words(rows, columns // 8),
        "weight_scale": scales(rows, columns // GROUP, dtype=torch.bfloat16),
        "weight_shape": torch.tensor([rows, columns]),
    }


def compressed_int8(rows: int, columns: int) -> Parts:
    return {
        "weight": some_bytes(rows, columns).view(torch.int8),
        "weight_scale": scales(rows, 1, dtype=torch.bfloat16),
    }


def fp8_rows(rows: int, columns: int) -> Parts:
    return {"weight": some_fp8(rows, columns), "weight_scale": scales(rows, 1)}


def fp8_whole(rows: int, columns: int) -> Parts:
    return {"weight": some_fp8(rows, columns), "weight_scale": scales(1)[0], "input_scale": torch.tensor(1.0)}


def fp8_blocks(rows: int, columns: int) -> Parts:
    return {"weight": some_fp8(rows, columns), "weight_scale_inv": scales(-(-rows // BLOCK), -(-columns // BLOCK))}


def compressed_blocks(rows: int, columns: int) -> Parts:
    parts = fp8_blocks(rows, columns)
    return {"weight": parts["weight"], "weight_scale": parts["weight_scale_inv"]}


def nvfp4(rows: int, columns: int) -> Parts:
    return {
        "weight": some_bytes(rows, columns // 2),
        "weight_scale": (1 + torch.rand(rows, columns // 16)).to(FP8),
        "weight_scale_2": torch.tensor(0.01),
    }


def nf4(rows: int, columns: int) -> Parts:
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [rows, columns]}
    return {
        "weight": some_bytes(rows * columns // 2, 1),
        "weight.absmax": scales(rows * columns // 64),
        "weight.quant_map": torch.linspace(-1, 1, 16),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor([*json.dumps(state).encode()], dtype=torch.uint8),
    }


def bitsandbytes_int8(rows: int, columns: int) -> Parts:
    return {"weight": some_bytes(rows, columns).view(torch.int8), "SCB": scales(rows) * 127}


def torchao_int8(rows: int, columns: int) -> Parts:
    return {"_weight_qdata": some_bytes(rows, columns).view(torch.int8), "_weight_scale": scales(rows, 1)}


def torchao_fp8(rows: int, columns: int) -> Parts:
    return {"_weight_qdata": some_fp8(rows, columns), "_weight_scale": scales(rows, 1)}


def compressed_groups(rows: int, columns: int) -> Parts:
    return {
        "weight": some_bytes(rows, columns).view(torch.int8),
        "weight_scale": scales(rows, columns // GROUP, dtype=torch.bfloat16),
    }


def own_int8(rows: int, columns: int) -> Parts:
    return {"weight": some_bytes(rows, columns).view(torch.int8), "scale": scales(rows, dtype=torch.bfloat16)}


def own_int4(rows: int, columns: int) -> Parts:
    numbers = scales(rows, columns // 64, dtype=torch.bfloat16)
    return {"weight": some_bytes(rows, columns // 2), "scales": numbers, "minimums": -8 * numbers}


def own_fp8(rows: int, columns: int) -> Parts:
    return {"weight": some_fp8(rows, columns), "scale": scales(rows)}


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"symmetric": True, **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


def own(kind: Any) -> dict[str, Any]:
    return QuantizationSettings(kind=kind).to_config()


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What the files of a checkpoint are like, and how it is loaded."""

    dtype: torch.dtype = torch.bfloat16  # of what is not quantized
    gguf: Mapping[str, str] = field(default_factory=dict)  # types of a GGUF file, by parts of names; "": of all others
    pack: Pack | None = None
    quantization: Mapping[str, Any] = field(default_factory=dict)
    suffix: str = ".safetensors"
    is_one_file: bool = False
    class_name: str = ""  # of torchao, in the headers of files
    engine: Mapping[str, Any] = field(default_factory=dict)
    networks: tuple[str, ...] = ("dense", "experts")


BLOCKS_OF_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
TORCHAO = {"quant_method": "torchao"}
KINDS = {
    "float32": Kind(dtype=torch.float32),
    "bfloat16": Kind(networks=("dense", "tied", "experts")),
    "bfloat16 in one file": Kind(is_one_file=True, networks=("dense",)),
    "pytorch_model.bin": Kind(suffix=".bin"),
    "GPTQ int4": Kind(
        pack=gptq,
        quantization={"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True},
    ),
    "AWQ int4": Kind(
        pack=awq,
        quantization={"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm", "zero_point": True},
    ),
    "compressed-tensors int4": Kind(
        pack=compressed_int4,
        quantization=compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=GROUP),
    ),
    "compressed-tensors int8": Kind(
        pack=compressed_int8, quantization=compressed("int-quantized", num_bits=8, type="int", strategy="channel")
    ),
    "compressed-tensors int8 groups": Kind(
        pack=compressed_groups,
        quantization=compressed("int-quantized", num_bits=8, type="int", strategy="group", group_size=GROUP),
        networks=("dense",),
    ),
    "compressed-tensors fp8": Kind(
        pack=fp8_rows, quantization=compressed("float-quantized", num_bits=8, type="float", strategy="channel")
    ),
    "compressed-tensors fp8 blocks": Kind(
        pack=compressed_blocks,
        quantization=compressed(
            "float-quantized", num_bits=8, type="float", strategy="block", block_structure=[BLOCK, BLOCK]
        ),
        networks=("dense",),
    ),
    "fp8, one scale": Kind(pack=fp8_whole, quantization={"quant_method": "fp8"}, networks=("dense",)),
    "fp8 blocks": Kind(pack=fp8_blocks, quantization=BLOCKS_OF_FP8, networks=("dense", "experts", "latent")),
    "ModelOpt fp8": Kind(
        pack=fp8_whole, quantization={"quant_method": "modelopt", "quant_algo": "FP8"}, networks=("dense",)
    ),
    "ModelOpt NVFP4": Kind(
        pack=nvfp4, quantization={"quant_method": "modelopt", "quant_algo": "NVFP4"}, networks=("dense", "experts")
    ),
    "MXFP4": Kind(quantization={"quant_method": "mxfp4"}, networks=("gpt-oss",)),
    "bitsandbytes nf4": Kind(
        pack=nf4,
        quantization={"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        networks=("dense",),
    ),
    "bitsandbytes int8": Kind(
        pack=bitsandbytes_int8, quantization={"quant_method": "bitsandbytes", "load_in_8bit": True}, networks=("dense",)
    ),
    "torchao int8": Kind(pack=torchao_int8, quantization=TORCHAO, class_name="Int8Tensor", networks=("dense",)),
    "torchao fp8": Kind(pack=torchao_fp8, quantization=TORCHAO, class_name="Float8Tensor", networks=("dense",)),
    "own int8": Kind(pack=own_int8, quantization=own("int8")),
    "own int4": Kind(pack=own_int4, quantization=own("int4")),
    "own fp8": Kind(pack=own_fp8, quantization=own("fp8")),
    "GGUF Q8_0": Kind(gguf={"": "Q8_0"}),
    "GGUF Q4_K_M": Kind(gguf={"v_proj": "Q6_K", "down_proj": "Q6_K", "lm_head": "Q6_K", "": "Q4_K"}),
    "bfloat16, quantization: int8": Kind(engine={"quantization": "int8"}),
    "bfloat16, quantization: int4": Kind(engine={"quantization": "int4"}),
    "bfloat16, quantization: fp8": Kind(engine={"quantization": "fp8"}),
}


# ---- files ----


def is_linear(name: str) -> bool:
    others = ("embed_tokens", "norm", "lm_head", ".gate.", ".router.")
    return name.endswith(".weight") and not any(other in name for other in others)


def tensors_of(kind: Kind, network: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    for name, shape in shapes_of(network).items():
        if network["model_type"] == "gpt_oss" and len(shape) == 3:
            count, rows, columns = shape
            yield f"{name}_blocks", some_bytes(count, rows, columns // 32, 16)
            yield f"{name}_scales", torch.full((count, rows, columns // 32), 119, dtype=torch.uint8)
        elif kind.pack is not None and is_linear(name):
            start = name.removesuffix("weight")
            yield from ((start + leaf, part) for leaf, part in kind.pack(*shape).items())
        elif "norm" in name:
            yield name, torch.ones(shape, dtype=kind.dtype)
        else:
            yield name, some_floats(*shape, dtype=kind.dtype)


def write_checkpoint(folder: Path, kind: Kind, network: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    if kind.gguf:
        write_gguf(folder / "model.gguf", kind, {**COMMON, **network})
        return
    config = {**COMMON, "tie_word_embeddings": False, **network}
    if kind.quantization:
        config["quantization_config"] = dict(kind.quantization)
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    places: dict[str, str] = {}
    waiting: dict[str, Tensor] = {}
    most = math.inf if kind.is_one_file else SHARD_BYTES
    start = "pytorch_model" if kind.suffix == ".bin" else "model"
    for name, tensor in tensors_of(kind, network):
        if waiting and sum(each.nbytes for each in waiting.values()) + tensor.nbytes > most:
            places |= write_file(folder, f"{start}-{len({*places.values()}) + 1:05d}{kind.suffix}", waiting, kind)
            waiting = {}
        waiting[name] = tensor
    if not places:
        write_file(folder, f"{start}{kind.suffix}", waiting, kind)
        return
    places |= write_file(folder, f"{start}-{len({*places.values()}) + 1:05d}{kind.suffix}", waiting, kind)
    (folder / f"{start}{kind.suffix}.index.json").write_text(json.dumps({"weight_map": places}))


def write_file(folder: Path, file: str, tensors: dict[str, Tensor], kind: Kind) -> dict[str, str]:
    if kind.suffix == ".bin":
        torch.save(tensors, folder / file)
    else:
        described = json.dumps({"_type": kind.class_name, "_data": {}})
        end = "_weight_qdata"
        headers = {f"{name.removesuffix(end)}weight": described for name in tensors if name.endswith(end)}
        save_file(tensors, folder / file, metadata={"format": "pt", **headers})
    return dict.fromkeys(tensors, file)


GGUF_NAMES = {"llama": "llama", "qwen3_moe": "qwen3moe"}
FACTOR_PLACES = {"Q8_0": (0,), "Q4_K": (0, 2), "Q6_K": (208,)}  # of float16 numbers in a block


def write_gguf(path: Path, kind: Kind, network: Mapping[str, Any]) -> None:
    """A file of random blocks with small factors; experts are stacked."""
    architecture = GGUF_NAMES[network["model_type"]]
    writer = gguf.GGUFWriter(path, architecture)
    heads = network["num_attention_heads"]
    values = {
        "vocab_size": network["vocab_size"],
        "embedding_length": network["hidden_size"],
        "block_count": network["num_hidden_layers"],
        "feed_forward_length": network["intermediate_size"],
        "attention.head_count": heads,
        "attention.head_count_kv": network["num_key_value_heads"],
        "attention.key_length": network.get("head_dim", network["hidden_size"] // heads),
        "attention.value_length": network.get("head_dim", network["hidden_size"] // heads),
        "context_length": network["max_position_embeddings"],
    }
    if "num_experts" in network:
        values |= {"expert_count": network["num_experts"], "expert_used_count": network["num_experts_per_tok"]}
        values["expert_feed_forward_length"] = network["moe_intermediate_size"]
    for key, value in values.items():
        writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", network["rms_norm_eps"])
    writer.add_float32(f"{architecture}.rope.freq_base", 10000.0)
    alphabet, merged = sorted(pre_tokenizers.ByteLevel.alphabet()), ["th"]
    unused = [f"<unused{i}>" for i in range(network["vocab_size"] - len(alphabet) - len(merged))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*alphabet, *merged, *unused])
    writer.add_token_types([gguf.TokenType.NORMAL] * network["vocab_size"])
    writer.add_token_merges(["t h"])
    number = next(number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(number, network["num_hidden_layers"])
    for name, shape in gguf_shapes(network).items():
        theirs = names.get_name(name, try_suffixes=(".weight",))
        assert theirs is not None, name
        if len(shape) == 1 or name.endswith(".gate.weight"):
            floats = torch.ones(shape) if len(shape) == 1 else some_floats(*shape, dtype=torch.float32)
            writer.add_tensor(theirs, floats.numpy())
        else:
            named = next(each for part, each in kind.gguf.items() if part in name)
            writer.add_tensor(theirs, some_blocks(named, shape), raw_dtype=gguf.GGMLQuantizationType[named])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_shapes(network: Mapping[str, Any]) -> Shapes:
    found: Shapes = {}
    for name, shape in shapes_of(network).items():
        start, _, rest = name.partition(".experts.")
        if rest:
            found[f"{start}.experts.{rest.partition('.')[2]}"] = (network["num_experts"], *shape)
        else:
            found[name] = shape
    return found


def some_blocks(kind: str, shape: tuple[int, ...]) -> "np.ndarray[Any, np.dtype[np.uint8]]":
    """Random bytes of rows of blocks, with small factors."""
    weights, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = some_bytes(*shape[:-1], shape[-1] // weights, size).clone()
    for at in FACTOR_PLACES[kind]:
        factors = scales(*blocks.shape[:-1], 1, dtype=torch.float16)
        blocks[..., at : at + 2] = factors.view(torch.uint8)
    return blocks.flatten(-2).numpy()


def write_tokenizer(folder: Path) -> None:
    """Bytes only: a network may have more ids than its tokenizer."""
    alphabet = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
