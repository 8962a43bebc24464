"""Whether the kernels for adapters give what their twin gives, for the shapes of a network's layers.

Shapes: T rows · E hidden · S parts of a sum · P parts of the inner sums · L slots · X ranks of all segments, R of one
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import torch
from torch import Tensor
from torch.nn import functional as F

from flambeau.llm.backends.cuda import lora_activation, lora_kernel, lora_norm, lora_products
from flambeau.llm.backends.cuda.linear import KernelLinear
from flambeau.llm.backends.cuda.linear_choice import kernel_linear
from flambeau.llm.backends.cuda.lora_activation import GATED_SEGMENTS
from flambeau.llm.backends.cuda.lora_norm import Unexpanded
from flambeau.llm.backends.cuda.lora_slots import LayerSlots, LoraSlots, plain_lora
from flambeau.llm.backends.cuda.norm import NormParameters
from flambeau.llm.models.transformer import Transformer

MAX_ERROR = 0.02  # of what adapters add, of the kernels' twin; an error gives about 1
CHECKED_ROWS = (1, 5, 12, 20, 28, 40)  # for each number of rows that kernels are compiled for
EPSILON = 1e-5
BEFORE = {"qkv_proj": "down_proj", "gate_up_proj": "o_proj", "up_proj": "o_proj"}  # the norm that they follow


@torch.inference_mode()
def find_error(slots: LoraSlots, model: Transformer) -> str | None:
    """What the kernels compute differently from their twin, for the shapes of all layers; None: nothing."""
    layers, linears = random_layers(slots), linears_of(slots, model)
    for num_rows in CHECKED_ROWS:
        places_T = torch.arange(num_rows, device=next(iter(layers.values())).a_LXI.device) % (slots.num_slots + 1)
        places_T = places_T + (num_rows == 1)
        for name, layer in layers.items():
            errors = chain(
                layer_errors(layers, name, layer, places_T), product_errors(name, layer, linears[name], places_T)
            )
            if (found := next(errors, None)) is not None:
                return f"{found}, of {num_rows} rows"
    return None


def random_layers(slots: LoraSlots) -> dict[str, LayerSlots]:
    """Random matrices for one layer of each name, without the number; all with this name have the same shape."""
    generator = torch.Generator().manual_seed(0)
    found: dict[str, LayerSlots] = {}
    for name, like in slots.layers.items():
        leaf = name.rpartition(".")[2]
        if leaf not in found:
            a_LXI, b_LRO = (torch.randn(each.shape, generator=generator).to(each) for each in (like.a_LXI, like.b_LRO))
            together = None if like.b_OY is None else torch.empty_like(like.b_OY)
            found[leaf] = LayerSlots(like.shape, a_LXI, b_LRO, like.is_together, together)
            for slot in range(like.num_slots):
                found[leaf].arrange(slot)
    return found


def linears_of(slots: LoraSlots, model: Transformer) -> dict[str, KernelLinear]:
    """One layer of each name, as random_layers."""
    found: dict[str, KernelLinear] = {}
    for name in slots.layers:
        leaf = name.rpartition(".")[2]
        if leaf not in found:
            gates = leaf == "gate_up_proj"
            activation = model.arch.activation if gates else None
            found[leaf] = kernel_linear(model.get_submodule(name), gates=gates, activation=activation)
    return found


def layer_errors(layers: dict[str, LayerSlots], name: str, layer: LayerSlots, places_T: Tensor) -> Iterator[str]:
    """What is wrong with a layer, and with the kernels that compute it together with others."""
    shape, like = layer.shape, layer.a_LXI
    x, y, other = (random_rows(places_T, size, like, size) for size in (shape.inputs, shape.outputs, shape.outputs + 1))
    inner_PTX = lora_kernel.shrink(x, places_T, layer)
    found, expected = y.clone(), plain_lora(y, x, places_T, layer)
    lora_kernel.expand(found, inner_PTX, places_T, layer)
    if not (error := error_of_added(found, expected, y)) <= MAX_ERROR:
        yield f"{shape.outputs} outputs of {name} are off by {error:.0%}"
    if not torch.equal(found[places_T == 0], y[places_T == 0]):
        yield f"rows without an adapter are changed by {name}"
    parts = torch.stack((y.float() - other[:, 1:].float(), other[:, 1:].float()))
    if name not in BEFORE:
        return
    if name != "qkv_proj":
        yield from activation_errors(layers, name, layer, parts, expected, inner_PTX, places_T)
    yield from norm_errors(layers, name, layer, places_T)


def activation_errors(
    layers: dict[str, LayerSlots],
    name: str,
    layer: LayerSlots,
    parts_STN: Tensor,
    expected_TN: Tensor,
    inner_PTX: Tensor,
    places_T: Tensor,
) -> Iterator[str]:
    """What is wrong with the outputs after an activation, and with their product with the next layer's A."""
    down = layers["down_proj"]
    active, sums = lora_activation.expand_active(parts_STN, inner_PTX, places_T, layer, "relu", layer.a_LXI.dtype, down)
    gates = len(layer.shape.starts) == GATED_SEGMENTS
    expected = F.relu(expected_TN)
    if gates:
        gate, up = expected_TN.chunk(2, dim=-1)
        expected = F.relu(gate) * up
    if not (error := difference(active, expected)) <= MAX_ERROR:
        yield f"{active.shape[1]} outputs of {name} with its activation are off by {error:.0%}"
    assert sums is not None
    if not (error := shrink_error(sums, active, places_T, down)) <= MAX_ERROR:
        yield f"the activations of {name} are off by {error:.0%} for the next adapter"


def norm_errors(layers: dict[str, LayerSlots], name: str, layer: LayerSlots, places_T: Tensor) -> Iterator[str]:
    """What is wrong with a norm that adds the adapters of the layer before, and multiplies with A of the one after."""
    before, like = layers.get(BEFORE[name]), layer.a_LXI
    if before is None:  # experts are there
        return
    hidden = layer.shape.inputs
    given, x, y, other = (
        random_rows(places_T, before.shape.inputs if seed == 1 else hidden, like, seed) for seed in range(1, 5)
    )
    parts = torch.stack((y.float() - other.float(), other.float()))
    norm = NormParameters(gain=random_rows(places_T[:1], hidden, like, 5)[0], epsilon=EPSILON)
    plain = x.float() + y.float()
    expected = plain_lora(plain, given, places_T, before)
    own_PTX = lora_kernel.shrink(given, places_T, before)
    spreads = layer.b_OY is not None and lora_norm.can_shrink(layer, len(places_T))
    for all_slots in (False, True) if spreads else (False,):
        given_inner = spread(own_PTX.sum(0), places_T, before)[None].float() if all_slots else own_PTX
        sums = Unexpanded(y=parts.clone(), inner=given_inner, slots=before, places_T=places_T)
        kept, normal, inner = lora_norm.normalize(norm, x.clone(), sums, layer, places_T, spreads=all_slots)
        if not (error := error_of_added(kept, expected, plain)) <= MAX_ERROR:
            yield f"the residual stream before {name} is off by {error:.0%}"
        if not difference(kept[places_T == 0], plain[places_T == 0]) <= MAX_ERROR:
            yield f"rows without an adapter are changed before {name}"
        assert norm.gain is not None
        if not (error := difference(normal, F.rms_norm(expected, (hidden,), norm.gain.float(), EPSILON))) <= MAX_ERROR:
            yield f"the norm before {name} is off by {error:.0%}"
        assert inner is not None
        if all_slots:
            error = difference(inner, spread(lora_kernel.shrink(normal, places_T, layer).sum(0), places_T, layer))
        else:
            error = shrink_error(inner, normal, places_T, layer)
        if not error <= MAX_ERROR:
            yield f"what the norm before {name} gives to adapters is off by {error:.0%}"


def product_errors(name: str, layer: LayerSlots, linear: KernelLinear, places_T: Tensor) -> Iterator[str]:
    """What is wrong with a layer's products in whose launch are those of adapters."""
    num_rows = len(places_T)
    x_TI = random_rows(places_T, layer.shape.inputs, layer.a_LXI, 6)
    expanding = lora_products.expanding_division(linear, layer, num_rows)
    shrinking = lora_products.shrinking_division(linear, layer, num_rows)
    plain = linear.layer(x_TI)
    if expanding is not None:
        inner_TX = spread(lora_kernel.shrink(x_TI, places_T, layer).sum(0), places_T, layer).to(x_TI.dtype)
        found = whole(lora_products.multiply_and_expand(x_TI, linear, layer, expanding, inner_TX))
        expected = plain_lora(plain, x_TI, places_T, layer)
        if linear.gates:
            gate, up = expected.chunk(2, dim=-1)
            expected = F.silu(gate) * up
        for rows in (places_T > 0, places_T == 0):
            if not (error := difference(found[rows], expected[rows])) <= MAX_ERROR:
                yield f"the product of {name} with its adapters is off by {error:.0%}"
    if shrinking is not None:
        y, inner = lora_products.multiply_and_shrink(x_TI, linear, layer, shrinking)
        if not (error := difference(whole(y), plain)) <= MAX_ERROR:
            yield f"the product of {name} beside its adapters is off by {error:.0%}"
        own_PTX = Unexpanded(y=y, inner=inner, slots=layer, places_T=places_T).own_inner()
        if not (error := shrink_error(own_PTX, x_TI, places_T, layer)) <= MAX_ERROR:
            yield f"what the product of {name} gives to adapters is off by {error:.0%}"


def spread(inner_TX: Tensor, places_T: Tensor, layer: LayerSlots) -> Tensor:
    """Inner sums at the places of each row's slot, and zeros: [T, X·L], for each segment the ranks of all slots."""
    rows = places_T.nonzero().flatten()
    found = inner_TX.new_zeros(len(inner_TX), len(layer.shape.starts), layer.num_slots, layer.rank)
    found[rows, :, places_T[rows] - 1] = inner_TX[rows].view(len(rows), -1, layer.rank)
    return found.flatten(1)


def whole(y: Tensor) -> Tensor:
    return y.sum(0) if y.dim() == 3 else y


def random_rows(places_T: Tensor, size: int, like: Tensor, seed: int) -> Tensor:
    return torch.randn(len(places_T), size, generator=torch.Generator().manual_seed(seed)).to(like)


def difference(found: Tensor, expected: Tensor) -> float:
    """How far numbers are off, as a share of their norm; 0 if there are none."""
    return float((found.float() - expected.float()).norm() / expected.float().norm()) if len(found) else 0.0


def error_of_added(found: Tensor, expected: Tensor, without: Tensor) -> float:
    """How far sums are off, as a share of what adapters add."""
    return float((found.float() - expected).norm() / (expected - without.float()).norm())


def shrink_error(found_PTX: Tensor, x_TI: Tensor, places_T: Tensor, layer: LayerSlots) -> float:
    """How far products with A are off, of the rows that have adapters."""
    rows = places_T.nonzero().flatten()
    a_TXI = layer.a_LXI[places_T[rows] - 1].float()
    found_TX = found_PTX.sum(0)[rows]
    return difference(found_TX, torch.einsum("txi,ti->tx", a_TXI, x_TI[rows].float()))
