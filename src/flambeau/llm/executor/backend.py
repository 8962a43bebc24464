"""Backend: computes forward passes. This protocol is all that the engine asks of one.

Shapes: T tokens of the step, one sequence after another · N rows of them · S sequences · J further tokens of each ·
V vocabulary · B words of 32 tokens
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from flambeau.llm.executor.inputs import StepInputs
from flambeau.llm.sampling.grammar_masks import Bits
from flambeau.llm.sampling.row_groups import RowSettings

PLAIN_PYTORCH = "plain PyTorch"
CPU_KERNELS = "CPU kernels"
UNTIL_INDUCTOR = f"{PLAIN_PYTORCH} until Inductor has compiled a step"
UNKNOWN_PARTS = "%s: the %s kernels do not know %s, so that Inductor compiles its steps"


class Greedy(Protocol):
    """Greedy decoding inside a backend: the logits stay there, and several steps can be one call."""

    def argmax(self, inputs: StepInputs) -> Tensor:
        """The most likely token after each [T], the first of equals; -1 if the logits are not finite."""

    def argmax_steps(self, first: StepInputs, positions_JS: Tensor, slots_JS: Tensor) -> Tensor:
        """Decode J + 1 greedy steps: [J + 1, S].

        The tokens found go to the given positions and slots. If logits are not finite, token 0 is found.
        """


class StartedTokens(Protocol):
    """The tokens of a decode step that was started and may still run."""

    @property
    def next_ids(self) -> Tensor:
        """Where the tokens will be on the device, as inputs of the next step; 0 if there is none."""

    def choose(self, bits_SB: Bits) -> None:
        """Let a step with constrained sequences choose its tokens, from those that these masks allow.

        Called once, before the tokens are waited for and before a further step is started.
        """

    def wait(self) -> list[int]:
        """The tokens, when the step has finished; -1 if there is no finite score."""


class AsyncDecoder(Protocol):
    """Decoding and sampling inside a backend: a step is started before the results of the one before are read."""

    def start(self, inputs: StepInputs, settings: RowSettings | None) -> StartedTokens | None:
        """Start a step of one token for each sequence; None: not possible at present. No settings: all are greedy.

        With constrained sequences, the network computes and `StartedTokens.choose` starts the rest.
        At most two steps may be started and not waited for.
        """


class Backend(Protocol):
    """Computes steps for one network and its KV cache, which is the only state kept between steps."""

    @property
    def model(self) -> nn.Module:
        """The network, or this rank's part of it."""

    @property
    def device(self) -> torch.device:
        """Where the network and the cache are; inputs may be on the host or there."""

    @property
    def decode_path(self) -> str:
        """What computes decode steps at present, for logs and `EngineInfo`; it may change between two steps."""

    @property
    def greedy(self) -> Greedy | None:
        """Greedy decoding without the sampler; None if there is none at present."""

    @property
    def async_decoder(self) -> AsyncDecoder | None:
        """Decoding and sampling without waiting; None if there is none."""

    def decode(self, inputs: StepInputs) -> Tensor:
        """The logits [T, V] of every token; each sequence has `inputs.query_len` of them."""

    def prefill(self, inputs: StepInputs, rows_N: Tensor) -> Tensor:
        """The logits [N, V] of the tokens at `rows_N`; sequences have any number of tokens."""

    def wait_until_compiled(self, timeout_s: float | None = None) -> bool:
        """Wait until everything that steps have requested is compiled or has failed; False after the timeout."""

    def close(self) -> None:
        """Stop what runs in the background; no step follows."""


@runtime_checkable
class KeepsStates(Protocol):
    """A backend that keeps a state for each sequence, by its row in the block tables."""

    def forget_row(self, row: int) -> None:
        """Free the state of a sequence that has left or was preempted."""


def run_prefill(backend: Backend, inputs: StepInputs, rows_N: Tensor) -> Tensor:
    """Compute prompts with the rotary positions of their length: all are longer than those change at, or none is."""
    rotation: Any = getattr(backend.model, "rotation", None)  # networks of transformers have their own
    with rotation.for_length(inputs.longest) if rotation is not None else nullcontext():
        return backend.prefill(inputs, rows_N)
