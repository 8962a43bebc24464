"""Architecture: the shape of a decoder-only transformer.

It comes from a Hugging Face config.json (hugging_face.py) or from a preset (presets.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from flambeau.llm.models.families.compression_shape import CompressionShape
from flambeau.llm.models.families.gate_limits import GateLimit, GateLimits
from flambeau.llm.models.families.hyper_shape import HyperShape
from flambeau.llm.models.families.indexer_shape import IndexerShape
from flambeau.llm.models.families.layer_sizes import GateKind, LayerSizes
from flambeau.llm.models.families.ngram_shape import NgramShape
from flambeau.llm.models.families.recurrence import Recurrence
from flambeau.llm.models.families.renames import Renames
from flambeau.llm.models.sound_architecture import SoundArchitecture
from flambeau.llm.models.vision_architecture import VisionArchitecture

RopeKind = Literal["linear", "llama3", "yarn", "longrope", "proportional"]
NormKind = Literal["rms", "layer"]
# Of a part; or after its result has been added; or before a part, and what it gives is added to the normalized stream.
NormPlaces = Literal["before", "after", "both", "sum", "stream"]
AlibiKind = Literal["plain", "scaled"]  # scaled like scores, after rounding to bfloat16 (Falcon)
RouterKind = Literal[
    "softmax",
    "grouped_softmax",
    "biased_softmax",
    "biased_sigmoid",
    "zeroed_sigmoid",
    "biased_sqrt_softplus",
    "sigmoid",
    "wide_sigmoid",
    "late_sigmoid",
    "sparse_mixer",
]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu_squared", "xielu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary positions are scaled beyond the length that a model was trained on."""

    kind: RopeKind
    factor: float
    original_length: int = 8192
    low_frequency_factor: float = 1.0  # llama3
    high_frequency_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn, longrope; None: computed from the factor
    short_factors: tuple[float, ...] = ()  # longrope: of each pair of dimensions
    long_factors: tuple[float, ...] = ()  # longrope
    short_mscale: float | None = None  # longrope, in the place of the attention factor (Phi-3.5-MoE)
    long_mscale: float | None = None  # longrope
    mscale: float | None = None  # yarn
    mscale_all_dimensions: float | None = None  # yarn
    truncate: bool = True  # yarn: round the ends of the ramp to whole dimensions
    proportion: float = 1.0  # proportional: of the pairs of dimensions; the others are not rotated

    @property
    def switch_length(self) -> int | None:
        """The longest sequence with the short factors of longrope, where the long ones differ; None: there is none."""
        is_same = (self.short_factors, self.short_mscale) == (self.long_factors, self.long_mscale)
        return None if self.kind != "longrope" or is_same else self.original_length


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """Everything that the network's shape depends on.

    With tensor parallelism, each rank has the architecture of its part: fewer heads, a smaller intermediate size.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    intermediate_size: int
    max_length: int = 2048
    norm_epsilon: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    unrotated_layers: frozenset[int] = frozenset()  # SmolLM 3: layers without rotary positions
    tied_embeddings: bool = False
    qkv_bias: bool = False  # Qwen 2
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # Qwen 3: queries and keys are normalized per head
    windows: tuple[int | None, ...] = ()  # attention window of each layer in tokens; empty: no window
    num_experts: int = 0
    num_experts_per_token: int = 2
    expert_size: int = 0  # the intermediate size of one expert
    normalizes_experts: bool = True  # the weights of the chosen experts sum to one
    dense_layers: frozenset[int] = frozenset()  # layers without experts in a network that has them
    # Parts that Llama does not have; see `extras`.
    norm: NormKind = "rms"
    norm_bias: bool = False  # of a layer norm
    norm_gate_rank: int = 0  # of gates of what layers and experts read, which depend on it (A.X-K2); 0: none
    norm_offset: float = 0.0  # added to the weights of norms (Gemma stores their difference from 1)
    norm_places: NormPlaces = "before"  # of attention and the feed-forward layer
    has_last_norm: bool = True  # before the head (OPT-350M has none)
    has_first_norm: bool = True  # before attention of the first layer (ModernBERT has one after the embeddings)
    head_layer: Activation | None = None  # a layer with this activation and a norm, before the head (ModernBERT)
    head_layer_bias: bool = False
    tied_bias: bool = False  # of a head whose weights are the embeddings (ModernBERT)
    is_parallel: bool = False  # attention and the feed-forward layer have the same input, and one norm
    has_gate: bool = True  # of the feed-forward layer
    activation: Activation = "silu"
    rotary_size: int | None = None  # the dimensions of a head that are rotated; None: all
    local_rope_theta: float | None = None  # of layers with a window, whose positions are not scaled (Gemma 3)
    wide_qk_norm: bool = False  # one norm over all heads instead of one per head (OLMo 2)
    late_qk_norm: bool = False  # queries and keys are normalized after the rotation (Hunyuan)
    separate_qk_norm: bool = False  # a layer norm per head, and each head has its own weights (Cohere)
    has_norm_weight: bool = True  # of a layer norm (OLMo 1 has none)
    parallel_norms: bool = False  # in parallel layers, the feed-forward layer has a norm of its own (GPT-NeoX)
    clip_qkv: float | None = None  # the largest absolute value in queries, keys and values
    latent_scale: float = 1.0  # of a normalized latent (LongCat)
    latent_epsilon: float = 1e-6  # of the norms of latents
    normalizes_rotated_keys: bool = False  # with a latent: before the rotation (Dots 3)
    position_scales: bool = False  # heads scale their queries by the logarithm of the position (Mistral Large 4)
    learned_rope: bool = False  # the files have a factor of each rotation (Mistral Large 4)
    latent_size: int = 0  # of the latent that keys and values are computed from (DeepSeek); 0: there is none
    query_latent_size: int = 0  # with a latent: the size of that of queries; 0: there is none
    unrotated_size: int = 0  # with a latent: of a head of queries and keys, beside `rotary_size`
    value_size: int = 0  # of a head of values; 0: the size of a head
    is_differential: bool = False  # half of the heads are subtracted from the others (DiffLlama)
    value_scale: float = 1.0  # values are multiplied with it (MiMo V2)
    paired_rope: bool = False  # with a latent: the two coordinates of a rotation lie side by side
    joins_query_latents: bool = (
        False  # queries and gates of values come from latents before and after their norm (A.X-K2)
    )
    gates_heads: bool = False  # with a latent: a gate for what each head gives (Ling 3)
    indexer: IndexerShape | None = None  # attention is to some tokens only
    compression: CompressionShape | None = None  # attention to windows and compressed entries (DeepSeek V4)
    has_sinks: bool = False  # a score per head that takes part in the softmax and has no value (gpt-oss)
    sinks_in_windows: bool = False  # only layers with a window have them (MiMo V2)
    alibi: AlibiKind | None = None  # scores fall with the distance instead of rotary positions (BLOOM)
    chunks: tuple[int | None, ...] = ()  # tokens of a chunk in each layer, which attend to each other only (Llama 4)
    rotated_qk_norm: bool = False  # queries and keys are normalized after the rotation, without weights (Llama 4)
    tempers_rotated: bool = False  # temperatures are for rotated layers, and counted from 0 (Ministral 3)
    temperature_length: int = 0  # in unrotated layers, queries grow each time that so many tokens have passed …
    temperature_scale: float = 0.0  # … by this times a logarithm (Llama 4)
    learned_positions: bool = False  # embeddings of positions are added to those of tokens (GPT-2)
    position_offset: int = 0  # of the first learned position (OPT)
    embedding_size: int = 0  # of embeddings, projected to the hidden size and back (OPT-350M); 0: the hidden size
    embedding_norm: bool = False  # a norm after the embeddings (BLOOM)
    scales_expert_inputs: bool = False  # experts get inputs times their weights, and are added up as they are (Llama 4)
    expert_bias: bool = False  # of the router and of the experts (gpt-oss)
    gate_limits: GateLimits | None = None  # of experts and feed-forward layers
    hashed_layers: frozenset[int] = frozenset()  # a table says which experts compute a token (DeepSeek V4)
    num_zero_experts: int = 0  # experts after the others, which give their inputs (LongCat)
    # Of every two layers, the first also has experts. What they give is added after the second (LongCat).
    has_shortcuts: bool = False
    shared_expert_size: int = 0  # the intermediate size of an expert that computes all tokens; 0: none
    expert_latent_size: int = 0  # what routed experts read and write, projected from the hidden size and back; 0: that
    gates_shared_expert: bool = False  # Qwen 2 MoE
    expert_norm: bool = False  # what layers of experts give is normalized (A.X-K1)
    router: RouterKind = "softmax"  # how experts are chosen
    router_jitter: float = 0.0  # of a sparse mixer
    num_expert_groups: int = 1  # experts are chosen from the best groups only …
    num_chosen_groups: int = 1  # … of which there are so many
    routed_scale: float = 1.0  # of the weights of the chosen experts
    attention_scale: float | None = None  # None: the root of the head size
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what attention and the feed-forward layer add
    logit_scale: float = 1.0
    # Of a normalized stream and of what is added, for attention, recurrent and feed-forward layers (MiniMax).
    stream_scales: tuple[tuple[float, float], ...] = ()
    recurrence: Recurrence | None = None  # layers with a state of fixed size instead of keys and values
    has_mlp: bool = True  # False: a layer is only its recurrence (Mamba 2) or attention (Nemotron-H) …
    feed_forward_layers: frozenset[int] = frozenset()  # … and these are only a feed-forward layer (Nemotron-H)
    attention_only_layers: frozenset[int] = frozenset()  # and these only attention (Llama-Nemotron)
    wide_residual: bool = False  # layers are added up in float32 whatever the type of the network (Mamba 2)
    attention_input_scale: float = 1.0  # of attention beside a recurrence (Falcon H1)
    attention_output_scale: float = 1.0
    mlp_scales: tuple[float, float] = (1.0, 1.0)  # of the gate and of the output of the feed-forward layer (Falcon H1)
    gates_attention: bool = False  # queries come with gates for the outputs of attention (Qwen3-Next)
    attention_gate: GateKind | None = None  # a layer of its own that gates the outputs of attention (Trinity)
    reversed_rope: bool = False  # positions rotate the other way round (NanoChat)
    inner_norms: bool = False  # before the last layers of attention and of the feed-forward layer (BitNet)
    shapes: tuple[LayerSizes, ...] = ()  # of each layer; empty: all are alike (Gemma 4)
    shared_keys: tuple[int, ...] = ()  # the layer whose keys and values each one reads; empty: its own (Gemma 3n)
    normalizes_values: bool = False  # of attention, per head and without weights (Gemma 4)
    scales_layers: bool = False  # the outputs of each layer are multiplied with a number of its own (Gemma 4)
    layer_input_size: int = 0  # of embeddings that each layer has of its own (Gemma 3n); 0: there are none
    layer_input_vocab: int = 0  # the number of those embeddings
    experts_beside_mlp: bool = False  # layers have a feed-forward layer and experts, whose outputs are added (Gemma 4)
    num_streams: int = 0  # of hidden states, of which layers compute one (Gemma 3n); 0: there is one
    active_stream: int = 0  # the one that layers compute
    scales_stream: bool = False  # before the layer's own embeddings are added
    hyper: HyperShape | None = None  # several streams, of which layers read a sum and change all (DeepSeek V4)
    ngrams: NgramShape | None = None  # embeddings of several tokens, beside some recurrent layers (Qwen 4)
    laurel_size: int = 0  # the rank of a residual connection beside attention, in networks with streams
    sparsity: tuple[float, ...] = ()  # of the activation of each layer: so many gates become zero (Gemma 3n)
    block_layers: tuple[int, ...] = ()  # recurrent layers with a shared block of attention (Zamba 2)
    num_blocks: int = 0  # that these layers use in turn
    adapter_rank: int = 0  # of what each of these layers changes in its block
    adapts_attention: bool = False  # and not only the feed-forward layer
    head_bias: bool = False
    # ---- end of the extras ----
    vision: VisionArchitecture | None = None  # of a model that reads images
    sounds: SoundArchitecture | None = None  # of a model that reads sounds
    image_layer_id: int | None = (
        None  # whose embeddings those of images and sounds have in each layer; None: they have their own
    )
    # Which of three positions (time, row, column) rotates each pair of dimensions (Qwen-VL). Those of a text are equal,
    # so that it is rotated as in a network without.
    position_axes: tuple[int, ...] = ()
    renames: Renames = ()  # of tensors in the files: patterns and what replaces them
    interleaved_rope: bool = False  # in the files only: the coordinates of a pair lie side by side
    interleaved_gates: bool = False  # in the files only: rows of gate and up of experts alternate
    grouped_qkv: bool = False  # in the files only: queries, keys and values of a key-value head lie side by side
    qvk_blocks: int = 0  # in the files only: so many blocks, each with queries, values and keys (CodeGen)
    values_from_keys: frozenset[int] = frozenset()  # in the files only: layers whose keys are projected as their values
    unused: str = ""  # in the files only: a pattern of the names of tensors that are left out
    num_unused_layers: int = 0  # in the files only: layers that predict further tokens, after the others
    normalized_head: bool = False  # in the files only: rows of the head have to be normalized (Baichuan 2)
    transposed: str = ""  # in the files only: a pattern of the names of weights that are transposed
    either_order: bool = False  # in the files only: stacks of experts may be transposed, which their shapes tell
    flat_experts: bool = False  # in the files only: the rows of all experts lie one below the other (DBRX)
    zeros: str = ""  # in the files only: a pattern of the names of parameters that they may lack, which are zeros
    sinusoids: bool = False  # in the files only: they lack the embeddings of positions, which are sines and cosines
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    dtype: str = "float32"
    unknown_keys: tuple[str, ...] = field(default=(), compare=False)  # of config.json, which may have an effect
    source: Mapping[str, Any] = field(default_factory=dict, compare=False)  # config.json or params.json

    def of_layer(self, layer: int) -> Architecture:
        """The architecture with the sizes of one layer."""
        if not self.shapes:
            return self
        shape = self.shapes[layer]
        return replace(
            self,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_size=shape.head_size,
            intermediate_size=shape.intermediate_size,
            rotary_size=shape.rotary_size,
            **({} if shape.latents is None else shape.latents._asdict()),
        )

    def intermediate_size_of(self, layer: int) -> int:
        """That of one layer."""
        return self.shapes[layer].intermediate_size if self.shapes else self.intermediate_size

    def key_layer(self, layer: int) -> int:
        """The layer whose keys and values this one reads."""
        return self.shared_keys[layer] if self.shared_keys else layer

    def index_size(self, layer: int) -> int:
        """The size of a token's key for the indexer of a layer; 0: there is none."""
        return self.indexer.cached_size if self.indexer is not None and self.indexer.chooses_in(layer) else 0

    def window(self, layer: int) -> int | None:
        """The attention window of a layer in tokens; None: no window."""
        return self.windows[layer] if self.windows else None

    def chunk(self, layer: int) -> int | None:
        """The tokens of a chunk that attend to each other; None: there are no chunks."""
        return self.chunks[layer] if self.chunks else None

    @property
    def switch_length(self) -> int | None:
        """The longest sequence that keeps its rotary factors; longer ones have others from their first token on."""
        return self.rope_scaling.switch_length if self.rope_scaling is not None else None

    @property
    def num_hidden_streams(self) -> int:
        """The streams of hidden states between layers; 0: there is one."""
        return self.num_streams if self.hyper is None else self.hyper.num_streams

    @property
    def keys_are_values(self) -> bool:
        """Whether the cache has one key for all heads, and no values."""
        return self.latent_size > 0 or self.compression is not None

    @property
    def output_size(self) -> int:
        """What attention gives for each head."""
        return self.value_size or self.head_size

    @property
    def projected_value_size(self) -> int:
        """What a key-value head of values is computed as; two are cached together where heads are subtracted."""
        return self.head_size if self.is_differential else self.output_size

    @property
    def extras(self) -> tuple[str, ...]:
        """The parts that Llama does not have; a kernel that knows none of them must not compute this network."""
        return tuple(one.name for one in fields(self) if one.name in EXTRAS and getattr(self, one.name) != one.default)

    @property
    def recurrent_layers(self) -> frozenset[int]:
        """The layers that have a state."""
        return self.recurrence.layers if self.recurrence is not None else frozenset()

    @property
    def attending_layers(self) -> frozenset[int]:
        """The layers that have keys and values."""
        if self.block_layers:
            return frozenset(self.block_layers)
        has_both = self.recurrence is not None and self.recurrence.is_beside_attention
        others = self.feed_forward_layers | (frozenset() if has_both else self.recurrent_layers)
        return frozenset(range(self.num_layers)) - others

    @property
    def caching_layers(self) -> frozenset[int]:
        """The layers that store keys and values."""
        return frozenset(layer for layer in self.attending_layers if self.key_layer(layer) == layer)

    @property
    def attention_span(self) -> int | None:
        """The tokens whose attention takes about as long as all else that is computed for a token.

        None if no layer attends to all tokens. Attention has two products for each token, head and coordinate, which
        take twice as long as those of matrices.
        """
        wide = sum(self.window(layer) is None and self.chunk(layer) is None for layer in self.attending_layers)
        if not wide:
            return None
        hidden, heads, kv_heads = self.hidden_size, self.num_heads * self.head_size, self.num_kv_heads * self.head_size
        size = self.intermediate_size
        if self.num_experts:
            size = self.num_experts_per_token * self.expert_size + self.shared_expert_size
        num_weights = 2 * hidden * (heads + kv_heads) + (3 if self.has_gate else 2) * hidden * size
        return max(1, self.num_layers * num_weights // (4 * heads * wide))

    def has_experts(self, layer: int) -> bool:
        return self.num_experts > 0 and layer not in self.dense_layers

    def has_sinks_in(self, layer: int) -> bool:
        return self.has_sinks and not (self.sinks_in_windows and self.window(layer) is None)

    def expert_limit(self, layer: int) -> GateLimit | None:
        return None if self.gate_limits is None else self.gate_limits.of_experts(layer)

    def mlp_limit(self, layer: int) -> GateLimit | None:
        """That of a feed-forward layer, or of an expert for all tokens."""
        return None if self.gate_limits is None else self.gate_limits.of_others(layer)


_NAMES = [one.name for one in fields(Architecture)]
EXTRAS = frozenset(_NAMES[_NAMES.index("norm") : _NAMES.index("head_bias") + 1])
