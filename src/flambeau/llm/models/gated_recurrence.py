"""GatedRecurrence: a real-gated linear recurrent unit (RG-LRU) after a short convolution (RecurrentGemma, Griffin).

Shapes: … any leading dimensions · S sequences · Q tokens of each · E hidden · C channels · H blocks of gates
· B channels of a block
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flambeau.llm.models.activations import ACTIVATIONS
from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.recurrent import Recur, RecurrentMixer, States, by_head, float32_parameter
from flambeau.llm.models.scans import chunks, mask_padding, run_recurrence

SHARPNESS = 8.0  # of the gates of decays


class GatedRecurrence(RecurrentMixer):
    """Each channel decays by a gate of its own; another gate weighs what is added, so that states keep their size."""

    def __init__(self, arch: Architecture, layer: int) -> None:
        super().__init__(arch, layer)
        size, blocks = self.shape.inner_size, self.shape.num_heads
        self.in_proj_x, self.in_proj_y = (nn.Linear(arch.hidden_size, size) for _ in range(2))
        self.out_proj = nn.Linear(size, arch.hidden_size)
        self.recurrent_param = float32_parameter(size)
        each = size // blocks
        self.input_gate_weight, self.recurrent_gate_weight = (
            nn.Parameter(torch.zeros(blocks, each, each)) for _ in range(2)
        )
        self.input_gate_bias, self.recurrent_gate_bias = (nn.Parameter(torch.zeros(blocks, each)) for _ in range(2))
        self.activate = ACTIVATIONS[arch.activation]

    def forward(self, x: Tensor, recur: Recur) -> Tensor:
        """[…, E] to […, E]."""
        y = recur(self.layer, self, self.in_proj_x(x))
        return self.out_proj(y * self.activate(self.in_proj_y(x)))  # type: ignore[no-any-return]

    def advance(self, states: States, lengths_S: Tensor | None, *inputs: Tensor) -> tuple[Tensor, States]:
        window, state_SC, has_begun_S1 = states
        x, window = self.convolve(inputs[0], window, lengths_S)
        dtype, x = x.dtype, x.float()
        gate = self.gates(x, self.input_gate_weight, self.input_gate_bias)
        decays = self.gates(x, self.recurrent_gate_weight, self.recurrent_gate_bias)
        log_decay = -SHARPNESS * decays * F.softplus(self.recurrent_param)
        share = torch.sqrt(1 - torch.exp(2 * log_decay))
        # The first token of a sequence is added as it is.
        first = torch.where(has_begun_S1 > 0, share[:, 0], 1.0).unsqueeze(1)
        added = mask_padding(x * gate * torch.cat((first, share[:, 1:]), dim=1), lengths_S)
        decay = mask_padding(log_decay, lengths_S).exp()
        pieces = []
        for chunk in chunks(x.shape[1]):
            pieces.append(run_recurrence(decay[:, chunk], added[:, chunk], state_SC))
            state_SC = pieces[-1][:, -1]
        return torch.cat(pieces, dim=1).to(dtype), (window, state_SC, torch.ones_like(has_begun_S1))

    def gates(self, x_SQC: Tensor, weight_HBB: Tensor, bias_HB: Tensor) -> Tensor:
        """Gates [S, Q, C] of blocks of channels."""
        blocks = by_head(x_SQC, len(weight_HBB))
        return torch.sigmoid(torch.einsum("sqhi,hij->sqhj", blocks, weight_HBB.float()) + bias_HB.float()).flatten(-2)
