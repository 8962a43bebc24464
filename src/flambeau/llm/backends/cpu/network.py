"""CpuNetwork: a whole step of a decoder in one call of the C++ kernels; tested against EagerBackend.

Weights that bfloat16 or float16 represents exactly are packed as such: half the memory is read, with the results of
float32. With integer weights, the last layer has 8-bit weights too.

Shapes: N rows · T tokens of the step · S sequences · J further tokens of each · V vocabulary
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from flambeau.llm.adapters.adapter_store import AdapterStore
from flambeau.llm.adapters.lora_weights import LoraPart
from flambeau.llm.backends.cpu.attention import CACHE_KINDS, HEAD_SIZES
from flambeau.llm.backends.cpu.bindings import (
    ACTIVATIONS,
    KINDS,
    CExperts,
    CLayer,
    CLoraLayer,
    CLoraPart,
    CMatrix,
    CNetwork,
    CNorm,
    CTokens,
    index_pointers,
    kernels,
)
from flambeau.llm.backends.cpu.packed_experts import LEAVES, PackedStack, can_pack, packed_stack
from flambeau.llm.backends.cpu.packed_linear import INT8_GROUP, PackedLinear, pack_quantized, packed
from flambeau.llm.backends.eager import alibi_biases
from flambeau.llm.executor.inputs import StepInputs
from flambeau.llm.executor.kv_cache import KVCache
from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.attention import Attention
from flambeau.llm.models.hidden_states import HiddenStates
from flambeau.llm.models.moe import Experts, SharedExpert, SparseMLP
from flambeau.llm.models.norms import RMSNorm
from flambeau.llm.models.rope import Rotation
from flambeau.llm.models.transformer import Decoder, PlainMLP, Transformer, is_unmodified
from flambeau.llm.quantize.int4 import Int4Linear
from flambeau.llm.quantize.packed_layers import CpuInt4Linear, CpuInt8Linear
from flambeau.llm.quantize.quantizer import ExpertStack
from flambeau.llm.quantize.row_scaled import Int8Linear

INTEGER_LAYERS = (Int8Linear, CpuInt8Linear, Int4Linear, CpuInt4Linear)
SPARSE = (SparseMLP, Experts, SharedExpert, ExpertStack, PackedStack)
ROUTERS = ("softmax", "biased_softmax", "biased_sigmoid")
# Parts beyond Llama's that the kernels compute.
EXTRAS = frozenset(
    {
        "norm",
        "norm_bias",
        "norm_offset",
        "norm_places",
        "has_norm_weight",
        "has_last_norm",
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
        "has_sinks",
        "alibi",
        "learned_positions",
        "position_offset",
        "embedding_norm",
        "expert_bias",
        "swiglu_limit",
        "swiglu_alpha",
        "shared_expert_size",
        "gates_shared_expert",
        "router",
        "routed_scale",
        "attention_scale",
        "attention_softcap",
        "logit_softcap",
        "embedding_scale",
        "residual_scale",
        "logit_scale",
        "head_bias",
    }
)
# Float32 weights that no smaller type represents stay as they are in larger networks, mapped from their files.
PACKED_FLOAT32_BYTES = 1 << 30


class NetworkPointers:
    """Structures that point to weights and caches, which are kept alive with them."""

    def __init__(self, cache: KVCache, *, packs_float32: bool) -> None:
        self._cache, self._packs_float32 = cache, packs_float32
        self._references: list[Any] = [cache]

    def network(
        self,
        arch: Architecture,
        layers: Iterable[nn.Module],
        rotation: Rotation,
        *,
        body: Decoder | None,
        head: CMatrix,
        recorded: tuple[int, ...],
    ) -> CNetwork:
        """A network of these layers; without the other parts of a decoder, hidden states are its input."""
        made = [self._layer(arch, layer, rotation, i) for i, layer in enumerate(layers)]
        self._references.append(array := (CLayer * len(made))(*made))
        embedding = None if body is None else body.embed_tokens.weight
        dtype = torch.float32 if embedding is None else embedding.dtype
        biases_HP = place_biases(arch)
        return CNetwork(
            arch.hidden_size,
            arch.num_heads,
            arch.num_kv_heads,
            arch.head_size,
            arch.rotary_size or arch.head_size,
            self._cache.block_size,
            len(made),
            max(arch.intermediate_size, arch.expert_size, arch.shared_expert_size),
            arch.num_experts,
            ACTIVATIONS.index(arch.activation),
            arch.has_gate,
            CACHE_KINDS[self._cache.keys[0].dtype],
            CACHE_KINDS[dtype],
            arch.is_parallel,
            arch.wide_qk_norm,
            arch.late_qk_norm,
            array,
            self._pointer(embedding),
            self._pointer(None if body is None else learned_positions(body, arch)),
            self._norm(getattr(body, "embed_norm", None)),
            self._norm(getattr(body, "norm", None)),
            head,
            arch.norm_epsilon,
            attention_scale(arch),
            arch.attention_softcap or 0.0,
            self._pointer(biases_HP),
            0 if biases_HP is None else biases_HP.shape[1],
            arch.clip_qkv or 0.0,
            float(torch.tensor(arch.embedding_scale, dtype=dtype)),  # rounded as the network's numbers are
            arch.residual_scale,
            arch.logit_scale,
            arch.logit_softcap or 0.0,
            self._pointer(torch.tensor(recorded, dtype=torch.int64)),
            len(recorded),
        )

    def _layer(self, arch: Architecture, layer: Any, rotation: Rotation, number: int) -> CLayer:
        attention, mlp, cache = layer.self_attn, layer.mlp, self._cache
        has_experts = isinstance(mlp, SparseMLP)
        return CLayer(
            *(self._norm(getattr(layer, name, None)) for name in norm_names(arch)),
            self._qk_norm(attention),
            *(self._rotation(rotation, attention)),
            *map(self.matrix, (attention.qkv_proj, attention.o_proj)),
            *((CMatrix(), CMatrix()) if has_experts else self._feed_forward(mlp)),
            self._experts(mlp) if has_experts else None,
            *map(self._pointer, (cache.keys[number], cache.values[number])),
            arch.window(number) or 0,
            self._pointer(None if attention.sinks is None else attention.sinks.detach().float()),
        )

    def _feed_forward(self, mlp: Any) -> tuple[CMatrix, CMatrix]:
        up = mlp.up_proj if isinstance(mlp, PlainMLP) else mlp.gate_up_proj
        return self.matrix(up), self.matrix(mlp.down_proj)

    def _experts(self, mlp: SparseMLP) -> Any:
        experts, shared, shared_gate = mlp.experts, mlp.shared_expert, mlp.shared_expert_gate
        weight, bias = mlp.gate.weight.float(), mlp.gate.bias
        arrays = [(CMatrix * len(weight))(*self._expert_matrices(experts, leaf)) for leaf in LEAVES]
        made = CExperts(
            self._plain(weight, None if bias is None else bias.float()),
            self._pointer(None if mlp.score_bias is None else mlp.score_bias.detach().float()),
            *arrays,
            *((CMatrix(), CMatrix()) if shared is None else self._feed_forward(shared)),
            CMatrix() if shared_gate is None else self.matrix(shared_gate),
            len(weight),
            mlp.settings.num_chosen,
            mlp.router == "biased_sigmoid",
            mlp.normalizes_experts,
            ACTIVATIONS.index(experts.kind),
            mlp.routed_scale,
            experts.limit or 0.0,
            experts.alpha,
        )
        self._references += [*arrays, made]
        return ctypes.pointer(made)

    def _expert_matrices(self, experts: Experts, leaf: str) -> Iterator[CMatrix]:
        weights, biases_NO = getattr(experts, leaf), getattr(experts, f"{leaf}_bias")
        stack = packed_stack(weights, packs_float32=self._packs_float32)
        self._references.append(stack)
        for number in range(len(weights)):
            matrix = stack.matrix(number) if stack is not None else self._plain(weights[number])
            matrix.bias = self._pointer(None if biases_NO is None else biases_NO[number].detach().float())
            yield matrix

    def _plain(self, weight_OI: Tensor, bias: Tensor | None = None) -> CMatrix:
        """Float32 weights as they are."""
        pointers = self._pointer(weight_OI.detach()), self._pointer(None if bias is None else bias.detach())
        return CMatrix(KINDS.index("plain"), *pointers, weight_OI.shape[1], len(weight_OI), 1)

    def _norm(self, norm: Any) -> CNorm:
        if norm is None or isinstance(norm, nn.Identity):
            return CNorm()
        weight, bias = norm_weights(norm)
        return CNorm(self._pointer(weight), self._pointer(bias))

    def _qk_norm(self, attention: Attention) -> CNorm:
        """The weights of all heads of queries and keys, one after the other."""
        if attention.q_norm is None or attention.k_norm is None:
            return CNorm()
        sides = (attention.q_norm, attention.num_heads), (attention.k_norm, attention.num_kv_heads)
        parts = [(norm_weights(norm), count * attention.head_size) for norm, count in sides]
        weight = torch.cat([repeated(weight, size) for (weight, _), size in parts])
        biases = [repeated(bias, size) for (_, bias), size in parts if bias is not None]
        return CNorm(self._pointer(weight), self._pointer(torch.cat(biases) if biases else None))

    def _rotation(self, rotation: Rotation, attention: Any) -> tuple[int | None, int | None]:
        if not attention.is_rotated:
            return None, None
        tables = rotation.local if attention.is_local and rotation.local is not None else rotation
        return self._pointer(tables.cos), self._pointer(tables.sin)

    def matrix(self, layer: Any) -> CMatrix:
        one = packed(layer, packs_float32=self._packs_float32)
        if one is not None:
            self._references.append(one)
            return one.matrix
        return self._plain(layer.weight, layer.bias)

    def _pointer(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        tensor = tensor.contiguous()
        self._references.append(tensor)
        return tensor.data_ptr()


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
        names = [f"model.layers.{i}.{name}" for i in range(arch.num_layers) for name in matrix_names(arch, i)]
        self._lora = None if adapters is None else LoraTable(adapters, names)

    def run(self, inputs: StepInputs, rows_N: Tensor | None = None) -> Tensor:
        """The logits [N, V] of these tokens, or [T, V] of all of them."""
        num_rows = len(inputs.ids_T) if rows_N is None else len(rows_N)
        rows = None if rows_N is None else index_pointers(rows_N)[0]
        logits_NV = torch.empty(num_rows, self._width)
        threads = torch.get_num_threads()
        tokens = self._tokens(inputs)
        self._library.flambeau_step(self._network, tokens, rows, num_rows, logits_NV.data_ptr(), threads)
        return logits_NV

    def _tokens(self, inputs: StepInputs) -> CTokens:
        """The tokens of a step, and where its hidden states go."""
        tokens = to_ctokens(inputs, self._lora)
        if self._states is not None:
            states_TX = torch.empty(len(inputs.ids_T), self._states_width)
            tokens.states = states_TX.data_ptr()
            self._states.set(states_TX)
        return tokens

    def argmax(self, inputs: StepInputs) -> Tensor:
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


class LoraTable:
    """Pointers to the weights of all adapters; built again when one was loaded or unloaded."""

    def __init__(self, store: AdapterStore, names: list[str]) -> None:
        self._store, self._names = store, names
        self._numbers: tuple[int, ...] = ()
        self._table: Any = None
        self._references: list[Any] = []

    def places(self, adapters_T: Tensor) -> Tensor:
        """Where the adapter of each token is in the table; 0: it has none."""
        if self._numbers != tuple(self._store.adapters):
            self._build()
        order = {number: i for i, number in enumerate((0, *self._numbers))}
        return torch.tensor([order[number] for number in adapters_T.tolist()])

    @property
    def pointer(self) -> int:
        return ctypes.addressof(self._table)

    def _build(self) -> None:
        self._numbers, self._references = tuple(self._store.adapters), []
        layers = [CLoraLayer()] * len(self._names)  # without an adapter
        for adapter in self._store.adapters.values():
            layers += [self._layer(adapter.parts.get(name, [])) for name in self._names]
        self._table = (CLoraLayer * len(layers))(*layers)

    def _layer(self, parts: list[LoraPart]) -> CLoraLayer:
        found = []
        for part in parts:
            a_RI, b_RO = part.a_RI.float().contiguous(), part.b_OR.t().float().contiguous()
            self._references += [a_RI, b_RO]
            found.append(CLoraPart(a_RI.data_ptr(), b_RO.data_ptr(), len(a_RI), part.start, len(part.b_OR)))
        self._references.append(array := (CLoraPart * len(found))(*found))
        return CLoraLayer(array, len(found))


def to_ctokens(inputs: StepInputs, lora: LoraTable | None = None) -> CTokens:
    """The inputs of a step as a C structure."""
    ids_T, tables_SB = inputs.ids_T, inputs.block_tables_SB
    places = index_pointers(ids_T, inputs.positions_T, inputs.slots_T, inputs.query_starts, tables_SB)
    if lora is None or inputs.adapters_T is None:
        return CTokens(*places, len(ids_T), *tables_SB.shape)
    adapters_T = lora.places(inputs.adapters_T)
    tokens = CTokens(*places, len(ids_T), *tables_SB.shape, adapters_T.data_ptr(), lora.pointer)
    tokens.kept = adapters_T  # alive as long as the pointer to it
    return tokens


def matrix_names(arch: Architecture, layer: int) -> tuple[str, str, str, str]:
    """The matrices that adapters may change, in the order of csrc/network.h; of experts, those for all tokens."""
    attention = "self_attn.qkv_proj", "self_attn.o_proj"
    if arch.has_experts(layer):
        return *attention, "mlp.shared_expert.gate_up_proj", "mlp.shared_expert.down_proj"
    return *attention, "mlp.gate_up_proj" if arch.has_gate else "mlp.up_proj", "mlp.down_proj"


def norm_names(arch: Architecture) -> tuple[str, str, str, str]:
    """The norms of a layer: before attention and the feed-forward layer, and after each."""
    if arch.norm_places == "before":
        return "input_layernorm", "post_attention_layernorm", "", ""
    return (
        "input_layernorm",
        "pre_feedforward_layernorm",
        "post_attention_layernorm",
        "post_feedforward_layernorm",
    )


def norm_weights(norm: Any) -> tuple[Tensor, Tensor | None]:
    """The weights of a norm in float32; a layer norm always has both."""
    offset = getattr(norm, "offset", 0.0)
    if isinstance(norm, RMSNorm):
        return norm.weight.detach().float() + offset, None
    weight = norm.weight.detach().float() + offset if norm.weight is not None else torch.ones(norm.size)
    bias = getattr(norm, "bias", None)
    return weight, torch.zeros_like(weight) if bias is None else bias.detach().float()


def repeated(weight: Tensor, size: int) -> Tensor:
    """So many weights, of heads that may share theirs."""
    flat = weight.flatten()
    return flat.repeat(size // len(flat))


def attention_scale(arch: Architecture) -> float:
    return arch.head_size**-0.5 if arch.attention_scale is None else arch.attention_scale


def place_biases(arch: Architecture) -> Tensor | None:
    """What is added to the scores of each head for each place [H, P]; None: nothing."""
    if arch.alibi is None:
        return None
    return alibi_biases(arch.alibi, arch.num_heads, torch.arange(arch.max_length), attention_scale(arch)).squeeze(1)


def learned_positions(body: Decoder, arch: Architecture) -> Tensor | None:
    """The embeddings of positions [P, E] in float32; None: there are none."""
    if body.embed_positions is None:
        return None
    return body.embed_positions.weight.detach()[arch.position_offset :].float()


def last_layer(model: Transformer) -> nn.Module:
    """The last layer; with 8-bit weights if the others have integer weights."""
    head: Any = linear_of(model.model.embed_tokens.weight) if model.lm_head is None else model.lm_head
    if type(head) is nn.Linear and has_integer_weights(model):
        head = pack_quantized(head.weight, "int8", INT8_GROUP, head.bias)
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
        isinstance(layer, INTEGER_LAYERS) or (isinstance(layer, PackedLinear) and layer.kind in ("int8", "int4"))
        for layer in model.modules()
    )


def can_pack_float32(model: Transformer) -> bool:
    return 4 * sum(p.numel() for p in model.parameters() if p.dtype == torch.float32) <= PACKED_FLOAT32_BYTES


def unknown_parts(arch: Architecture) -> list[str]:
    """The parts of a network that the kernels do not compute."""
    unknown = set(arch.extras) - EXTRAS
    if arch.norm_places == "sum":
        unknown.add("norm_places")
    if arch.router not in ROUTERS:
        unknown.add("router")
    return sorted(unknown)


def can_compute(model: Transformer, cache: KVCache) -> bool:
    """Whether the kernels support a network: on a CPU; no sharded layers."""
    return can_attend(model.arch, model.rotation, cache) and has_known_layers(model)


def can_attend(arch: Architecture, rotation: Rotation, cache: KVCache) -> bool:
    """Whether the kernels know the parts of layers and their cache."""
    keys = cache.keys[0]
    if unknown_parts(arch) or not rotation.has_tables:
        return False
    return keys.device.type == "cpu" and keys.dtype in CACHE_KINDS and arch.head_size in HEAD_SIZES


def has_known_layers(model: nn.Module, others: tuple[type[nn.Module], ...] = ()) -> bool:
    """Whether all modules are those that the kernels replace, or of other classes that the caller knows."""
    known = (PackedLinear, *INTEGER_LAYERS, *SPARSE, *others)
    sparse = [module for module in model.modules() if isinstance(module, SparseMLP)]
    if not all(type(each.gate) is nn.Linear and can_pack(each.experts) for each in sparse):
        return False
    return all(is_unmodified(module, known) for module in model.modules())
