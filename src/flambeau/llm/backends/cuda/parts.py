"""Which parts of a network the GPU's kernels compute, beside Llama's; `Architecture` says what they are."""

from __future__ import annotations

from torch import nn

from flambeau.llm.models.architecture import Architecture
from flambeau.llm.quantize.coded import CudaCodedLinear
from flambeau.llm.quantize.cuda_groups import CudaGroupedLinear
from flambeau.llm.quantize.quantizer import ExpertStack
from flambeau.llm.quantize.row_scaled import RowScaledLinear

# Those that were computed and measured on a GPU.
TUNED = frozenset(
    {
        "attention_scale",
        "embedding_scale",
        "gates_shared_expert",
        "logit_scale",
        "residual_scale",
        "routed_scale",
        "router",
        "router_jitter",
        "shared_expert_size",
        "wide_qk_norm",
    }
)
# Those that are compared with plain PyTorch at the first use on a GPU.
COMPARED = frozenset(
    {
        "activation",
        "alibi",
        "attention_input_scale",
        "attention_output_scale",
        "attention_softcap",
        "chunks",
        "clip_qkv",
        "embedding_norm",
        "embedding_size",
        "expert_bias",
        "feed_forward_layers",
        "gate_limits",
        "gates_attention",
        "has_gate",
        "has_last_norm",
        "has_mlp",
        "has_norm_weight",
        "has_sinks",
        "head_bias",
        "is_parallel",
        "late_qk_norm",
        "latent_size",
        "learned_positions",
        "local_rope_theta",
        "logit_softcap",
        "mlp_scales",
        "norm",
        "norm_bias",
        "norm_offset",
        "norm_places",
        "num_chosen_groups",
        "num_expert_groups",
        "paired_rope",
        "parallel_norms",
        "position_offset",
        "query_latent_size",
        "recurrence",
        "rotary_size",
        "rotated_qk_norm",
        "scales_expert_inputs",
        "separate_qk_norm",
        "temperature_length",
        "temperature_scale",
        "tempers_rotated",
        "unrotated_size",
        "value_size",
        "wide_residual",
    }
)
RECURRENT_KINDS = ("short_conv", "mamba", "mamba2", "delta_net")
HEAD_PARTS = TUNED | {"num_chosen_groups", "num_expert_groups", "rotary_size"}  # of a head that proposes tokens
TUNED_HEAD_SIZE = 128  # the largest
SCALES_OF_GROUPS = "scales of groups"  # of weights: their kernels were measured alone, not in a whole network


def unknown_parts(arch: Architecture) -> list[str]:
    """The parts of a network that the kernels do not compute."""
    unknown = set(arch.extras) - TUNED - COMPARED
    if arch.norm_places == "sum" and arch.has_last_norm:
        unknown.add("norm_places")
    if arch.qk_norm and arch.norm == "layer":
        unknown.add("norm")
    if arch.norm == "rms" and not arch.has_norm_weight:
        unknown.add("has_norm_weight")
    if arch.norm_places == "stream" or (arch.norm_places == "both" and arch.recurrence is not None):
        unknown.add("norm_places")
    if arch.latent_size and arch.unrotated_layers & arch.attending_layers:
        unknown.add("unrotated_layers")
    if arch.recurrence is not None and arch.recurrence.kind not in RECURRENT_KINDS:
        unknown.add("recurrence")
    if arch.wide_qk_norm and arch.late_qk_norm:
        unknown.add("late_qk_norm")
    if arch.qk_norm and arch.rotated_qk_norm:
        unknown.add("rotated_qk_norm")
    if any(arch.windows) and any(arch.chunks):
        unknown.add("chunks")
    if arch.gate_limits is not None and not arch.gate_limits.is_swiglu_of_experts:
        unknown.add("gate_limits")
    if arch.num_experts and not arch.has_gate:
        unknown.add("has_gate")
    if arch.activation == "xielu" or (arch.num_experts and arch.has_gate and arch.activation != "silu"):
        unknown.add("activation")
    if arch.latent_size and any(arch.windows):
        unknown.add("windows")
    if arch.latent_size and arch.has_sinks:
        unknown.add("has_sinks")
    if arch.latent_size and arch.temperature_length:
        unknown.add("temperature_length")
    if arch.value_size and not arch.latent_size:
        unknown.add("value_size")
    if arch.feed_forward_layers and arch.num_experts:
        unknown.add("feed_forward_layers")
    if (arch.rotary_size or arch.head_size) % 2 or arch.head_size % 2:
        unknown.add("head_size")
    return sorted(unknown)


def compared_parts(arch: Architecture) -> list[str]:
    """The parts that nobody has measured on a GPU: what the kernels find is compared at the first use."""
    found = set(arch.extras) - TUNED
    if arch.head_size > TUNED_HEAD_SIZE:
        found.add("head_size")
    return sorted(found)


def compared_weights(model: nn.Module) -> list[str]:
    """The kinds of weights that nobody has measured in a network on a GPU."""
    return [SCALES_OF_GROUPS] if any(map(has_scales_of_groups, model.modules())) else []


def has_scales_of_groups(module: nn.Module) -> bool:
    """Whether a module has codes or levels, or 8-bit weights with several scales for a row."""
    if isinstance(module, ExpertStack):
        scale = dict(module.named_buffers()).get("scale")
        return module.layout is not None or (scale is not None and scale.dim() > 2)
    has_groups = isinstance(module, RowScaledLinear) and module.scale.dim() > 1
    return has_groups or isinstance(module, CudaCodedLinear | CudaGroupedLinear)
