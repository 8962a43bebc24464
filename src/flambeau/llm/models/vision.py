"""SiglipEncoder: pixels of images → the embeddings that stand for them in a prompt.

A SigLIP transformer over patches, then Gemma 3's projector: it averages neighboring patches and projects them to the
decoder's hidden size. Weights have the names of Hugging Face checkpoints below `vision_tower` and
`multi_modal_projector`.

Shapes: B images · S pixels of a side · P patches · E hidden · H heads · D head size · N tokens of an image · X the
decoder's hidden size
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flambeau.llm.models.activations import VISION_ACTIVATIONS
from flambeau.llm.models.norms import OffsetRMSNorm
from flambeau.llm.models.vision_architecture import SiglipArchitecture


class PatchEmbeddings(nn.Module):
    """Patches of an image, each with its learned position."""

    def __init__(self, arch: SiglipArchitecture) -> None:
        super().__init__()
        num_patches = (arch.image_size // arch.patch_size) ** 2
        self.patch_embedding = nn.Conv2d(3, arch.hidden_size, arch.patch_size, stride=arch.patch_size)
        self.position_embedding = nn.Embedding(num_patches, arch.hidden_size)

    def forward(self, pixels_B3SS: Tensor) -> Tensor:
        """To [B, P, E]."""
        patches = self.patch_embedding(pixels_B3SS).flatten(2).transpose(1, 2)
        return patches + self.position_embedding.weight  # type: ignore[no-any-return]


class PatchAttention(nn.Module):
    """Every patch attends to all patches of its image."""

    def __init__(self, arch: SiglipArchitecture) -> None:
        super().__init__()
        size = arch.hidden_size
        self.num_heads = arch.num_heads
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(size, size) for _ in range(3))
        self.out_proj = nn.Linear(size, size)

    def forward(self, x_BPE: Tensor) -> Tensor:
        q, k, v = (
            project(x_BPE).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        y_BHPD = F.scaled_dot_product_attention(q, k, v)
        return self.out_proj(y_BHPD.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class PatchMLP(nn.Module):
    def __init__(self, arch: SiglipArchitecture) -> None:
        super().__init__()
        self.fc1 = nn.Linear(arch.hidden_size, arch.intermediate_size)
        self.fc2 = nn.Linear(arch.intermediate_size, arch.hidden_size)
        self.activate = VISION_ACTIVATIONS[arch.activation]

    def forward(self, x_BPE: Tensor) -> Tensor:
        return self.fc2(self.activate(self.fc1(x_BPE)))  # type: ignore[no-any-return]


class VisionLayer(nn.Module):
    """Attention and a feed-forward layer with norms before them."""

    def __init__(self, arch: SiglipArchitecture) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(arch.hidden_size, eps=arch.norm_epsilon)
        self.self_attn = PatchAttention(arch)
        self.layer_norm2 = nn.LayerNorm(arch.hidden_size, eps=arch.norm_epsilon)
        self.mlp = PatchMLP(arch)

    def forward(self, x_BPE: Tensor) -> Tensor:
        x_BPE = x_BPE + self.self_attn(self.layer_norm1(x_BPE))
        return x_BPE + self.mlp(self.layer_norm2(x_BPE))  # type: ignore[no-any-return]


class VisionTower(nn.Module):
    """Pixels to hidden states of patches."""

    def __init__(self, arch: SiglipArchitecture) -> None:
        super().__init__()
        self.embeddings = PatchEmbeddings(arch)
        self.encoder = nn.ModuleDict({"layers": nn.ModuleList(VisionLayer(arch) for _ in range(arch.num_layers))})
        self.post_layernorm = nn.LayerNorm(arch.hidden_size, eps=arch.norm_epsilon)

    def forward(self, pixels_B3SS: Tensor) -> Tensor:
        x_BPE = self.embeddings(pixels_B3SS)
        for layer in self.encoder["layers"]:  # type: ignore[attr-defined]
            x_BPE = layer(x_BPE)
        return self.post_layernorm(x_BPE)  # type: ignore[no-any-return]


class Projector(nn.Module):
    """Hidden states of patches to embeddings of tokens."""

    def __init__(self, arch: SiglipArchitecture) -> None:
        super().__init__()
        self.patches_per_side = arch.image_size // arch.patch_size
        self.pool_size = self.patches_per_side // isqrt(arch.num_tokens)
        self.mm_soft_emb_norm = OffsetRMSNorm(arch.hidden_size, arch.norm_epsilon, 1.0)
        self.mm_input_projection_weight = nn.Parameter(torch.zeros(arch.hidden_size, arch.text_size))

    def forward(self, x_BPE: Tensor) -> Tensor:
        grid = x_BPE.transpose(1, 2).reshape(len(x_BPE), -1, self.patches_per_side, self.patches_per_side)
        pooled_BNE = F.avg_pool2d(grid, self.pool_size).flatten(2).transpose(1, 2)
        return self.mm_soft_emb_norm(pooled_BNE) @ self.mm_input_projection_weight  # type: ignore[no-any-return]


class SiglipEncoder(nn.Module):
    """Pixels to the embeddings of tokens."""

    def __init__(self, arch: SiglipArchitecture) -> None:
        super().__init__()
        self.arch = arch
        self.vision_tower = VisionTower(arch)
        self.multi_modal_projector = Projector(arch)

    def encode(self, pixels_3SS: Tensor, grid: tuple[int, int] | None, more: Mapping[str, Any]) -> Tensor:
        """One image to [N, X]."""
        return self(pixels_3SS.unsqueeze(0))[0]  # type: ignore[no-any-return]

    def forward(self, pixels_B3SS: Tensor) -> Tensor:
        """To [B, N, X]."""
        return self.multi_modal_projector(self.vision_tower(pixels_B3SS))  # type: ignore[no-any-return]
