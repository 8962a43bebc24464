"""GridEncoder: the patches of an image of any size → the embeddings that stand for it in a prompt.

The encoder of Qwen2-VL, Qwen2.5-VL and Qwen3-VL: a transformer whose queries and keys are rotated by rows and columns,
then a merger that makes a token of the patches of a square. The patches of such a square follow each other, and the
squares go row by row. Weights have the names of Hugging Face checkpoints below `visual`.

Shapes: P patches of an image · E hidden · H heads · D head size · N tokens · W windows · L patches of each · X the
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
from flambeau.llm.models.norms import RMSNorm
from flambeau.llm.models.rope import Angles, both_halves, rotate
from flambeau.llm.models.vision_architecture import GridArchitecture

Grid = tuple[int, int]  # rows and columns of patches


def make_norm(arch: GridArchitecture, size: int) -> nn.Module:
    return RMSNorm(size, arch.norm_epsilon) if arch.norm == "rms" else nn.LayerNorm(size, eps=arch.norm_epsilon)


class PatchEmbedding(nn.Module):
    """A product with the pixels of each patch; the weights have the shape of a convolution."""

    def __init__(self, arch: GridArchitecture) -> None:
        super().__init__()
        sides = (arch.frames, arch.patch_size, arch.patch_size)
        self.proj = nn.Conv3d(3, arch.hidden_size, sides, bias=arch.is_newer)

    def forward(self, patches_PI: Tensor) -> Tensor:
        """To [P, E]."""
        return F.linear(patches_PI, self.proj.weight.flatten(1), self.proj.bias)


class GridAttention(nn.Module):
    """Patches attend to those of their window, or to all."""

    def __init__(self, arch: GridArchitecture) -> None:
        super().__init__()
        self.num_heads = arch.num_heads
        self.qkv = nn.Linear(arch.hidden_size, 3 * arch.hidden_size)
        self.proj = nn.Linear(arch.hidden_size, arch.hidden_size)

    def forward(self, x_PE: Tensor, angles: Angles, windows: list[Tensor]) -> Tensor:
        """To [P, E]; `windows` [W, L] are the patches of windows, those of one size together."""
        q, k, v = self.qkv(x_PE).unflatten(-1, (3, self.num_heads, -1)).unbind(1)
        q, k = rotate(q, *angles), rotate(k, *angles)
        y_PHD = torch.empty_like(q)
        for window_WL in windows:
            q_WHLD, k_WHLD, v_WHLD = (each[window_WL].transpose(1, 2) for each in (q, k, v))
            y_PHD[window_WL] = F.scaled_dot_product_attention(q_WHLD, k_WHLD, v_WHLD).transpose(1, 2)
        return self.proj(y_PHD.flatten(1))  # type: ignore[no-any-return]


class GatedMLP(nn.Module):
    """Of Qwen2.5-VL."""

    def __init__(self, arch: GridArchitecture) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(arch.hidden_size, arch.intermediate_size) for _ in range(2))
        self.down_proj = nn.Linear(arch.intermediate_size, arch.hidden_size)
        self.activate = VISION_ACTIVATIONS[arch.activation]

    def forward(self, x_PE: Tensor) -> Tensor:
        return self.down_proj(self.activate(self.gate_proj(x_PE)) * self.up_proj(x_PE))  # type: ignore[no-any-return]


class TwoLayers(nn.Module):
    """A layer, an activation and a layer; their names differ."""

    def __init__(self, names: tuple[str, str], sizes: tuple[int, int, int], arch: GridArchitecture) -> None:
        super().__init__()
        self.names = names
        for name, given, made in zip(names, sizes, sizes[1:], strict=False):
            self.add_module(name, nn.Linear(given, made))
        self.activate = VISION_ACTIVATIONS[arch.activation]

    def forward(self, x: Tensor) -> Tensor:
        first, second = (self.get_submodule(name) for name in self.names)
        return second(self.activate(first(x)))  # type: ignore[no-any-return]


def make_mlp(arch: GridArchitecture) -> nn.Module:
    if arch.has_gate:
        return GatedMLP(arch)
    names = ("linear_fc1", "linear_fc2") if arch.is_newer else ("fc1", "fc2")
    return TwoLayers(names, (arch.hidden_size, arch.intermediate_size, arch.hidden_size), arch)


class GridLayer(nn.Module):
    """Attention and a feed-forward layer with norms before them."""

    def __init__(self, arch: GridArchitecture) -> None:
        super().__init__()
        self.norm1, self.norm2 = (make_norm(arch, arch.hidden_size) for _ in range(2))
        self.attn = GridAttention(arch)
        self.mlp = make_mlp(arch)

    def forward(self, x_PE: Tensor, angles: Angles, windows: list[Tensor]) -> Tensor:
        x_PE = x_PE + self.attn(self.norm1(x_PE), angles, windows)
        return x_PE + self.mlp(self.norm2(x_PE))  # type: ignore[no-any-return]


class Merger(nn.Module):
    """The patches of a square, side by side, to a token: a norm of each patch, and two layers."""

    def __init__(self, arch: GridArchitecture) -> None:
        super().__init__()
        self.size = arch.hidden_size * arch.merge_size**2
        self.ln_q = make_norm(arch, arch.hidden_size)
        self.mlp = nn.Sequential(nn.Linear(self.size, self.size), nn.GELU(), nn.Linear(self.size, arch.text_size))

    def forward(self, x_PE: Tensor) -> Tensor:
        """To [N, X]."""
        return self.mlp(self.ln_q(x_PE).view(-1, self.size))  # type: ignore[no-any-return]


class NewerMerger(nn.Module):
    """The same with Qwen3-VL's names; `is_late`: one norm of the patches side by side."""

    def __init__(self, arch: GridArchitecture, *, is_late: bool = False) -> None:
        super().__init__()
        self.size, self.is_late = arch.hidden_size * arch.merge_size**2, is_late
        self.norm = make_norm(arch, self.size if is_late else arch.hidden_size)
        self.linear_fc1 = nn.Linear(self.size, self.size)
        self.linear_fc2 = nn.Linear(self.size, arch.text_size)

    def forward(self, x_PE: Tensor) -> Tensor:
        """To [N, X]."""
        x = self.norm(x_PE.view(-1, self.size)) if self.is_late else self.norm(x_PE).view(-1, self.size)
        return self.linear_fc2(F.gelu(self.linear_fc1(x)))  # type: ignore[no-any-return]


class GridEncoder(nn.Module):
    """Patches to the embeddings of tokens."""

    def __init__(self, arch: GridArchitecture) -> None:
        super().__init__()
        self.arch = arch
        self.patch_embed = PatchEmbedding(arch)
        self.pos_embed = nn.Embedding(arch.num_positions, arch.hidden_size) if arch.num_positions else None
        self.blocks = nn.ModuleList(GridLayer(arch) for _ in range(arch.num_layers))
        self.merger = NewerMerger(arch) if arch.is_newer else Merger(arch)
        late = [NewerMerger(arch, is_late=True) for _ in arch.deep_layers]
        self.deepstack_merger_list = nn.ModuleList(late) if arch.is_newer else None

    def encode(self, patches_PI: Tensor, grid: Grid | None, more: Mapping[str, Any]) -> Tensor:
        """One image to [N, X], or [N, (1 + L) X] where the first L layers of the decoder add something, too.

        Or several of the same grid, as the steps of a video are: patches attend to those of the same one only.
        """
        assert grid is not None, "its patches have rows and columns"
        return self(patches_PI, grid)  # type: ignore[no-any-return]

    def forward(self, patches_PI: Tensor, grid: Grid) -> Tensor:
        x_PE = self.patch_embed(patches_PI)
        number = len(x_PE) // (grid[0] * grid[1])
        places_P2 = places_of(grid, self.arch.merge_size, x_PE.device)
        windows = windows_of(places_P2, grid, self.arch.window) if self.arch.window else []
        places_P2 = places_P2.repeat(number, 1)
        if self.pos_embed is not None:
            x_PE = x_PE + stretched(self.pos_embed.weight, places_P2, grid).to(x_PE.dtype)
        angles = angles_of(self.arch, places_P2)
        every = [torch.arange(len(x_PE), device=x_PE.device).view(number, -1)]
        firsts = every[0][:, :1, None]
        windows = [(window_WL + firsts).flatten(0, 1) for window_WL in windows] or every
        deep: dict[int, Tensor] = {}
        for i, layer in enumerate(self.blocks):
            x_PE = layer(x_PE, angles, every if i in self.arch.full_layers else windows)
            if i in self.arch.deep_layers and self.deepstack_merger_list is not None:
                deep[i] = self.deepstack_merger_list[self.arch.deep_layers.index(i)](x_PE)
        return torch.cat([self.merger(x_PE), *(deep[layer] for layer in sorted(deep))], dim=-1)


def places_of(grid: Grid, merge: int, device: torch.device) -> Tensor:
    """The row and the column [P, 2] of each patch: squares go row by row, and so do the patches of each."""
    rows, columns = grid
    places = torch.cartesian_prod(torch.arange(rows, device=device), torch.arange(columns, device=device))
    squares = places.view(rows // merge, merge, columns // merge, merge, 2)
    return squares.transpose(1, 2).reshape(-1, 2)


def angles_of(arch: GridArchitecture, places_P2: Tensor) -> Angles:
    """Half of the pairs of dimensions are rotated by the row, the others by the column."""
    size = arch.hidden_size // arch.num_heads // 2
    steps = torch.arange(0, size, 2, dtype=torch.float32, device=places_P2.device)
    angles = places_P2.unsqueeze(-1).float() * (1.0 / arch.rope_theta ** (steps / size))
    return both_halves(angles.cos().flatten(1), angles.sin().flatten(1))


def windows_of(places_P2: Tensor, grid: Grid, side: int) -> list[Tensor]:
    """The patches of the windows [W, L]; windows at the right and the lower edge may be smaller than the others."""
    across = -(-grid[1] // side)
    numbers_P = places_P2[:, 0] // side * across + places_P2[:, 1] // side
    order_P = numbers_P.argsort(stable=True)
    found = torch.split(order_P, torch.bincount(numbers_P).tolist())
    sizes = sorted({len(window) for window in found})
    return [torch.stack([window for window in found if len(window) == size]) for size in sizes]


def stretched(weight_QE: Tensor, places_P2: Tensor, grid: Grid) -> Tensor:
    """Learned positions of a square, interpolated between its corners for each patch [P, E]."""
    side = isqrt(len(weight_QE))
    taps, weights = [], []  # of rows, then columns: the position before and the one behind
    for places_P, number in zip(places_P2.T, grid, strict=True):
        at_P = places_P.float() * (side - 1) / max(number - 1, 1)
        first_P = at_P.floor().long()
        taps.append((first_P, (first_P + 1).clamp(max=side - 1)))
        weights.append((1 - (at_P - first_P), at_P - first_P))
    total = torch.zeros(())
    for row, row_weight in zip(taps[0], weights[0], strict=True):
        for column, column_weight in zip(taps[1], weights[1], strict=True):
            total = total + weight_QE[row * side + column] * (row_weight * column_weight).unsqueeze(-1)
    return total
