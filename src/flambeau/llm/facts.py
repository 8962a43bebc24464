"""EngineFacts: what an engine runs with, for whoever wonders why it is as quick as it is."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from flambeau.llm.config import Quantization, SpeculationKind

PLAIN = "plain PyTorch"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """The settings that came of a configuration, a checkpoint and a machine."""

    device: str
    dtype: str
    quantization: Quantization | None
    num_blocks: int
    block_size: int
    max_length: int
    speculation: SpeculationKind | None
    speculate_k: int
    decode: str  # what computes decode steps at present

    def __str__(self) -> str:
        drafted = f"{self.speculation} of {self.speculate_k} tokens" if self.speculation else "none"
        return (
            f"device {self.device}, dtype {self.dtype}, quantization {self.quantization or 'none'}, "
            f"{self.num_blocks} blocks of {self.block_size} tokens, at most {self.max_length} tokens in a sequence, "
            f"speculation {drafted}, decoding by {self.decode}"
        )


def dtype_of(model: object) -> str:
    """What a network computes in: the type of its first parameter, the embeddings, which are never quantized."""
    first = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    return "" if first is None else str(first.dtype).removeprefix("torch.")
