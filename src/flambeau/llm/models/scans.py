"""Scans: what recurrent layers compute over the tokens of sequences, from one state to the next.

Prompts are computed in chunks of a few dozen tokens: inside a chunk by matrix products, from chunk to chunk by the
state. A single token is one update of the state. All is float32. A time step of 0, or a beta and a decay of 0, leaves
the state as it is: this is how padding behaves.

Shapes: S sequences · Q tokens of each · C channels · W width of a convolution · N state size · G groups of heads
· R heads of a group · H = G · R heads · P head size · K key size · V value size · L tokens of a chunk
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK = 64  # tokens; products inside a chunk grow with its length, the number of updates shrinks


def convolve(
    x_SQC: Tensor, window_SCW: Tensor, weight_C1W: Tensor, bias_C: Tensor | None, lengths_S: Tensor | None
) -> tuple[Tensor, Tensor]:
    """A causal convolution of each channel, and the window of inputs that the next token needs."""
    num_tokens, width = x_SQC.shape[1], weight_C1W.shape[-1]
    joined = torch.cat((window_SCW.to(x_SQC.dtype), x_SQC.transpose(1, 2)), dim=-1)
    if num_tokens == 1:
        y_SC = (joined * weight_C1W.squeeze(1)).sum(dim=-1)
        y_SQC = (y_SC if bias_C is None else y_SC + bias_C).unsqueeze(1)
    else:
        y_SQC = F.conv1d(joined, weight_C1W, bias_C, groups=len(weight_C1W)).transpose(1, 2)
    if lengths_S is None:
        return y_SQC, joined[..., num_tokens:]
    places = lengths_S[:, None, None] + torch.arange(width - 1, device=x_SQC.device)
    return y_SQC, joined.gather(2, places.expand(-1, joined.shape[1], -1))


def mask_padding(x: Tensor, lengths_S: Tensor | None) -> Tensor:
    """Zeros for the tokens [S, Q, …] behind the end of their sequence."""
    if lengths_S is None:
        return x
    is_padding = torch.arange(x.shape[1], device=x.device) >= lengths_S.unsqueeze(1)
    return x.masked_fill(is_padding.view(*is_padding.shape, *[1] * (x.dim() - 2)), 0)


def chunks(num_tokens: int, length: int = CHUNK) -> Iterator[slice]:
    return (slice(start, start + length) for start in range(0, num_tokens, length))


def decay_between(log_decay: Tensor) -> tuple[Tensor, Tensor]:
    """For log-decays […, L]: their running sums, and the decay […, L, L] from the column's token to the row's.

    Differences of large sums lose digits: what a sum has beyond the digits of float32 is subtracted separately.
    """
    wide = log_decay.double() if log_decay.device.type != "mps" else log_decay  # which has no float64
    sums = wide.cumsum(dim=-1)
    total = sums.to(log_decay.dtype)
    rest = (sums - total).to(log_decay.dtype)
    between = differences(total).add_(rest.unsqueeze(-1)).sub_(rest.unsqueeze(-2))
    return total, exp_of_earlier(between)


def rounded_decay_between(log_decay: Tensor) -> tuple[Tensor, Tensor]:
    """The same from the rounded sums, as reference implementations of the gated delta rule compute it."""
    total = log_decay.cumsum(dim=-1)
    return total, exp_of_earlier(differences(total))


def differences(total: Tensor) -> Tensor:
    """[…, L] to […, L, L]: the row's minus the column's."""
    return total.unsqueeze(-1) - total.unsqueeze(-2)


def exp_of_earlier(between: Tensor) -> Tensor:
    """Decays from log-decays […, L, L]; 0 from later tokens to earlier ones."""
    length = between.shape[-1]
    is_later = torch.ones(length, length, dtype=torch.bool, device=between.device).triu(1)
    return between.masked_fill(is_later, -torch.inf).exp()  # masked first: it would overflow there


# ---- Mamba 2 ----


def scan_mamba2(
    x_SQHP: Tensor, dt_SQH: Tensor, a_H: Tensor, b_SQGN: Tensor, c_SQGN: Tensor, state_SHPN: Tensor
) -> tuple[Tensor, Tensor]:
    """h ← exp(dt·a) h + dt·x bᵀ; y = h c. Returns y [S, Q, H, P] and the last h."""
    num_sequences, num_tokens, groups = b_SQGN.shape[:3]
    heads = num_sequences, num_tokens, groups, -1
    scaled = (x_SQHP * dt_SQH.unsqueeze(-1)).reshape(*heads, x_SQHP.shape[-1])  # [S, Q, G, R, P]
    log_decay = (dt_SQH * a_H).reshape(heads)  # [S, Q, G, R]
    state = state_SHPN.reshape(num_sequences, groups, -1, *state_SHPN.shape[2:])
    if num_tokens == 1:
        added = scaled[:, 0].unsqueeze(-1) * b_SQGN[:, 0, :, None, None, :]
        state = state * log_decay[:, 0, ..., None, None].exp() + added
        y = (state * c_SQGN[:, 0, :, None, None, :]).sum(dim=-1).unsqueeze(1)
        return y.flatten(2, 3), state.flatten(1, 2)
    pieces = []
    for chunk in chunks(num_tokens):
        b, c, x = b_SQGN[:, chunk], c_SQGN[:, chunk], scaled[:, chunk]
        total, decay = decay_between(log_decay[:, chunk].movedim(1, -1))  # [S, G, R, L] and [S, G, R, L, L]
        scores = torch.einsum("slgn,smgn->sglm", c, b).unsqueeze(2) * decay
        inside = torch.einsum("sgrlm,smgrp->slgrp", scores, x)
        before = torch.einsum("slgn,sgrpn->slgrp", c, state) * total.movedim(-1, 1).unsqueeze(-1).exp()
        pieces.append(inside + before)
        left = decay[..., -1, :].movedim(-1, 1).unsqueeze(-1)  # of each token at the end of the chunk
        state = state * total[..., -1, None, None].exp() + torch.einsum("slgrp,slgn->sgrpn", x * left, b)
    return torch.cat(pieces, dim=1).flatten(2, 3), state.flatten(1, 2)


# ---- Mamba 1 ----


def scan_mamba(
    x_SQC: Tensor, dt_SQC: Tensor, a_CN: Tensor, b_SQN: Tensor, c_SQN: Tensor, state_SCN: Tensor
) -> tuple[Tensor, Tensor]:
    """h ← exp(dt·a) h + dt·x bᵀ for each channel; y = h c. Returns y [S, Q, C] and the last h."""
    pieces = []
    for chunk in chunks(x_SQC.shape[1]):
        decay = (dt_SQC[:, chunk].unsqueeze(-1) * a_CN).exp()  # [S, L, C, N]
        added = (dt_SQC[:, chunk] * x_SQC[:, chunk]).unsqueeze(-1) * b_SQN[:, chunk].unsqueeze(2)
        states = run_recurrence(decay, added, state_SCN)
        pieces.append((states * c_SQN[:, chunk].unsqueeze(2)).sum(dim=-1))
        state_SCN = states[:, -1]
    return torch.cat(pieces, dim=1), state_SCN


def run_recurrence(decay: Tensor, added: Tensor, state: Tensor) -> Tensor:
    """All h [S, L, …] of h ← decay·h + added: the spans that are summed up double in length until they cover all."""
    added = torch.cat(((added[:, :1] + decay[:, :1] * state.unsqueeze(1)), added[:, 1:]), dim=1)
    span = 1
    while span < added.shape[1]:
        later = added[:, span:] + decay[:, span:] * added[:, :-span]
        decay = torch.cat((decay[:, :span], decay[:, span:] * decay[:, :-span]), dim=1)
        added = torch.cat((added[:, :span], later), dim=1)
        span *= 2
    return added


# ---- gated delta rule ----


def scan_delta(
    q_SQHK: Tensor, k_SQHK: Tensor, v_SQHV: Tensor, log_decay_SQH: Tensor, beta_SQH: Tensor, state_SHKV: Tensor
) -> tuple[Tensor, Tensor]:
    """h ← decay·h; h ← h + k (beta·(v − hᵀk))ᵀ; y = hᵀq. Returns y [S, Q, H, V] and the last h."""
    if q_SQHK.shape[1] == 1:
        q, k, v = (x[:, 0] for x in (q_SQHK, k_SQHK, v_SQHV))
        state = state_SHKV * log_decay_SQH[:, 0, :, None, None].exp()
        new = (v - (state * k.unsqueeze(-1)).sum(dim=-2)) * beta_SQH[:, 0].unsqueeze(-1)
        state = state + k.unsqueeze(-1) * new.unsqueeze(-2)
        return (state * q.unsqueeze(-1)).sum(dim=-2).unsqueeze(1), state
    pieces, state = [], state_SHKV
    for chunk in chunks(q_SQHK.shape[1]):
        q, k, v = (x[:, chunk].transpose(1, 2) for x in (q_SQHK, k_SQHK, v_SQHV))  # [S, H, L, …]
        beta = beta_SQH[:, chunk].transpose(1, 2).unsqueeze(-1)
        total, decay = rounded_decay_between(log_decay_SQH[:, chunk].transpose(1, 2))
        since = total.unsqueeze(-1).exp()  # decay from the start of the chunk
        # What each token adds depends on what the tokens before it have added: a triangular system.
        links = (beta * (k @ k.transpose(-1, -2)) * decay).tril(-1)
        new = torch.linalg.solve_triangular(links, beta * (v - since * (k @ state)), upper=False, unitriangular=True)
        y = since * (q @ state) + ((q @ k.transpose(-1, -2)) * decay) @ new
        pieces.append(y.transpose(1, 2))
        left = (total[..., -1:] - total).exp().unsqueeze(-1)
        state = state * total[..., -1, None, None].exp() + (k * left).transpose(-1, -2) @ new
    return torch.cat(pieces, dim=1), state


# ---- delta rule with a decay of each key channel ----

CHANNEL_CHUNK = 16  # tokens: there is a decay for each pair of them and each channel


def scan_channel_delta(
    q_SQHK: Tensor, k_SQHK: Tensor, v_SQHV: Tensor, log_decay_SQHK: Tensor, beta_SQH: Tensor, state_SHKV: Tensor
) -> tuple[Tensor, Tensor]:
    """As `scan_delta`, where each row of h, the channel of a key, has a decay of its own."""
    if q_SQHK.shape[1] == 1:
        q, k, v = (x[:, 0] for x in (q_SQHK, k_SQHK, v_SQHV))
        state = state_SHKV * log_decay_SQHK[:, 0].unsqueeze(-1).exp()
        new = (v - (state * k.unsqueeze(-1)).sum(dim=-2)) * beta_SQH[:, 0].unsqueeze(-1)
        state = state + k.unsqueeze(-1) * new.unsqueeze(-2)
        return (state * q.unsqueeze(-1)).sum(dim=-2).unsqueeze(1), state
    pieces, state = [], state_SHKV
    for chunk in chunks(q_SQHK.shape[1], CHANNEL_CHUNK):
        q, k, v = (x[:, chunk].transpose(1, 2) for x in (q_SQHK, k_SQHK, v_SQHV))  # [S, H, L, …]
        beta = beta_SQH[:, chunk].transpose(1, 2).unsqueeze(-1)
        total, decay = decay_between(log_decay_SQHK[:, chunk].permute(0, 2, 3, 1))  # [S, H, K, L], [S, H, K, L, L]
        since = total.transpose(-1, -2).exp()
        faded = decay * k.transpose(-1, -2).unsqueeze(-2)  # what later tokens find of each key
        links = (beta * torch.einsum("shlk,shklm->shlm", k, faded)).tril(-1)
        new = torch.linalg.solve_triangular(links, beta * (v - (k * since) @ state), upper=False, unitriangular=True)
        y = (q * since) @ state + torch.einsum("shlk,shklm->shlm", q, faded) @ new
        pieces.append(y.transpose(1, 2))
        state = state * total[..., -1:].exp() + faded[..., -1, :] @ new
    return torch.cat(pieces, dim=1), state
