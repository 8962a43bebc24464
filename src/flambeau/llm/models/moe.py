"""SparseMLP: a mixture-of-experts layer; a router sends each token to a few experts.

There are three ways to compute the experts, with the same result. In plain PyTorch each expert computes its own
tokens. A graph needs shapes that do not depend on the routing: with few tokens, the weights of the chosen experts are
gathered; with many, all experts compute all tokens.

Shapes: T tokens · N experts · A experts of a token · E hidden · F intermediate
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flambeau.llm.models.activations import ACTIVATIONS, gated
from flambeau.llm.models.architecture import Activation, Architecture
from flambeau.llm.models.routers import BIASED, ROUTERS, WIDE, RouterSettings, Routing, root_softplus


class ExpertLayers(nn.Module):
    """The weights of all experts in the form of kernels, which multiply with them; replaces a parameter [N, O, I]."""

    def multiply(self, expert: int, x: Tensor) -> Tensor:
        """[T, I] to [T, O]."""
        raise NotImplementedError

    def multiply_chosen(self, x_TAI: Tensor, chosen_TA: Tensor) -> Tensor:
        """[T, A, I] to [T, A, O], each row by the weights of its own expert; a step with it can be traced."""
        raise NotImplementedError


class Experts(nn.Module):
    """The weights of all experts, stacked."""

    def __init__(self, arch: Architecture, layer: int = 0) -> None:
        super().__init__()
        count, size, hidden = arch.num_experts, arch.expert_size, arch.expert_latent_size or arch.hidden_size
        rows = 2 * size if arch.has_gate else size
        self.gate_up_proj = nn.Parameter(torch.empty(count, rows, hidden))
        self.down_proj = nn.Parameter(torch.empty(count, hidden, size))
        self.gate_up_proj_bias = nn.Parameter(torch.zeros(count, rows)) if arch.expert_bias else None
        self.down_proj_bias = nn.Parameter(torch.zeros(count, hidden)) if arch.expert_bias else None
        self.limit = arch.expert_limit(layer)
        self.num_experts, self.num_zero_experts = count, arch.num_zero_experts
        self.scales_inputs = arch.scales_expert_inputs
        self.has_gate, self.activation = arch.has_gate, ACTIVATIONS[arch.activation]
        self.kind: Activation = arch.activation

    def reset_parameters(self) -> None:
        """Random weights, as nn.Linear has them."""
        for weight in (self.gate_up_proj, self.down_proj):
            nn.init.uniform_(weight, -(weight.shape[-1] ** -0.5), weight.shape[-1] ** -0.5)

    def forward(self, x_TE: Tensor, chosen_TA: Tensor, weights_TA: Tensor) -> Tensor:
        """The weighted sum [T, E] of the chosen experts' outputs."""
        if not needs_static_shapes(x_TE):
            return self.compute_each(x_TE, chosen_TA, weights_TA)
        has_kernels = isinstance(self.gate_up_proj, ExpertLayers) or isinstance(self.down_proj, ExpertLayers)
        if has_kernels or chosen_TA.numel() < len(self.down_proj):
            return self.compute_gathered(x_TE, chosen_TA, weights_TA)
        return self.compute_all(x_TE, chosen_TA, weights_TA)

    def compute_each(self, x_TE: Tensor, chosen_TA: Tensor, weights_TA: Tensor) -> Tensor:
        """One expert after another, each with its own tokens."""
        y_TE = torch.zeros_like(x_TE)
        for expert in torch.unique(chosen_TA).tolist():
            if expert >= self.num_experts:  # gives its input, see SparseMLP
                break
            tokens, places = (chosen_TA == expert).nonzero(as_tuple=True)
            up_bias, down_bias = self.biases(expert)
            before, after = self.scales(weights_TA[tokens, places, None])
            x = scaled(x_TE[tokens], before).to(x_TE.dtype)
            gate_up = self.multiply("gate_up_proj", expert, x, up_bias, tokens)
            y = self.multiply("down_proj", expert, self.activate(gate_up), down_bias, tokens)
            y_TE.index_add_(0, tokens, scaled(y, after).to(y_TE.dtype))
        return y_TE

    def multiply(self, leaf: str, expert: int, x: Tensor, bias: Tensor | None, tokens: Tensor) -> Tensor:
        """One of the linear layers of an expert, for these tokens."""
        return multiply(getattr(self, leaf), expert, x, bias)

    def compute_gathered(self, x_TE: Tensor, chosen_TA: Tensor, weights_TA: Tensor) -> Tensor:
        """With the weights of each token's own experts."""
        if self.num_zero_experts:
            is_zero = chosen_TA >= self.num_experts
            chosen_TA, weights_TA = chosen_TA.masked_fill(is_zero, 0), weights_TA.masked_fill(is_zero, 0.0)
        up_bias, down_bias = self.biases(chosen_TA)
        before, after = self.scales(weights_TA.unsqueeze(-1))
        x_TAE = scaled(x_TE.unsqueeze(1).expand(-1, chosen_TA.shape[1], -1), before).to(x_TE.dtype)
        gate_up = multiply_chosen(self.gate_up_proj, x_TAE, chosen_TA)
        gate_up = gate_up if up_bias is None else gate_up + up_bias
        y_TAE = multiply_chosen(self.down_proj, self.activate(gate_up), chosen_TA)
        y_TAE = y_TAE if down_bias is None else y_TAE + down_bias
        return scaled(y_TAE, after).sum(dim=1).to(x_TE.dtype)

    def compute_all(self, x_TE: Tensor, chosen_TA: Tensor, weights_TA: Tensor) -> Tensor:
        """All experts for all tokens; experts that a token did not choose have weight 0."""
        count = self.num_experts + self.num_zero_experts
        weights_TN = weights_TA.new_zeros(len(x_TE), count).scatter(1, chosen_TA, weights_TA)[:, : self.num_experts]
        up_bias, down_bias = self.biases((slice(None), None))
        before, after = self.scales(weights_TN.t().unsqueeze(-1))
        gate_up = scaled(x_TE, before).to(x_TE.dtype) @ self.gate_up_proj.transpose(1, 2)
        gate_up = gate_up if up_bias is None else gate_up + up_bias
        y_NTE = self.activate(gate_up) @ self.down_proj.transpose(1, 2)
        y_NTE = y_NTE if down_bias is None else y_NTE + down_bias
        # Without an input, an expert without biases gives nothing.
        return scaled(y_NTE, after).sum(dim=0).to(x_TE.dtype)

    def scales(self, weights: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """What inputs and outputs of experts are multiplied with."""
        return (weights, None) if self.scales_inputs else (None, weights)

    def biases(self, chosen: Any) -> tuple[Tensor | None, Tensor | None]:
        """The biases of some experts, before and after the activation."""
        if self.gate_up_proj_bias is None or self.down_proj_bias is None:
            return None, None
        return self.gate_up_proj_bias[chosen], self.down_proj_bias[chosen]

    def activate(self, gate_up: Tensor) -> Tensor:
        if not self.has_gate:
            return self.activation(gate_up)
        return gated(gate_up, self.activation, self.limit)


def multiply(weights: Any, expert: int, x: Tensor, bias: Tensor | None) -> Tensor:
    """The linear layer of one expert."""
    if not isinstance(weights, ExpertLayers):
        return F.linear(x, weights[expert], bias)
    y = weights.multiply(expert, x)
    return y if bias is None else y + bias


def multiply_chosen(weights: Any, x_TAI: Tensor, chosen_TA: Tensor) -> Tensor:
    """The linear layers of the experts of each row, without biases."""
    if isinstance(weights, ExpertLayers):
        return weights.multiply_chosen(x_TAI, chosen_TA)
    return torch.einsum("tai,taoi->tao", x_TAI, weights[chosen_TA])


def scaled(x: Tensor, weights: Tensor | None) -> Tensor:
    """x times the weights, if there are any."""
    return x if weights is None else x * weights


def wide_scores(gate: Any, x_TE: Tensor) -> Tensor:
    """A router's scores in float32; one with adapters computes them itself."""
    return gate.wide(x_TE) if hasattr(gate, "wide") else F.linear(x_TE.float(), gate.weight.float())


class SharedExpert(nn.Module):
    """An expert for all tokens."""

    def __init__(self, arch: Architecture, layer: int = 0) -> None:
        super().__init__()
        rows = 2 * arch.shared_expert_size if arch.has_gate else arch.shared_expert_size
        self.gate_up_proj = nn.Linear(arch.hidden_size, rows, bias=False)
        self.down_proj = nn.Linear(arch.shared_expert_size, arch.hidden_size, bias=False)
        self.has_gate, self.activation = arch.has_gate, ACTIVATIONS[arch.activation]
        self.limit = arch.mlp_limit(layer)

    def forward(self, x: Tensor) -> Tensor:
        """[…, E] to […, E]."""
        if not self.has_gate:
            return self.down_proj(self.activation(self.gate_up_proj(x)))  # type: ignore[no-any-return]
        return self.down_proj(gated(self.gate_up_proj(x), self.activation, self.limit))  # type: ignore[no-any-return]


class SparseMLP(nn.Module):
    """A router and its experts; there may be one more for all tokens, with a gate or without.

    The router may know experts that have no weights and give their inputs. Of several ranks one adds these.
    """

    def __init__(self, arch: Architecture, layer: int = 0) -> None:
        super().__init__()
        num_scores = arch.num_experts + arch.num_zero_experts
        self.gate = nn.Linear(arch.hidden_size, num_scores, bias=arch.expert_bias)
        self.experts = Experts(arch, layer)
        self.num_experts = arch.num_experts
        self.adds_inputs = arch.num_zero_experts > 0
        self.experts.reset_parameters()
        latent = arch.expert_latent_size
        self.fc1_latent_proj = nn.Linear(arch.hidden_size, latent, bias=False) if latent else None
        self.fc2_latent_proj = nn.Linear(latent, arch.hidden_size, bias=False) if latent else None
        self.normalizes_experts = arch.normalizes_experts
        self.router, self.settings = arch.router, RouterSettings.of(arch)
        self.routed_scale = arch.routed_scale
        self.expert_scales = nn.Parameter(torch.ones(arch.num_experts)) if arch.experts_beside_mlp else None
        # float32 whatever the type of the network: it decides between scores that are close.
        bias = torch.zeros(num_scores, dtype=torch.float32) if arch.router in BIASED else None
        self.score_bias = None if bias is None else nn.Parameter(bias)
        self.shared_expert = SharedExpert(arch, layer) if arch.shared_expert_size else None
        self.shared_expert_gate = nn.Linear(arch.hidden_size, 1, bias=False) if arch.gates_shared_expert else None

    def forward(self, x: Tensor, scored: Tensor | None = None) -> Tensor:
        """[…, E] to […, E]; the router may read other numbers than the experts."""
        x_TE = x.flatten(0, -2)
        weights_TA, chosen_TA = self.choose(x_TE if scored is None else scored.flatten(0, -2))
        if self.fc1_latent_proj is None or self.fc2_latent_proj is None:
            y: Tensor = self.experts(x_TE, chosen_TA, weights_TA).view_as(x)
            if self.adds_inputs:
                given_T = weights_TA.masked_fill(chosen_TA < self.num_experts, 0.0).sum(dim=-1)
                y = y + (x_TE * given_T.unsqueeze(-1)).to(x.dtype).view_as(x)
        else:
            latent = self.experts(self.fc1_latent_proj(x_TE), chosen_TA, weights_TA)
            y = self.fc2_latent_proj(latent).view_as(x)
        if self.shared_expert is None:
            return y
        shared = self.shared_expert(x)
        gate = self.shared_expert_gate
        return y + (shared if gate is None else shared * torch.sigmoid(gate(x)))  # type: ignore[no-any-return]

    def choose(self, x_TE: Tensor) -> Routing:
        """The weights [T, A] of the experts, as they are used, and their numbers."""
        return self.weighed(*self.route(x_TE))

    def weighed(self, weights_TA: Tensor, chosen_TA: Tensor) -> Routing:
        """The same for the router's weights."""
        if self.normalizes_experts:
            weights_TA = weights_TA / weights_TA.sum(dim=-1, keepdim=True)
        if self.expert_scales is not None:
            weights_TA = weights_TA * self.expert_scales[chosen_TA]
        return (weights_TA if self.routed_scale == 1.0 else weights_TA * self.routed_scale), chosen_TA

    def route(self, x_TE: Tensor) -> Routing:
        """The router's weights [T, A] of the chosen experts, and their numbers."""
        logits_TN = wide_scores(self.gate, x_TE) if self.router in WIDE else self.gate(x_TE)
        return ROUTERS[self.router](logits_TN, self.score_bias, self.settings)


class HashedMLP(SparseMLP):
    """Experts that a table names for each token of the vocabulary; a router weighs them (DeepSeek V4)."""

    token_experts: Tensor

    def __init__(self, arch: Architecture, layer: int) -> None:
        super().__init__(arch, layer)
        del self.score_bias
        table = torch.zeros(arch.vocab_size, arch.num_experts_per_token, dtype=torch.int64)
        self.register_buffer("token_experts", table)

    def forward(self, x: Tensor, scored: Tensor | None = None) -> Tensor:
        """[…, E] of the tokens […] to […, E]."""
        assert scored is not None
        assert self.shared_expert is not None
        x_TE, chosen_TA = x.flatten(0, -2), self.token_experts[scored.flatten()]
        weights_TN = root_softplus(wide_scores(self.gate, x_TE))
        weights_TA, _ = self.weighed(weights_TN.gather(1, chosen_TA), chosen_TA)
        y: Tensor = self.experts(x_TE, chosen_TA, weights_TA).view_as(x)
        return y + self.shared_expert(x)  # type: ignore[no-any-return]


def needs_static_shapes(x: Tensor) -> bool:
    """Whether the current call is traced or captured, to be replayed with other tokens."""
    return torch.compiler.is_compiling() or (x.is_cuda and torch.cuda.is_current_stream_capturing())
