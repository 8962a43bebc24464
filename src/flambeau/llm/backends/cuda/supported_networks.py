"""can_compute: whether the kernels support a network."""

from __future__ import annotations

import torch
from torch import nn

from flambeau.llm.backends.cuda.feed_forward import (
    can_compute_experts,
)
from flambeau.llm.backends.cuda.group_scaled_experts import group_scaled_weights, is_group_scaled
from flambeau.llm.backends.cuda.parts import unknown_parts
from flambeau.llm.backends.cuda.prompt_attention import MAX_SHARED
from flambeau.llm.backends.cuda.recurrent_layer import (
    CLASSES,
    MIXERS,
)
from flambeau.llm.executor.kv_cache import KVCache
from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.embeddings import like_embeddings
from flambeau.llm.models.latent_attention import LatentAttention, LatentUp
from flambeau.llm.models.moe import Experts, SharedExpert, SparseMLP
from flambeau.llm.models.rope import Rotation
from flambeau.llm.models.transformer import Transformer, is_unmodified
from flambeau.llm.quantize.coded import CODE_GROUPS, CudaCodedLinear
from flambeau.llm.quantize.cuda_groups import CudaGroupedLinear
from flambeau.llm.quantize.groups import JoinedLinear
from flambeau.llm.quantize.packed_layers import CudaFp8Linear, CudaInt4Linear
from flambeau.llm.quantize.quantizer import ExpertStack
from flambeau.llm.quantize.row_scaled import RowScaledLinear

GROUPED = (CudaCodedLinear, CudaGroupedLinear)
QUANTIZED = (RowScaledLinear, CudaFp8Linear, CudaInt4Linear, JoinedLinear, *GROUPED)
SPARSE = (SparseMLP, Experts, SharedExpert, ExpertStack)
LATENT = (LatentAttention, LatentUp)


def can_compute(model: Transformer, cache: KVCache) -> bool:
    """Whether the kernels support a network: on an NVIDIA GPU; not sharded."""
    arch = model.arch
    if cache.keys[0].device.type != "cuda" or torch.version.hip is not None or unknown_parts(arch):
        return False
    if not can_attend(arch, model.rotation):
        return False
    dtype, cached = like_embeddings(model.model.embed_tokens).dtype, cache.keys[0].dtype
    if cached not in (dtype, torch.float8_e4m3fn):
        return False
    if not all(can_compute_experts(module) for module in model.modules() if isinstance(module, Experts)):
        return False
    if not group_sizes(model) <= {*CODE_GROUPS}:
        return False
    return have_type(model, dtype) and all(
        is_unmodified(module, (*QUANTIZED, *SPARSE, *LATENT, *CLASSES)) for module in model.modules()
    )


def group_sizes(model: Transformer) -> set[int]:
    """The sizes of groups of weights that have scales of their own."""
    linear = {module.layout.size for module in model.modules() if isinstance(module, GROUPED)}
    linear |= {
        module.in_features // module.scale.shape[1]
        for module in model.modules()
        if isinstance(module, RowScaledLinear) and module.scale.dim() == 2
    }
    stacks = [module for module in model.modules() if isinstance(module, ExpertStack) and is_group_scaled(module)]
    return linear | {group_scaled_weights(stack, None).group_size for stack in stacks}


def can_attend(arch: Architecture, rotation: Rotation) -> bool:
    """Whether the kernels support the number of heads, and find cosine and sine in tables."""
    return rotation.has_tables and (arch.latent_size > 0 or arch.num_heads // arch.num_kv_heads <= MAX_SHARED)


def have_type(model: nn.Module, dtype: torch.dtype) -> bool:
    """Whether all parameters have a type and are contiguous, but for what routers add to scores, and decays."""
    wide = {id(module.score_bias) for module in model.modules() if isinstance(module, SparseMLP)}
    mixers = [module for module in model.modules() if isinstance(module, MIXERS)]
    wide |= {id(p) for mixer in mixers for p in mixer.parameters(recurse=False)}
    if not all(
        p.dtype == torch.float32 and p.is_contiguous() for mixer in mixers for p in mixer.parameters(recurse=False)
    ):
        return False
    return all(p.dtype == dtype and p.is_contiguous() for p in model.parameters() if id(p) not in wide)
