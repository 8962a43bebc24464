"""Tiny heads that propose tokens, and a plain twin: the same computation as a loop over whole sequences."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from flambeau.llm.backends.eager import WholeAttention
from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.draft_heads import DraftHead, HeadKind, HeadSettings
from flambeau.llm.models.head_kinds import make_head
from flambeau.llm.models.tensor_names import part_name, part_rows
from flambeau.llm.models.transformer import Transformer


def tiny_head(
    kind: HeadKind, target: Transformer, *, seed: int = 5, draft_vocab_size: int = 0, **more: Any
) -> DraftHead:
    """A head with random weights; with `draft_vocab_size`, every other token of the target and so on."""
    arch = target.arch
    layers = (2, arch.num_layers // 2, arch.num_layers - 3) if kind == "eagle3" else (arch.num_layers,)
    size = draft_vocab_size or (arch.vocab_size if kind == "eagle3" else 0)
    settings = HeadSettings(
        kind=kind,
        arch=replace(arch, num_layers=1, recurrence=None),
        layers=layers,
        state_size=arch.hidden_size,
        draft_vocab_size=size,
        **more,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        head = make_head(settings).eval().requires_grad_(False)
        for parameter in head.parameters():
            torch.nn.init.normal_(parameter, mean=float(parameter.dim() == 1), std=0.15)
    if draft_vocab_size:
        step = arch.vocab_size // draft_vocab_size
        head.target_ids_D = torch.arange(draft_vocab_size) * step
    head.share(target)
    return head


def published_eagle(head: DraftHead) -> dict[str, Tensor]:
    """The tensors of a head by the names that EAGLE checkpoints have."""
    first = "midlayer." if head.settings.kind == "eagle3" else "layers.0."
    tensors = {
        name.replace("model.layers.0.", first).removeprefix("model."): value
        for name, value in split_tensors(head).items()
    }
    if head.target_ids_D is not None:
        size = len(head.target_ids_D)
        tensors["d2t"] = head.target_ids_D - torch.arange(size)
        tensors["t2d"] = torch.zeros(head.arch.vocab_size, dtype=torch.bool).index_fill(0, head.target_ids_D, True)
    return tensors


def published_mtp(head: DraftHead, naming: str, arch: Architecture) -> dict[str, Tensor]:
    """The tensors of a layer of multi-token prediction by the names of DeepSeek, or of MiMo."""
    tensors = {}
    layer = "model.mtp_layers.0." if naming == "MiMo" else f"model.layers.{arch.num_layers}."
    names = {"enorm": "token_layernorm", "hnorm": "hidden_layernorm", "eh_proj": "input_proj"}
    for name, value in split_tensors(head).items():
        own = name.removeprefix("model.layers.0.")
        if naming == "MiMo":
            start, _, end = own.partition(".")
            own = f"{names.get(start, start)}.{end}" if name != "model.norm.weight" else "final_layernorm.weight"
        elif name == "model.norm.weight":
            own = "shared_head.norm.weight"
        tensors[layer + own] = value
    if naming != "MiMo":  # copies of the model's own
        tensors[f"{layer}embed_tokens.weight"] = torch.zeros(arch.vocab_size, arch.hidden_size)
        tensors[f"{layer}shared_head.head.weight"] = torch.zeros(arch.vocab_size, arch.hidden_size)
    return tensors


def split_tensors(head: DraftHead) -> dict[str, Tensor]:
    """Queries, keys, values, gate and up apart, as in Hugging Face checkpoints."""
    tensors = {}
    for name, value in head.state_dict().items():
        parts = part_rows(head.arch, name, len(value)) if ".experts." not in name else {}
        tensors |= {part_name(name, part): value[rows] for part, rows in parts.items()} or {name: value}
    return tensors


def twin_proposals(head: DraftHead, target: Transformer, tokens: list[int], number: int) -> list[int]:
    """The greedy proposals after these tokens, from the weights alone."""
    weights = {name: value.detach() for name, value in head.state_dict().items()}
    ids, last = torch.tensor(tokens), len(tokens) - 1
    _, states = target.with_layer_inputs(ids, torch.arange(len(ids)), WholeAttention(), None, head.settings.layers)
    hidden = twin_combined(head, target, weights, torch.cat(states, -1)[:last])  # of all tokens but the last
    nexts, found = tokens[1:], []
    for _ in range(number):
        output = twin_pass(head, target, weights, torch.tensor(nexts), hidden)
        logits = twin_logits(head, target, weights, output[-1])
        own = int(logits.argmax())
        found.append(own if head.target_ids_D is None else int(head.target_ids_D[own]))
        hidden = torch.cat((hidden, output[-1:]))
        nexts = [*nexts, found[-1]]
    return found


def twin_combined(head: DraftHead, target: Transformer, weights: dict[str, Tensor], states: Tensor) -> Tensor:
    if head.settings.kind != "eagle3":
        return rms(states, target.model.norm.weight, target.arch.norm_epsilon)
    if head.settings.norms_each:
        parts = enumerate(states.chunk(len(head.settings.layers), -1))
        states = torch.cat([rms(part, weights[f"fc_norm.{i}.weight"], head.arch.norm_epsilon) for i, part in parts], -1)
    if head.settings.norm_before_projection:
        states = rms(states, weights["input_norm.weight"], head.arch.norm_epsilon)
    return functional.linear(states, weights["fc.weight"], weights.get("fc.bias"))


def twin_pass(
    head: DraftHead, target: Transformer, weights: dict[str, Tensor], nexts: Tensor, hidden: Tensor
) -> Tensor:
    """The head's hidden states of the whole sequence."""
    settings, layer = head.settings, "model.layers.0."
    epsilon = head.arch.norm_epsilon
    table = weights.get("model.embed_tokens.weight", target.model.embed_tokens.weight)
    embedded = table[nexts]
    if settings.kind == "eagle3":
        normal = rms(hidden, weights[layer + "hidden_norm.weight"], epsilon)
        x = normal if settings.norm_before_residual else hidden
        given = torch.cat((rms(embedded, weights[layer + "input_layernorm.weight"], epsilon), normal), -1)
    elif settings.kind == "eagle":
        x = functional.linear(torch.cat((embedded, hidden), -1), weights["fc.weight"], weights.get("fc.bias"))
        given = x
    else:
        both = [rms(embedded, weights["enorm.weight"], epsilon), rms(hidden, weights["hnorm.weight"], epsilon)]
        x = functional.linear(torch.cat(both[::-1] if settings.hidden_first else both, -1), weights["eh_proj.weight"])
        given = rms(x, weights[layer + "input_layernorm.weight"], epsilon)
    x = x + twin_attention(head, weights, layer + "self_attn.", given)
    y = rms(x, weights[layer + "post_attention_layernorm.weight"], epsilon)
    gate, up = functional.linear(y, weights[layer + "mlp.gate_up_proj.weight"]).chunk(2, -1)
    x = x + functional.linear(functional.silu(gate) * up, weights[layer + "mlp.down_proj.weight"])
    is_normal = settings.kind == "mtp" or settings.norms_output
    return rms(x, weights["model.norm.weight"], epsilon) if is_normal else x


def twin_attention(head: DraftHead, weights: dict[str, Tensor], name: str, given: Tensor) -> Tensor:
    arch = head.arch
    size, heads, kv_heads = arch.head_size, arch.num_heads, arch.num_kv_heads
    qkv = functional.linear(given, weights[name + "qkv_proj.weight"]).view(len(given), -1, size)
    q, k, v = qkv.split((heads, kv_heads, kv_heads), 1)
    angles = torch.outer(torch.arange(len(given)).float(), arch.rope_theta ** -(torch.arange(0, size, 2) / size))
    turn = torch.polar(torch.ones_like(angles), angles).unsqueeze(1)

    def rotated(x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        turned = torch.complex(first, second) * turn
        return torch.cat((turned.real, turned.imag), -1)

    q, k = rotated(q).transpose(0, 1), rotated(k).transpose(0, 1).repeat_interleave(heads // kv_heads, 0)
    v = v.transpose(0, 1).repeat_interleave(heads // kv_heads, 0)
    scores = (q @ k.transpose(1, 2)) * size**-0.5
    is_later = torch.ones(len(given), len(given), dtype=torch.bool).triu(1)
    mixed = scores.masked_fill(is_later, -torch.inf).softmax(-1) @ v
    return functional.linear(mixed.transpose(0, 1).flatten(1), weights[name + "o_proj.weight"])


def twin_logits(head: DraftHead, target: Transformer, weights: dict[str, Tensor], hidden: Tensor) -> Tensor:
    if head.settings.kind != "eagle3":
        return target.logits(hidden)
    if not head.settings.norms_output:
        hidden = rms(hidden, weights["model.norm.weight"], head.arch.norm_epsilon)
    return functional.linear(hidden, weights["lm_head.weight"])


def rms(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon) * weight
