"""Attention of transformers' networks over the blocks of a cache, through transformers' attention interface.

A network is run once with a function that only records what its attention layers ask for. What the blocks cannot give
(other masks, biases of scores, layers that keep keys elsewhere) is a reason not to use them.

Shapes: B rows · Q tokens of each · T = B * Q tokens of the step · H heads · G key-value heads · D head size ·
P blocks · K tokens of a block · C cached places
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from flambeau.llm.backends.eager import attend_ragged, attend_uniform
from flambeau.llm.backends.eager import attention_mask as causal_mask
from flambeau.llm.executor.inputs import StepInputs
from flambeau.llm.executor.kv_cache import zeros
from flambeau.llm.models.attention import AttentionOptions

PAGED, PROBE = "flambeau", "flambeau_probe"  # names of attention implementations
PLACE = "flambeau_attention"  # the attribute of an attention layer that computes it
FAR = (1 << 17, (1 << 17) + 1, (1 << 17) + 12345)  # places at which masks are compared
UNDERSTOOD = frozenset({"scaling", "dropout", "sliding_window", "softcap", "s_aux", "is_causal"})
WITHOUT_EFFECT = frozenset(  # on the result
    {"position_ids", "use_cache", "cache_position", "output_attentions", "output_hidden_states", "output_router_logits"}
    | {"deterministic", "return_dict", "logits_to_keep", "past_key_values", "layer_idx", "position_embeddings"}
)


class NotPageable(Exception):
    """A network whose attention cannot use the blocks of a cache; the message is the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayer:
    """The shape of one layer's keys and values, and its window in tokens."""

    module: nn.Module = field(compare=False, repr=False)
    num_kv_heads: int
    key_size: int
    value_size: int
    window: int | None

    @property
    def token_size(self) -> int:
        """Numbers that are cached for each token."""
        return self.num_kv_heads * (self.key_size + self.value_size)


# ---- what the layers of a network ask for ----


@dataclass(frozen=True, slots=True)
class CausalMask:
    """What a layer gets as its mask while it is probed."""

    window: int | None


class Probe:
    """Records the calls of a network's attention layers; their results mean nothing."""

    def __init__(self) -> None:
        self.layers: list[AttentionLayer] = []

    def mask(self, *, mask_function: Callable[..., Tensor], **_: Any) -> CausalMask:
        """Stands in for the making of masks."""
        return CausalMask(window_of(mask_function))

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: object, **options: Any
    ) -> tuple[Tensor, None]:
        """Stands in for attention."""
        if not isinstance(attention_mask, CausalMask):
            raise NotPageable("its layers make masks of their own")
        check_options(options)
        window = options.get("sliding_window")
        if window is not None and window != attention_mask.window:
            raise NotPageable(
                f"a layer has a window of {window} tokens and a mask for {attention_mask.window or 'all'}"
            )
        if not getattr(module, "is_causal", True) or options.get("is_causal") is False:
            raise NotPageable("its attention is not causal")
        if key.shape[:3] != value.shape[:3] or key.shape[2] != query.shape[2] or query.shape[1] % key.shape[1]:
            raise NotPageable("its keys and values are not those of the tokens of the step")
        if any(module is layer.module for layer in self.layers):
            raise NotPageable("several layers share one attention module")
        self.layers.append(
            AttentionLayer(
                module=module,
                num_kv_heads=key.shape[1],
                key_size=key.shape[3],
                value_size=value.shape[3],
                window=attention_mask.window,
            )
        )
        return value.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3]), None


def probe(run: Callable[[], object], network: Any) -> list[AttentionLayer]:
    """The attention layers of a network, found while `run` runs it; raises NotPageable."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    recorder, before = Probe(), network.config._attn_implementation
    AttentionInterface.register(PROBE, recorder.attend)
    AttentionMaskInterface.register(PROBE, recorder.mask)
    AttentionInterface.register(PAGED, attend_paged)
    try:
        network.set_attn_implementation(PROBE)
        run()
    except NotPageable:
        raise
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise NotPageable("its layers do more with masks than attention does") from error
    finally:
        network.set_attn_implementation(before)
    if not recorder.layers:
        raise NotPageable("its attention does not go through transformers' attention interface")
    return recorder.layers


def check_options(options: dict[str, Any]) -> None:
    """Raise for an argument of attention that the blocks cannot give."""
    unknown = [key for key, value in options.items() if value is not None and key not in UNDERSTOOD | WITHOUT_EFFECT]
    if unknown:
        raise NotPageable(f"its attention has {', '.join(sorted(unknown))}")
    if options.get("dropout"):
        raise NotPageable("its attention has dropout")


def window_of(mask_function: Callable[..., Tensor]) -> int | None:
    """The window of a mask, whose function is asked about single places; None: all tokens before."""
    windows = {int(row.sum()) for row in far_rows(mask_function)}
    window = None if windows == {place + 1 for place in FAR} else min(windows)
    for place, row in zip(FAR, far_rows(mask_function), strict=True):
        places_C = torch.arange(len(row))
        if not torch.equal(row, causal_mask(torch.tensor([place]), places_C, window)[0]):
            raise NotPageable("its layers have masks other than causal ones with a window")
    return window


def far_rows(mask_function: Callable[..., Tensor]) -> list[Tensor]:
    zero = torch.tensor(0)
    places_C = torch.arange(max(FAR) + 2)
    try:
        return [mask_function(zero, zero, torch.tensor(place), places_C).expand(len(places_C)) for place in FAR]
    except (IndexError, RuntimeError, TypeError) as error:
        raise NotPageable("its masks depend on more than positions") from error


# ---- the layers over the blocks ----


class LayerCache:
    """Tensors [P, K, G, D] of keys and of values; layers may have different shapes. Block 0 is for padding."""

    def __init__(
        self,
        layers: Sequence[AttentionLayer],
        num_blocks: int,
        block_size: int,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        shapes = [(num_blocks, block_size, layer.num_kv_heads) for layer in layers]
        sizes = [(layer.key_size, layer.value_size) for layer in layers]
        self.keys = [zeros((*shape, size), device, dtype) for shape, (size, _) in zip(shapes, sizes, strict=True)]
        self.values = [zeros((*shape, size), device, dtype) for shape, (_, size) in zip(shapes, sizes, strict=True)]


class PagedLayers:
    """The attention of all layers in one step; `inputs` are those of the step."""

    def __init__(self, layers: Sequence[AttentionLayer], cache: LayerCache) -> None:
        self.cache = cache
        self.inputs: StepInputs | None = None
        for number, layer in enumerate(layers):
            setattr(layer.module, PLACE, PagedLayer(self, number, layer.window))


class PagedLayer:
    """The attention of one layer: writes the keys and values of the step, then attends to those of its sequences."""

    def __init__(self, layers: PagedLayers, number: int, window: int | None) -> None:
        self._layers, self._number, self._window = layers, number, window

    def __call__(
        self,
        q_BHQD: Tensor,
        k_BGQD: Tensor,
        v_BGQD: Tensor,
        *,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """To [B, Q, H, D]."""
        inputs = self._layers.inputs
        assert inputs is not None
        keys, values = self._layers.cache.keys[self._number], self._layers.cache.values[self._number]
        q_THD, k_TGD, v_TGD = (x.transpose(1, 2).flatten(0, 1) for x in (q_BHQD, k_BGQD, v_BGQD))
        keys.flatten(0, 1).index_copy_(0, inputs.slots_T, k_TGD.to(keys.dtype))
        values.flatten(0, 1).index_copy_(0, inputs.slots_T, v_TGD.to(values.dtype))
        attend = attend_uniform if inputs.query_len else attend_ragged
        scale = q_BHQD.shape[-1] ** -0.5 if scaling is None else scaling
        y_THD = attend(q_THD, keys, values, inputs, AttentionOptions(scale, self._window, softcap, s_aux))
        return y_THD.view(q_BHQD.shape[0], q_BHQD.shape[2], *y_THD.shape[1:])


def attend_paged(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: object, **options: Any
) -> tuple[Tensor, None]:
    """The attention function that transformers calls; the layer knows its cache."""
    return getattr(module, PLACE)(query, key, value, **options), None
