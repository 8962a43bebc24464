"""Compressor: one entry for every few tokens, a mean of their numbers weighted channel by channel (DeepSeek V4).

A token of a group has a weight for each channel, by a softmax of scores. What is known of a group that is not complete
is a state, however long a group is: the largest score, the sum of exponentials, and the sum of numbers that these
multiply. So an entry needs no tokens of earlier steps.

Where groups overlap, a token has numbers for two entries: that of its own group, and the next one.

Shapes: S sequences · Q tokens of each · W groups of tokens · R tokens of a group · C channels · E hidden
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.families.recurrence import StateShapes
from flambeau.llm.models.norms import RMSNorm
from flambeau.llm.models.recurrent import States

NOTHING = -1e30  # a score without weight; differences of infinities are no numbers


class Sums(NamedTuple):
    """What is kept of some tokens, […, C] each."""

    largest: Tensor  # of their scores
    total: Tensor  # of exponentials of scores, less the largest
    weighted: Tensor  # the sum of numbers times these

    @classmethod
    def of(cls, values: Tensor, scores: Tensor) -> Sums:
        """Of tokens […, R, C]."""
        largest = scores.amax(dim=-2)
        weights = torch.exp(scores - largest.unsqueeze(-2))
        return cls(largest, weights.sum(dim=-2), (weights * values).sum(dim=-2))

    def joined(self, other: Sums) -> Sums:
        """Of the tokens of both."""
        largest = torch.maximum(self.largest, other.largest)
        own, others = torch.exp(self.largest - largest), torch.exp(other.largest - largest)
        total = self.total * own + other.total * others
        return Sums(largest, total, self.weighted * own + other.weighted * others)

    def only_where(self, mask: Tensor) -> Sums:
        """Nothing elsewhere."""
        return Sums(self.largest.masked_fill(~mask, NOTHING), *(x.masked_fill(~mask, 0.0) for x in self[1:]))

    def at(self, groups_S: Tensor) -> Sums:
        """Of one group [S, C] of [S, W, C]."""
        return Sums(*(of_groups(x, groups_S.unsqueeze(1)).squeeze(1) for x in self))

    @classmethod
    def after(cls, first: Sums, following: Sums) -> Sums:
        """Of the groups before each one [S, W, C]: the first [S, C], then the others."""
        pairs = zip(first, following, strict=True)
        return cls(*(torch.cat((one.unsqueeze(1), others[:, :-1]), dim=1) for one, others in pairs))


def of_groups(x_SWC: Tensor, groups_SQ: Tensor) -> Tensor:
    """The numbers [S, Q, C] of each token's group. `take_along_dim` would fix the S of a traced step."""
    return x_SWC.gather(1, groups_SQ.unsqueeze(-1).expand(-1, -1, x_SWC.shape[2]))


class Series(nn.Module):
    """Numbers and scores of tokens, for entries of one size."""

    def __init__(self, arch: Architecture, size: int, rate: int, *, overlaps: bool) -> None:
        super().__init__()
        width = 2 * size if overlaps else size
        self.kv_proj = nn.Linear(arch.hidden_size, width, bias=False)
        self.score_proj = nn.Linear(arch.hidden_size, width, bias=False)
        self.position_bias = nn.Parameter(torch.zeros(rate, width, dtype=torch.float32))
        self.kv_norm = RMSNorm(size, arch.norm_epsilon)
        self.size, self.rate = size, rate

    def forward(self, x: Tensor, places: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Numbers and scores […, C] for the token's own entry; and for the next one, where groups overlap.

        `places` […] are those in a group.
        """
        values, scores = self.kv_proj(x).float(), self.score_proj(x).float() + self.position_bias[places]
        parts = [*zip(values.split(self.size, dim=-1), scores.split(self.size, dim=-1), strict=True)]
        return parts[::-1]  # in the files, the first numbers are those for the next entry


class Compressor:
    """The state of a layer's entries, whose channels lie side by side: keys, and what an indexer keeps."""

    def __init__(self, arch: Architecture, layer: int) -> None:
        assert arch.compression is not None
        assert arch.recurrence is not None
        self.rate = arch.compression.rates[layer]
        self.overlaps = layer in arch.compression.overlapping_layers
        self.state_shapes: StateShapes = arch.recurrence.state_shapes
        self.size = self.state_shapes[0][1] if self.overlaps else arch.head_size

    def advance(self, states: States, lengths_S: Tensor | None, *inputs: Tensor) -> tuple[Tensor, States]:
        """Entries [S, Q, C] of the groups of tokens; those of groups that the token does not complete have no meaning.

        Inputs are positions [S, Q, 1], numbers and scores [S, Q, C] for own entries, and the same for the next ones.
        """
        positions_SQ, rate = inputs[0].squeeze(-1), self.rate
        first_S = positions_SQ[:, 0]
        starts, begins = first_S % rate == 0, first_S == 0
        places_SQ = positions_SQ - (first_S - first_S % rate).unsqueeze(-1)
        length = places_SQ.shape[1]
        num_groups = (length + rate - 2) // rate + 1
        if lengths_S is not None:  # padding goes to a place of its own
            is_real = torch.arange(length, device=places_SQ.device) < lengths_S.unsqueeze(-1)
            last_S = (places_SQ.gather(1, lengths_S.unsqueeze(-1) - 1) // rate).squeeze(-1)
            targets_SQ = places_SQ.where(is_real, num_groups * rate)
        else:
            last_S, targets_SQ = places_SQ[:, -1] // rate, places_SQ
        kept = self.unpacked(states[0])
        sums = [self.by_group(inputs[i], inputs[i + 1], targets_SQ, num_groups) for i in range(1, len(inputs), 2)]
        for one, before in zip(sums, kept, strict=False):
            continued = before.only_where(~starts.unsqueeze(-1))
            whole = Sums(*(x[:, 0] for x in one)).joined(continued)
            for wide, own in zip(one, whole, strict=True):
                wide[:, 0] = own
        entries, new = sums[0], [sums[0].at(last_S)]
        if self.overlaps:
            completed = kept[1].only_where(~begins.unsqueeze(-1))
            first = Sums(*(torch.where(starts.unsqueeze(-1), *pair) for pair in zip(completed, kept[2], strict=True)))
            before = Sums.after(first, sums[1])
            entries = sums[0].joined(before)
            new += [sums[1].at(last_S), before.at(last_S)]
        found_SWC = entries.weighted / entries.total
        groups_SQ = (places_SQ // rate).clamp(max=num_groups - 1)
        return of_groups(found_SWC, groups_SQ), (self.packed(new, states[0]),)

    def by_group(self, values: Tensor, scores: Tensor, targets_SQ: Tensor, num_groups: int) -> Sums:
        """The tokens [S, Q, C] by group, [S, W, C]."""
        shape = len(values), num_groups * self.rate + 1, values.shape[-1]
        places = targets_SQ.unsqueeze(-1).expand_as(values)
        spread = values.new_zeros(shape).scatter(1, places, values)
        scored = scores.new_full(shape, NOTHING).scatter(1, places, scores)
        split = (torch.unflatten(x[:, :-1], 1, (num_groups, self.rate)) for x in (spread, scored))
        return Sums.of(*split)

    def unpacked(self, state: Tensor) -> list[Sums]:
        """Of the group that is not complete, for its own entry and the next; and of the one before it."""
        return [Sums(*state[:, i : i + 3, : self.size].unbind(1)) for i in (0, 3, 6)]

    def packed(self, new: list[Sums], before: Tensor) -> Tensor:
        rows = torch.stack([x for sums in new for x in sums], dim=1)
        state = torch.zeros_like(before)
        state[:, : rows.shape[1], : self.size] = rows
        return state
