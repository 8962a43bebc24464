"""Quantized networks of real sizes divide among the numbers of ranks that they are served with; no weights are made."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from flambeau.llm.checkpoints.layer_formats import KeptForms
from flambeau.llm.checkpoints.parameter_map import map_weights
from flambeau.llm.checkpoints.quantization_methods import as_unpacked, unpack_weights
from flambeau.llm.checkpoints.weight_files import StoredTensor
from flambeau.llm.executor.shard import Shard, local_architecture
from flambeau.llm.models.hugging_face import from_hugging_face
from flambeau.llm.models.meta_device import on_meta_device
from flambeau.llm.quantize.quantizer import ExpertStack, build
from support.packed_files import FILES

LAYERS = {"num_hidden_layers": 4}
NETWORKS: dict[str, dict[str, Any]] = {
    "DeepSeek V3": {
        **FILES.NETWORKS["latent"],
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "first_k_dense_replace": 3,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
    },
    "Qwen3-235B": {
        **FILES.NETWORKS["experts"],
        "vocab_size": 151936,
        "hidden_size": 4096,
        "moe_intermediate_size": 1536,
        "num_attention_heads": 64,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
    },
    "gpt-oss-120b": {
        **FILES.NETWORKS["gpt-oss"],
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "num_local_experts": 128,
    },
}
BLOCK = FILES.BLOCK


class Names:
    """A file of which only names, shapes and types are known."""

    path = Path("model.safetensors")

    def __init__(self, network: dict[str, Any]) -> None:
        self._network = network

    def __iter__(self) -> Iterator[StoredTensor]:
        for name, shape in FILES.shapes_of(self._network).items():
            if self._network["model_type"] == "gpt_oss" and len(shape) == 3:
                count, rows, columns = shape
                yield self._tensor(f"{name}_blocks", (count, rows, columns // 32, 16), torch.uint8)
                yield self._tensor(f"{name}_scales", (count, rows, columns // 32), torch.uint8)
            elif self._network["model_type"] != "gpt_oss" and FILES.is_linear(name):
                blocks = tuple(-(-size // BLOCK) for size in shape)
                yield self._tensor(name, shape, torch.float8_e4m3fn)
                yield self._tensor(f"{name}_scale_inv", blocks, torch.float32)
            else:
                yield self._tensor(name, shape, torch.bfloat16)

    def _tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> StoredTensor:
        return StoredTensor(self, name, torch.Size(shape), dtype)

    def read(self, name: str) -> torch.Tensor:
        raise AssertionError(f"{name} is read")


SIZES = {"DeepSeek V3": (8, 16), "Qwen3-235B": (4, 8), "gpt-oss-120b": (2, 4, 8)}


@pytest.mark.parametrize(("title", "size"), [(title, size) for title, sizes in SIZES.items() for size in sizes])
def test_every_quantized_tensor_has_its_place_on_a_rank(title, size):
    network = FILES.COMMON | NETWORKS[title] | LAYERS
    is_mxfp4 = network["model_type"] == "gpt_oss"
    quantization = {"quant_method": "mxfp4"} if is_mxfp4 else FILES.BLOCKS_OF_FP8
    arch = from_hugging_face({**network, "quantization_config": quantization, "tie_word_embeddings": False})
    unpacked = unpack_weights([Names(network)], arch, KeptForms(blocks=True, codes=is_mxfp4))
    arch = as_unpacked(arch, unpacked.settings)
    with on_meta_device(torch.bfloat16):
        part: Any = build(local_architecture(arch, size), whole=arch)
    map_weights(part, arch, unpacked.files, Shard(arch, size - 1, size))  # raises for what does not fit
    experts = part.model.layers[3].mlp.experts
    for stack in (experts.gate_up_proj, experts.down_proj):
        assert isinstance(stack, ExpertStack)
    weight, scales = (experts.down_proj.get_buffer(name) for name in ("weight", "scales" if is_mxfp4 else "scale"))
    inputs = weight.shape[2] * (2 if is_mxfp4 else 1)
    assert inputs == network.get("moe_intermediate_size", network["intermediate_size"]) // size
    assert inputs % scales.shape[2] == 0
