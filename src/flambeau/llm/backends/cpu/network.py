"""CpuNetwork: a whole step of a decoder in one call of the C++ kernels; tested against EagerBackend.

Weights that bfloat16 or float16 represents exactly are packed as such: half the memory is read, with the results of
float32. With integer weights, the last layer has 8-bit weights too.

Shapes: N rows · T tokens of the step · S sequences · J further tokens of each · V vocabulary
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flambeau.llm.adapters.adapter_store import AdapterStore
from flambeau.llm.backends.cpu.attention import CACHE_KINDS, choose_attention
from flambeau.llm.backends.cpu.bindings import RECURRENT_KINDS, CTokens, index_pointers, kernels
from flambeau.llm.backends.cpu.expert_pointers import ROUTER_KINDS
from flambeau.llm.backends.cpu.lora_table import LoraTable
from flambeau.llm.backends.cpu.network_pointers import NetworkPointers
from flambeau.llm.backends.cpu.packed_experts import PackedStack, can_pack
from flambeau.llm.backends.cpu.packed_linear import INT8_GROUP, LANES, PackedLinear, pack_floats, pack_quantized
from flambeau.llm.backends.cpu.recurrence_pointers import other_parts
from flambeau.llm.backends.eager import EagerBackend
from flambeau.llm.executor.inputs import StepInputs
from flambeau.llm.executor.kv_cache import KVCache
from flambeau.llm.models.altup import AltUp, Laurel, Streams
from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.embeddings import NarrowEmbedding, RowEmbedding
from flambeau.llm.models.hidden_states import HiddenStates
from flambeau.llm.models.indexer import HeadWeights, Indexer
from flambeau.llm.models.latent_attention import LatentAttention, LatentUp
from flambeau.llm.models.moe import Experts, SharedExpert, SparseMLP
from flambeau.llm.models.recurrent import Mixer
from flambeau.llm.models.rope import Rotation
from flambeau.llm.models.shared_blocks import BlockAdapter, BlockAdapters, SharedBlock
from flambeau.llm.models.transformer import Transformer, is_unmodified
from flambeau.llm.quantize.coded import CodedLinear
from flambeau.llm.quantize.groups import GroupedLinear, JoinedLinear
from flambeau.llm.quantize.int4 import Int4Linear
from flambeau.llm.quantize.packed_layers import CpuInt4Linear, CpuInt8Linear
from flambeau.llm.quantize.quantizer import ExpertStack
from flambeau.llm.quantize.row_scaled import Fp8Linear, Int8Linear
from flambeau.llm.sampling.logits_processors import argmax_tokens

INTEGER_LAYERS = (Int8Linear, CpuInt8Linear, Int4Linear, CpuInt4Linear, GroupedLinear)
QUANTIZED_LAYERS = (*INTEGER_LAYERS, Fp8Linear, CodedLinear)
SPARSE = (SparseMLP, Experts, SharedExpert, ExpertStack, PackedStack)
# Parts beyond Llama's that the kernels compute.
EXTRAS = frozenset(
    {
        "norm",
        "norm_bias",
        "norm_offset",
        "norm_places",
        "has_norm_weight",
        "has_last_norm",
        "reversed_rope",
        "attention_gate",
        "shapes",
        "shared_keys",
        "normalizes_values",
        "scales_layers",
        "layer_input_size",
        "layer_input_vocab",
        "experts_beside_mlp",
        "attention_only_layers",
        "is_parallel",
        "parallel_norms",
        "has_gate",
        "activation",
        "rotary_size",
        "local_rope_theta",
        "wide_qk_norm",
        "late_qk_norm",
        "separate_qk_norm",
        "clip_qkv",
        "active_stream",
        "indexer",
        "laurel_size",
        "num_streams",
        "scales_stream",
        "sparsity",
        "inner_norms",
        "latent_size",
        "query_latent_size",
        "unrotated_size",
        "value_size",
        "paired_rope",
        "gates_heads",
        "has_sinks",
        "alibi",
        "chunks",
        "rotated_qk_norm",
        "tempers_rotated",
        "temperature_length",
        "temperature_scale",
        "learned_positions",
        "position_offset",
        "embedding_size",
        "embedding_norm",
        "scales_expert_inputs",
        "expert_bias",
        "gate_limits",
        "shared_expert_size",
        "expert_latent_size",
        "gates_shared_expert",
        "expert_norm",
        "router",
        "router_jitter",
        "num_expert_groups",
        "num_chosen_groups",
        "routed_scale",
        "attention_scale",
        "attention_softcap",
        "logit_softcap",
        "embedding_scale",
        "residual_scale",
        "logit_scale",
        "stream_scales",
        "recurrence",
        "has_mlp",
        "feed_forward_layers",
        "wide_residual",
        "attention_input_scale",
        "attention_output_scale",
        "mlp_scales",
        "gates_attention",
        "head_bias",
        "has_first_norm",
        "head_layer",
        "head_layer_bias",
        "tied_bias",
        "block_layers",
        "num_blocks",
        "adapter_rank",
        "adapts_attention",
    }
)
OF_HEADS = frozenset({"attention_gate", "has_sinks", "shapes", "shared_keys"})  # not known in attention over latents
# Float32 weights that no smaller type represents stay as they are in larger networks, mapped from their files.
PACKED_FLOAT32_BYTES = 1 << 30


class CpuNetwork:
    """Pointers to a network's weights and its cache, and the calls that compute steps."""

    def __init__(
        self,
        model: Transformer,
        cache: KVCache,
        adapters: AdapterStore | None = None,
        states: HiddenStates | None = None,
    ) -> None:
        arch, body = model.arch, model.model
        recorded = () if states is None else states.layers
        self._pointers = NetworkPointers(cache, packs_float32=can_pack_float32(model))
        self._network = self._pointers.network(
            arch,
            body.layers,
            model.rotation,
            body=body,
            head=self._pointers.matrix(last_layer(model)),
            recorded=recorded,
        )
        self._width = arch.vocab_size
        self._states, self._states_width = states, len(recorded) * arch.hidden_size
        assert kernels.library is not None
        self._library = kernels.library
        self._lora = None if adapters is None else LoraTable(adapters, model)
        self._eager = EagerBackend(model, cache, choose_attention, adapters=adapters, states=states)

    def run(self, inputs: StepInputs, rows_N: Tensor | None = None) -> Tensor:
        """The logits [N, V] of these tokens, or [T, V] of all of them."""
        if self._lora is not None and not self._lora.can_compute(inputs.adapters_T):
            return self._eager.decode(inputs) if rows_N is None else self._eager.prefill(inputs, rows_N)
        num_rows = len(inputs.ids_T) if rows_N is None else len(rows_N)
        rows = None if rows_N is None else index_pointers(rows_N)[0]
        logits_NV = torch.empty(num_rows, self._width)
        threads = torch.get_num_threads()
        tokens = self._tokens(inputs)
        self._library.flambeau_step(self._network, tokens, rows, num_rows, logits_NV.data_ptr(), threads)
        return logits_NV

    def _tokens(self, inputs: StepInputs) -> CTokens:
        """The tokens of a step, and where its hidden states go."""
        tokens = to_ctokens(inputs)
        if self._lora is not None and inputs.adapters_T is not None:
            self._lora.add_to(tokens, inputs)
        if self._states is not None:
            states_TX = torch.empty(len(inputs.ids_T), self._states_width)
            tokens.states = states_TX.data_ptr()
            self._states.set(states_TX)
        return tokens

    def argmax(self, inputs: StepInputs) -> Tensor:
        if self._lora is not None and not self._lora.can_compute(inputs.adapters_T):
            return argmax_tokens(self._eager.decode(inputs))
        found_T = torch.empty_like(inputs.ids_T)
        num_rows, threads = len(found_T), torch.get_num_threads()
        tokens = self._tokens(inputs)
        self._library.flambeau_argmax(self._network, tokens, None, num_rows, found_T.data_ptr(), threads)
        return found_T

    def argmax_steps(self, first: StepInputs, positions_JS: Tensor, slots_JS: Tensor) -> Tensor:
        places, num_ahead = index_pointers(positions_JS, slots_JS), 1 + positions_JS.shape[0]
        found_KS = positions_JS.new_empty(num_ahead, positions_JS.shape[1])
        threads = torch.get_num_threads()
        self._library.flambeau_argmax_steps(
            self._network, to_ctokens(first), *places, num_ahead, found_KS.data_ptr(), threads
        )
        return found_KS


def to_ctokens(inputs: StepInputs) -> CTokens:
    """The inputs of a step as a C structure."""
    ids_T, tables_SB = inputs.ids_T, inputs.block_tables_SB
    places = index_pointers(ids_T, inputs.positions_T, inputs.slots_T, inputs.query_starts, tables_SB)
    tokens = CTokens(*places, len(ids_T), *tables_SB.shape)
    if inputs.state_slots_S is not None:
        [tokens.state_slots] = index_pointers(inputs.state_slots_S)
    if inputs.state_ends_T is not None:
        [tokens.state_ends] = index_pointers(inputs.state_ends_T)
    return tokens


def quantize_last_layer(model: Transformer) -> None:
    """Give a last layer of its own 8-bit weights if the others have integer weights."""
    if type(model.lm_head) is nn.Linear:
        model.lm_head = last_layer(model)


def last_layer(model: Transformer) -> nn.Module:
    """The last layer; with 8-bit weights if the others have integer weights."""
    embeddings = model.model.embed_tokens
    if model.lm_head is None and isinstance(embeddings, RowEmbedding):
        return embeddings.rows  # type: ignore[no-any-return]
    head: Any = linear_of(embeddings.weight) if model.lm_head is None else model.lm_head
    if type(head) is nn.Linear and has_integer_weights(model):
        head = pack_quantized(head.weight, "int8", INT8_GROUP, head.bias)
    elif model.lm_head is None and isinstance(embeddings, NarrowEmbedding):
        head = pack_floats(head.weight, dtype=embeddings.dtype)  # whose inputs have the network's type
    return head  # type: ignore[no-any-return]


def linear_of(weight: Tensor) -> nn.Linear:
    """A linear layer with these weights."""
    with torch.device("meta"):
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight = nn.Parameter(weight.detach(), requires_grad=False)
    return linear


def has_layers(model: Transformer, kinds: tuple[type[nn.Module], ...]) -> bool:
    return any(isinstance(layer, kinds) for layer in model.modules())


def has_integer_weights(model: Transformer) -> bool:
    return any(
        isinstance(layer, INTEGER_LAYERS) or (isinstance(layer, PackedLinear) and layer.has_integers)
        for layer in model.modules()
    )


def can_pack_float32(model: Transformer) -> bool:
    return 4 * sum(p.numel() for p in model.parameters() if p.dtype == torch.float32) <= PACKED_FLOAT32_BYTES


def unknown_parts(arch: Architecture) -> list[str]:
    """The parts of a network that the kernels do not compute."""
    unknown = set(arch.extras) - (EXTRAS - OF_HEADS if arch.latent_size else EXTRAS)
    if arch.router not in ROUTER_KINDS:
        unknown.add("router")
    if arch.rotated_qk_norm and (arch.qk_norm or arch.separate_qk_norm):
        unknown.add("rotated_qk_norm")  # one norm of queries and keys is known
    if arch.norm_places == "sum" and (arch.is_parallel or arch.recurrence is not None):
        unknown.add("norm_places")
    if arch.indexer is not None and (arch.unrotated_layers or not is_known_indexer(arch)):
        unknown.add("indexer")
    if arch.latent_size and any(arch.windows):
        unknown.add("windows")
    if arch.num_streams and not arch.layer_input_size:
        unknown.add("num_streams")
    if arch.inner_norms and (arch.shared_keys or not arch.has_gate):
        unknown.add("inner_norms")
    limits = arch.gate_limits
    if limits is not None and limits.kind != "activated" and not limits.is_swiglu_of_experts:
        unknown.add("gate_limits")
    if arch.value_size and not arch.latent_size:
        unknown.add("value_size")
    if arch.norm_places == "stream" and (arch.dense_layers or arch.shared_expert_size or not arch.num_experts):
        unknown.add("norm_places")  # what experts give is scaled by their weights
    if arch.recurrence is not None and arch.recurrence.kind not in RECURRENT_KINDS:
        unknown.add("recurrence")
    return sorted(unknown)


def is_known_indexer(arch: Architecture) -> bool:
    """Whether the kernels know how tokens are chosen: each by latents of queries, in all layers (DeepSeek V3.2)."""
    shape = arch.indexer
    assert shape is not None
    differs = shape.block_size or shape.plain_layers or shape.reads_inputs or shape.rotates_last or shape.pool_size
    return bool(arch.latent_size and arch.rotary_size) and not differs


def unknown_heads(arch: Architecture) -> list[str]:
    """The sizes of heads that the kernels do not compute, in words."""
    is_odd = arch.latent_size and arch.attending_layers and arch.head_size % LANES
    return [f"latents with keys of {arch.head_size} numbers"] if is_odd else []


def has_known_heads(arch: Architecture) -> bool:
    """Whether the kernels know the sizes of heads, if any layer attends."""
    return not unknown_heads(arch)


def can_compute(model: Transformer, cache: KVCache) -> bool:
    """Whether the kernels support a network: on a CPU; no sharded layers."""
    return can_attend(model.arch, model.rotation, cache) and has_known_layers(model)


def can_attend(arch: Architecture, rotation: Rotation, cache: KVCache) -> bool:
    """Whether the kernels know the parts of layers and their cache."""
    keys = cache.keys[0]
    if unknown_parts(arch) or keys.device.type != "cpu" or keys.dtype not in CACHE_KINDS:
        return False
    rotates_states = arch.recurrence is not None and arch.recurrence.rotary_size  # by tables
    return has_known_heads(arch) and (rotation.has_tables or not rotates_states)


def has_known_layers(model: nn.Module, others: tuple[type[nn.Module], ...] = ()) -> bool:
    """Whether all modules are those that the kernels replace, or of other classes that the caller knows."""
    parts_of_layers = (LatentAttention, LatentUp, Indexer, HeadWeights, AltUp, Laurel, Streams)
    of_blocks = (SharedBlock, BlockAdapters, BlockAdapter, nn.ModuleDict)
    known = (PackedLinear, JoinedLinear, *QUANTIZED_LAYERS, *SPARSE, *parts_of_layers, *of_blocks, *others)
    sparse = [module for module in model.modules() if isinstance(module, SparseMLP)]
    if not all(type(each.gate) is nn.Linear and can_pack(each.experts) for each in sparse):
        return False
    mixers = [module for module in model.modules() if isinstance(module, Mixer)]
    parts = {part for mixer in mixers for part in other_parts(mixer)}
    return all(is_unmodified(module, (type(module),) if module in parts else known) for module in model.modules())
