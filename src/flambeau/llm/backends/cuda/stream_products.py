"""Norms within the quantized products of a few rows: between one product and the next is no launch (csrc/stream.cuh).

A norm multiplies each row of the residual stream with the inverse of its length, and each number with a gain. The
product before it adds its outputs to the stream and writes the rows times the gains; the product after it multiplies
its outputs with the inverse lengths. So nothing waits for whole rows between them.

Shapes: T rows · E hidden · I inputs of the product before · N outputs of the one after · S parts of a sum · G parts of
the sums of squares
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flambeau.llm.backends.cuda import few_row_kernel
from flambeau.llm.backends.cuda.few_row_kernel import Division, RowFactors, StreamSums
from flambeau.llm.backends.cuda.linear import KernelLinear
from flambeau.llm.backends.cuda.norm import NormParameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """A linear layer, and how the kernel divides its work."""

    linear: KernelLinear
    division: Division

    def __call__(self, x: Tensor, *, factors: RowFactors | None = None, stream: StreamSums | None = None) -> Tensor:
        linear, scales = self.linear, self.linear.kernel_scales
        y = few_row_kernel.multiply(
            x, linear.layer, scales, linear.width, self.division, gates=linear.gates, factors=factors, stream=stream
        )
        assert y is not None
        return y


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledRows:
    """Rows of the residual stream times a norm's gains, and the product that they are for."""

    y_TE: Tensor
    factors: RowFactors
    after: Product

    def multiply(self) -> Tensor:
        """[T, N], or parts [S, T, N], of the norm's outputs."""
        return self.after(self.y_TE, factors=self.factors)


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinedNorm:
    """A product that adds to the residual stream, a norm, and the next product."""

    before: KernelLinear
    gains_E: Tensor  # float32
    epsilon: float
    after: KernelLinear

    def add(self, x_TI: Tensor, stream_TE: Tensor) -> ScaledRows | None:
        """Add what the first product gives to the stream, in place; None: other kernels are better, or it cannot."""
        before, after = product_of(x_TI, self.before, streams=True), product_of(stream_TE, self.after, streams=False)
        if before is None or after is None:
            return None
        num_groups = before.division.num_groups(self.before.width)
        squares_TG = torch.empty(len(x_TI), num_groups, device=x_TI.device)
        y_TE = torch.empty_like(stream_TE)
        before(x_TI.contiguous(), stream=StreamSums(stream_TE, self.gains_E, y_TE, squares_TG))
        return ScaledRows(y_TE=y_TE, factors=RowFactors(squares_TG, self.epsilon), after=after)


def joined_norm(before: KernelLinear, norm: NormParameters, after: KernelLinear) -> JoinedNorm | None:
    """The three in one, if the norm is one of root mean squares of the plain sum."""
    if not norm.is_plain or norm.residual_scale != 1.0 or before.gates:
        return None
    if any(type(linear) is not KernelLinear or not linear.has_kernel for linear in (before, after)):
        return None
    assert norm.gain is not None
    return JoinedNorm(before=before, gains_E=norm.gain.float(), epsilon=norm.epsilon, after=after)


def product_of(x: Tensor, linear: KernelLinear, *, streams: bool) -> Product | None:
    """A product of these rows by the CUDA kernel; None: others are better, or it cannot be compiled here."""
    layer, gates = linear.layer, linear.gates
    division = few_row_kernel.division(x, layer, linear.width, len(x), gates=gates, streams=streams)
    if division is None:
        return None
    function = few_row_kernel.compiled_for(x, layer, division, gates=gates, scaled=not streams, streams=streams)
    return None if function is None else Product(linear=linear, division=division)
