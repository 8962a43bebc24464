"""BERT step by step, to compare with."""

from __future__ import annotations

import math

import torch


def plain_forward(tensors, ids, *, num_layers, num_heads, epsilon=1e-12):
    """One text, one head at a time, in double precision."""
    weights = {name: tensor.double() for name, tensor in tensors.items()}

    def linear(x, name):
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(x, name):
        centered = x - x.mean(-1, keepdim=True)
        spread = (centered.pow(2).mean(-1, keepdim=True) + epsilon).sqrt()
        return centered / spread * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    x = weights["embeddings.word_embeddings.weight"][ids]
    x = x + weights["embeddings.position_embeddings.weight"][: len(ids)]
    x = norm(x + weights["embeddings.token_type_embeddings.weight"][0], "embeddings.LayerNorm")
    for i in range(num_layers):
        base = f"encoder.layer.{i}"
        heads = []
        for q, k, v in zip(
            *(linear(x, f"{base}.attention.self.{n}").chunk(num_heads, 1) for n in ("query", "key", "value")),
            strict=True,
        ):
            scores = (q @ k.T / math.sqrt(q.shape[1])).exp()
            heads.append(scores / scores.sum(1, keepdim=True) @ v)
        x = norm(
            x + linear(torch.cat(heads, 1), f"{base}.attention.output.dense"), f"{base}.attention.output.LayerNorm"
        )
        y = linear(x, f"{base}.intermediate.dense")
        y = y * 0.5 * (1 + torch.erf(y / math.sqrt(2)))
        x = norm(x + linear(y, f"{base}.output.dense"), f"{base}.output.LayerNorm")
    return x
