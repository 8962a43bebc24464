"""SparseMLP: a feed-forward part of many experts, of which each token visits a few.

There are three ways through the experts with the same result. In plain PyTorch each expert computes the tokens that
chose it. A graph needs shapes that do not depend on those choices: with few tokens, the weights of the chosen experts
are gathered; with many, most experts are chosen by some token and all of them compute all tokens.

Shapes: T tokens · N experts · A experts of a token · E hidden · F intermediate
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flambeau.llm.models.architecture import Architecture


class Experts(nn.Module):
    """The weights of all experts, one upon the other."""

    def __init__(self, arch: Architecture) -> None:
        super().__init__()
        count, size, hidden = arch.num_experts, arch.expert_size, arch.hidden_size
        self.gate_up_proj = nn.Parameter(torch.empty(count, 2 * size, hidden))
        self.down_proj = nn.Parameter(torch.empty(count, hidden, size))

    def reset_parameters(self) -> None:
        """Random weights, as nn.Linear begins with."""
        for weight in (self.gate_up_proj, self.down_proj):
            nn.init.uniform_(weight, -(weight.shape[-1] ** -0.5), weight.shape[-1] ** -0.5)

    def forward(self, x_TE: Tensor, chosen_TA: Tensor, weights_TA: Tensor) -> Tensor:
        """The sum [T, E] of what the chosen experts say, by their weights."""
        if not needs_static_shapes(x_TE):
            return self.visit(x_TE, chosen_TA, weights_TA)
        if chosen_TA.numel() < len(self.down_proj):
            return self.gather(x_TE, chosen_TA, weights_TA)
        return self.compute_all(x_TE, chosen_TA, weights_TA)

    def visit(self, x_TE: Tensor, chosen_TA: Tensor, weights_TA: Tensor) -> Tensor:
        """One expert after another, each with its own tokens."""
        y_TE = torch.zeros_like(x_TE)
        for expert in torch.unique(chosen_TA).tolist():
            tokens, places = (chosen_TA == expert).nonzero(as_tuple=True)
            gate, up = F.linear(x_TE[tokens], self.gate_up_proj[expert]).chunk(2, dim=-1)
            said = F.linear(F.silu(gate) * up, self.down_proj[expert])
            y_TE.index_add_(0, tokens, (said * weights_TA[tokens, places, None]).to(y_TE.dtype))
        return y_TE

    def gather(self, x_TE: Tensor, chosen_TA: Tensor, weights_TA: Tensor) -> Tensor:
        """With the weights of each token's own experts."""
        gate, up = torch.einsum("ti,tafi->taf", x_TE, self.gate_up_proj[chosen_TA]).chunk(2, dim=-1)
        said_TAE = torch.einsum("taf,taif->tai", F.silu(gate) * up, self.down_proj[chosen_TA])
        return (said_TAE * weights_TA.unsqueeze(-1)).sum(dim=1).to(x_TE.dtype)

    def compute_all(self, x_TE: Tensor, chosen_TA: Tensor, weights_TA: Tensor) -> Tensor:
        """All experts for all tokens; those that a token did not choose count nothing."""
        weights_TN = weights_TA.new_zeros(len(x_TE), len(self.down_proj)).scatter(1, chosen_TA, weights_TA)
        gate, up = (x_TE @ self.gate_up_proj.transpose(1, 2)).chunk(2, dim=-1)
        said_NTE = (F.silu(gate) * up) @ self.down_proj.transpose(1, 2)
        return (said_NTE * weights_TN.t().unsqueeze(-1)).sum(dim=0).to(x_TE.dtype)


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
    """Whether what runs now is being traced or captured, to be replayed with other tokens."""
    return torch.compiler.is_compiling() or (x.is_cuda and torch.cuda.is_current_stream_capturing())
