"""SparseMLP: a mixture-of-experts layer; a router sends each token to a few experts.

There are three ways to compute the experts, with the same result. In plain PyTorch each expert computes its own
tokens. A graph needs shapes that do not depend on the routing: with few tokens, the weights of the chosen experts are
gathered; with many, all experts compute all tokens.

Shapes: T tokens · N experts · A experts of a token · E hidden · F intermediate
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flambeau.llm.models.architecture import Architecture


class Experts(nn.Module):
    """The weights of all experts, stacked."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        count, size, hidden = arch.num_experts, arch.expert_size, arch.hidden_size
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * size, hidden))
        self.down_proj = nn.Parameter(torch.empty(count, hidden, size))

    def reset_parameters(self) -> None:
        """Random weights, as nn.Linear has them."""
        for weight in (self.gate_up_proj, self.down_proj):
            nn.init.uniform_(weight, -(weight.shape[-1] ** -0.5), weight.shape[-1] ** -0.5)

    def forward(self, x_TE: Tensor, chosen_TA: Tensor, weights_TA: Tensor) -> Tensor:
        """The weighted sum [T, E] of the chosen experts' outputs."""
        if not needs_static_shapes(x_TE):
            return self.compute_each(x_TE, chosen_TA, weights_TA)
        if chosen_TA.numel() < len(self.down_proj):
            return self.compute_gathered(x_TE, chosen_TA, weights_TA)
        return self.compute_all(x_TE, chosen_TA, weights_TA)

    def compute_each(self, x_TE: Tensor, chosen_TA: Tensor, weights_TA: Tensor) -> Tensor:
        """One expert after another, each with its own tokens."""
        y_TE = torch.zeros_like(x_TE)
        for expert in torch.unique(chosen_TA).tolist():
            tokens, places = (chosen_TA == expert).nonzero(as_tuple=True)
            gate, up = F.linear(x_TE[tokens], self.gate_up_proj[expert]).chunk(2, dim=-1)
            y = F.linear(F.silu(gate) * up, self.down_proj[expert])
            y_TE.index_add_(0, tokens, (y * weights_TA[tokens, places, None]).to(y_TE.dtype))
        return y_TE

    def compute_gathered(self, x_TE: Tensor, chosen_TA: Tensor, weights_TA: Tensor) -> Tensor:
        """With the weights of each token's own experts."""
        gate, up = torch.einsum("ti,tafi->taf", x_TE, self.gate_up_proj[chosen_TA]).chunk(2, dim=-1)
        y_TAE = torch.einsum("taf,taif->tai", F.silu(gate) * up, self.down_proj[chosen_TA])
        return (y_TAE * weights_TA.unsqueeze(-1)).sum(dim=1).to(x_TE.dtype)

    def compute_all(self, x_TE: Tensor, chosen_TA: Tensor, weights_TA: Tensor) -> Tensor:
        """All experts for all tokens; experts that a token did not choose have weight 0."""
        weights_TN = weights_TA.new_zeros(len(x_TE), len(self.down_proj)).scatter(1, chosen_TA, weights_TA)
        gate, up = (x_TE @ self.gate_up_proj.transpose(1, 2)).chunk(2, dim=-1)
        y_NTE = (F.silu(gate) * up) @ self.down_proj.transpose(1, 2)
        return (y_NTE * weights_TN.t().unsqueeze(-1)).sum(dim=0).to(x_TE.dtype)


class SparseMLP(nn.Module):
    """A router and its experts."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        self.gate = nn.Linear(arch.hidden_size, arch.num_experts, bias=False)
        self.experts = Experts(arch)
        self.experts.reset_parameters()
        self.num_experts_per_token = arch.num_experts_per_token
        self.normalizes_experts = arch.normalizes_experts

    def forward(self, x: Tensor) -> Tensor:
        """[…, E] to […, E]."""
        x_TE = x.flatten(0, -2)
        weights_TN = self.gate(x_TE).float().softmax(dim=-1)
        weights_TA, chosen_TA = weights_TN.topk(self.num_experts_per_token, dim=-1)
        if self.normalizes_experts:
            weights_TA = weights_TA / weights_TA.sum(dim=-1, keepdim=True)
        return self.experts(x_TE, chosen_TA, weights_TA).view_as(x)  # type: ignore[no-any-return]


def needs_static_shapes(x: Tensor) -> bool:
    """Whether the current call is traced or captured, to be replayed with other tokens."""
    return torch.compiler.is_compiling() or (x.is_cuda and torch.cuda.is_current_stream_capturing())
