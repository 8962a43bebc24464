"""WeightPointers: linear layers and norms as the structures that the C++ kernels read.

Shapes: H heads · O outputs · I inputs
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flambeau.llm.backends.cpu.bindings import KINDS, CMatrix, CNorm
from flambeau.llm.backends.cpu.packed_experts import packed_stack
from flambeau.llm.backends.cpu.packed_linear import PANEL, pack_floats, packed
from flambeau.llm.models.norms import PlainRMSNorm, RMSNorm
from flambeau.llm.quantize.groups import JoinedLinear


class WeightPointers:
    """Structures that point to weights, which are kept alive with them."""

    def __init__(self, *, packs_float32: bool) -> None:
        self._packs_float32 = packs_float32
        self._references: list[Any] = []

    def keep(self, *others: Any) -> None:
        """Keep alive what structures point to."""
        self._references += others

    def pointer(self, tensor: Tensor | None) -> int | None:
        if tensor is None:
            return None
        tensor = tensor.contiguous()
        self._references.append(tensor)
        return tensor.data_ptr()

    def norm(self, norm: Any) -> CNorm:
        if norm is None or isinstance(norm, nn.Identity):
            return CNorm()
        weight, bias = norm_weights(norm)
        return CNorm(self.pointer(weight), self.pointer(bias))

    def matrix(self, layer: Any) -> CMatrix:
        """The structure of a layer; of joined ones, that of the first, which points to the next."""
        if not isinstance(layer, JoinedLinear):
            return self._single(layer)
        bias = None if layer.bias is None else layer.bias.detach().float().contiguous()
        self._references.append(bias)
        made: list[CMatrix] = []
        for part in layer.parts:
            matrix = self._single(part)
            if bias is not None:
                matrix.bias = bias[sum(before.width for before in made) :].data_ptr()
            if made:
                made[-1].next = ctypes.addressof(matrix)
            made.append(matrix)
        self._references += made
        return made[0]

    def _single(self, layer: Any) -> CMatrix:
        one = packed(layer, packs_float32=self._packs_float32)
        if one is not None:
            self._references.append(one)
            return one.matrix
        return self.plain(layer.weight, layer.bias)

    def plain(self, weight_OI: Tensor, bias: Tensor | None = None) -> CMatrix:
        """Float32 weights as they are."""
        pointers = self.pointer(weight_OI.detach()), self.pointer(None if bias is None else bias.detach())
        return CMatrix(KINDS.index("plain"), *pointers, weight_OI.shape[1], len(weight_OI), 1)

    def head_matrices(self, weights_HOI: Tensor) -> Any:
        """A matrix for each head; the outputs of each begin with a panel."""
        heads, count, _ = weights_HOI.shape
        padded = F.pad(weights_HOI.detach(), (0, 0, 0, -count % PANEL)).contiguous()
        rows = pack_floats(padded.flatten(0, 1), packs_float32=self._packs_float32)
        if rows is None:
            made = [self.plain(padded[head, :count]) for head in range(heads)]
        else:
            made = [rows.part(head * padded.shape[1], count) for head in range(heads)]
        array = (CMatrix * heads)(*made)
        self.keep(rows, padded, array)
        return array

    def expert_matrices(self, weights: Any, biases_NO: Tensor | None) -> Any:
        """A matrix for each expert of a stack."""
        stack = packed_stack(weights, packs_float32=self._packs_float32)
        made: list[CMatrix] = []
        for number in range(len(weights)):
            matrix = stack.matrix(number) if stack is not None else self.plain(weights[number])
            matrix.bias = self.pointer(None if biases_NO is None else biases_NO[number].detach().float())
            made.append(matrix)
        array = (CMatrix * len(made))(*made)
        self.keep(stack, array)
        return array


def norm_weights(norm: Any) -> tuple[Tensor, Tensor | None]:
    """The weights of a norm in float32; a layer norm always has both."""
    offset = getattr(norm, "offset", 0.0)
    if isinstance(norm, PlainRMSNorm):
        return torch.ones(norm.size), None
    if isinstance(norm, RMSNorm):
        return norm.weight.detach().float() + offset, None
    weight = norm.weight.detach().float() + offset if norm.weight is not None else torch.ones(norm.size)
    bias = getattr(norm, "bias", None)
    return weight, torch.zeros_like(weight) if bias is None else bias.detach().float()
