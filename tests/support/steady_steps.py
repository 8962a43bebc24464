"""Steps of tiny networks whose logits do not jump where numbers are rounded differently.

A router chooses other experts after the least change of its scores where two of them are almost equal; the logits of a
random network of a few layers are then off by a fifth of their norm or more, which is no error of what computes them.
A norm may also divide by almost nothing. So tests that bound the difference of two computations take tokens for which
neither is the case, by what noise that is larger than that of rounding does to plain PyTorch.

Shapes: T tokens of the step · D draws · E hidden · N experts
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from flambeau.llm.backends.cuda import comparison
from flambeau.llm.backends.eager import EagerBackend
from flambeau.llm.executor.inputs import StepInputs
from flambeau.llm.executor.kv_cache import KVCache
from flambeau.llm.models.moe import SparseMLP
from flambeau.llm.models.transformer import Transformer
from support.llm_steps import BLOCK_SIZE

INPUT_NOISE = 0.05  # of a router's inputs; bfloat16 gives 0.01 in the first layer, and up to 0.03 in the last
NUM_DRAWS = 64  # of it for each token
MAX_WEIGHT_CHANGE = 0.5  # of an expert, by that noise, as a share of the largest weight
PARAMETER_NOISE = 2**-8  # the most that bfloat16 rounds is half of that
NUM_COPIES = 3  # of the network, with that noise
MAX_CHANGE = 0.15  # of a token's logits, by that noise, as a share of their norm
MAX_TRIES = 3000  # of a step; most need less than 100

Steps = list[tuple[str, list[StepInputs]]]


def use_steady_steps(monkeypatch: pytest.MonkeyPatch, model: Transformer) -> None:
    """Let a comparison of this network take steady steps."""
    taken = [(name, one) for name, (one,) in steady_steps(model)]
    monkeypatch.setattr(comparison, "steps", lambda *_, **__: iter(taken))


def steady_steps(model: Transformer, lengths: Sequence[int] | None = None, repeats: int = 1) -> Steps:
    """The steps of a comparison, those of few rows so many times; each token is one for which the network is steady.

    Noise is measured on a CPU, wherever the network is: its steps do not depend on the kernels.
    """
    arch = model.arch
    lengths = [min(length, arch.max_length - comparison.NUM_AFTER) for length in lengths or comparison.LENGTHS]
    has_states = bool(arch.recurrence)
    steps: Steps = [
        (name, [inputs] * (repeats if inputs.query_len else 1))
        for name, inputs in comparison.steps(lengths, BLOCK_SIZE, arch.vocab_size, has_states=has_states)
    ]
    num_blocks = 1 + sum(comparison.blocks_of(length, BLOCK_SIZE) for length in lengths)
    networks = NoisyNetworks(copy.deepcopy(model).cpu(), num_blocks, 2 * len(lengths) if has_states else 0)
    generator = torch.Generator().manual_seed(0)
    return [(name, [networks.steadied(inputs, generator) for inputs in many]) for name, many in steps]


class NoisyNetworks:
    """A network and copies with noise; their caches are those after the same steps."""

    def __init__(self, model: Transformer, num_blocks: int, num_slots: int) -> None:
        arch, dtype = model.arch, model.model.embed_tokens.weight.dtype
        self._vocab_size = arch.vocab_size
        self._networks = [
            EagerBackend(each, KVCache(arch, num_blocks, BLOCK_SIZE, dtype=dtype, num_slots=num_slots))
            for each in (model, *(noisy(model, seed) for seed in range(NUM_COPIES)))
        ]
        self._is_undecided: list[Tensor] = []  # in the layers of the first network
        for module in model.modules():
            if isinstance(module, SparseMLP):
                module.register_forward_pre_hook(lambda *given: self._is_undecided.append(is_undecided(*given)))

    @torch.inference_mode()
    def steadied(self, inputs: StepInputs, generator: torch.Generator) -> StepInputs:
        """The step with other tokens where the network is not steady; it has been computed."""
        before = [each.clone() for each in self._tensors]
        inputs = replace(inputs, ids_T=torch.randint(self._vocab_size, inputs.ids_T.shape, generator=generator))
        for _ in range(MAX_TRIES):
            is_unsteady = self._compute(inputs)
            if not is_unsteady.any():
                return inputs
            for tensor, old in zip(self._tensors, before, strict=True):
                tensor.copy_(old)
            # Sometimes the token before, too: no token may be steady after that one.
            is_before = is_unsteady.roll(-1) & (torch.rand(is_unsteady.shape, generator=generator) < 1 / 16)
            others = torch.randint(self._vocab_size, inputs.ids_T.shape, generator=generator)
            inputs = replace(inputs, ids_T=torch.where(is_unsteady | is_before, others, inputs.ids_T))
        raise AssertionError(f"no tokens of {MAX_TRIES} tries are steady")

    def _compute(self, inputs: StepInputs) -> Tensor:
        """Which tokens [T] of a step are not steady."""
        self._is_undecided.clear()
        rows = torch.arange(len(inputs.ids_T))
        exact, *others = (network.prefill(inputs, rows).float() for network in self._networks)
        limits = MAX_CHANGE * exact.norm(dim=1)
        has_jumped = [~((other - exact).norm(dim=1) <= limits) for other in others]
        return torch.stack([*has_jumped, *self._is_undecided]).any(0)

    @property
    def _tensors(self) -> list[Tensor]:
        """Of all caches."""
        caches = [network.cache for network in self._networks]
        states = [state for cache in caches for layer in cache.states.layers.values() for state in layer]
        return [*states, *(tensor for cache in caches for tensor in cache.tensors)]


def noisy(model: Transformer, seed: int) -> Transformer:
    """A copy whose parameters are a little off."""
    generator, other = torch.Generator().manual_seed(seed), copy.deepcopy(model)
    for parameter in other.parameters():
        if parameter.is_floating_point():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data = (parameter.data * (1 + PARAMETER_NOISE * noise)).to(parameter.dtype)
    return other


def is_undecided(mlp: SparseMLP, given: tuple[Tensor, ...]) -> Tensor:
    """Which tokens [T] could get other experts, or much different weights, by noise in what the router reads."""
    x = given[-1].flatten(0, -2)  # [T, E]
    sizes = x.float().square().mean(dim=-1, keepdim=True).sqrt()
    noise = torch.randn(NUM_DRAWS, *x.shape, generator=torch.Generator().manual_seed(0)) * sizes  # [D, T, E]
    weights, is_chosen = choices(mlp, x)
    found = choices(mlp, (x + INPUT_NOISE * noise).to(x.dtype).flatten(0, 1))
    other_weights, is_other_chosen = (each.view(NUM_DRAWS, *weights.shape) for each in found)
    is_far = (other_weights - weights).abs() > MAX_WEIGHT_CHANGE * weights.amax(dim=-1, keepdim=True)
    return (is_far | (is_other_chosen != is_chosen)).any(-1).any(0)


def choices(mlp: SparseMLP, x: Tensor) -> tuple[Tensor, Tensor]:
    """The weights [T, N] of all experts, and which ones are chosen."""
    weights, chosen = mlp.choose(x)
    zeros = torch.zeros(len(x), mlp.gate.weight.shape[0])
    return zeros.scatter(1, chosen, weights.float()), zeros.bool().scatter(1, chosen, True)
