"""NgramEmbeddings: what a table has for the last tokens together is added to the streams of hidden states (Qwen 4).

A hash of the tokens finds the rows. Gates for each stream depend on the stream, and a convolution with gaps adds what
earlier tokens had. The state of a sequence is the window of that convolution, and its last tokens.

Shapes: … any leading dimensions · S streams, or sequences · Q tokens of each · E hidden · N embeddings of all heads
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.families.recurrence import StateShapes
from flambeau.llm.models.norms import StreamNorm
from flambeau.llm.models.recurrent import Recur, States


class NgramEmbeddings(nn.Module):
    """Its states are numbered after those of all layers."""

    def __init__(self, arch: Architecture, layer: int) -> None:
        super().__init__()
        assert arch.ngrams is not None
        assert arch.hyper is not None
        shape = self.shape = arch.ngrams
        self.layer, self.num_streams, self.hidden_size = (
            arch.num_layers + layer,
            arch.hyper.num_streams,
            arch.hidden_size,
        )
        width = self.num_streams * self.hidden_size
        self.multipliers, rows = shape.multipliers(layer), shape.rows(layer)
        self.rows, self.offsets = rows, tuple(sum(rows[:head]) for head in range(len(rows)))
        self.table = nn.Embedding(shape.num_rows(layer), shape.size // shape.num_all_heads)
        self.key_proj = nn.Linear(shape.size, width, bias=False)
        self.value_proj = nn.Linear(shape.size, self.hidden_size, bias=False)
        self.norm_key, self.norm_query, self.norm_conv = (StreamNorm(arch, self.num_streams) for _ in range(3))
        self.conv1d = nn.Conv1d(width, width, shape.conv_width, groups=width, bias=False, dilation=shape.longest)

    @property
    def state_shapes(self) -> StateShapes:
        return self.shape.states(self.num_streams * self.hidden_size)

    def forward(self, x: Tensor, ids: Tensor, recur: Recur) -> Tensor:
        """What is added to the streams […, S, E] of the tokens […]."""
        y = recur(self.layer, self, ids.unsqueeze(-1), self.norm_query(x).flatten(-2))
        return torch.unflatten(y, -1, (self.num_streams, -1))

    def advance(self, states: States, lengths_S: Tensor | None, *inputs: Tensor) -> tuple[Tensor, States]:
        (ids_SQ1, queries), (context, window) = inputs, states
        tokens = torch.cat((context.long() + self.shape.eos_id, ids_SQ1.squeeze(-1)), dim=1)
        embedded = self.table(self.places(tokens)).flatten(-2)  # [S, Q, N]
        keys = self.norm_key(torch.unflatten(self.key_proj(embedded), -1, (self.num_streams, -1)))
        scores = (keys * torch.unflatten(queries, -1, (self.num_streams, -1))).sum(dim=-1, keepdim=True)
        scores = scores * self.hidden_size**-0.5
        gates = torch.sigmoid(scores.abs().clamp_min(1e-6).sqrt() * scores.sign())
        given = gates * self.value_proj(embedded).unsqueeze(-2)  # [S, Q, streams, E]
        joined = torch.cat((window.to(given.dtype), self.norm_conv(given).flatten(-2).transpose(1, 2)), dim=-1)
        found = F.silu(self.conv1d(joined)).transpose(1, 2)
        kept = last_of(tokens - self.shape.eos_id, self.shape.longest - 1, lengths_S)
        return given.flatten(-2) + found, (kept, last_of(joined, self.shape.num_window, lengths_S))

    def places(self, tokens: Tensor) -> Tensor:
        """The rows of the table [S, Q, heads] for all but the first of these tokens; the first are the context."""
        number, start = self.shape.num_heads, self.shape.longest - 1
        own = tokens[:, start:]
        hashed, found = own * self.multipliers[0], []
        before = torch.zeros_like(own)
        for back in range(1, self.shape.longest):
            earlier = tokens[:, start - back : tokens.shape[1] - back]
            is_cut = before == self.shape.eos_id if back > 1 else torch.zeros_like(own, dtype=torch.bool)
            before = earlier.masked_fill(is_cut, self.shape.eos_id)
            hashed = hashed ^ (before * self.multipliers[back])
            rows, offsets = (
                torch.tensor(each[(back - 1) * number : back * number], device=own.device)
                for each in (self.rows, self.offsets)
            )
            found.append(torch.remainder(hashed.unsqueeze(-1), rows) + offsets)
        return torch.cat(found, dim=-1)


def last_of(x: Tensor, count: int, lengths_S: Tensor | None) -> Tensor:
    """The last columns [S, …, count] of what went before and the tokens of each sequence [S, …, before + Q]."""
    if lengths_S is None:
        return x[..., x.shape[-1] - count :]
    places = lengths_S.view(-1, *[1] * (x.dim() - 1)) + torch.arange(count, device=x.device)
    return x.gather(-1, places.expand(*x.shape[:-1], count))
