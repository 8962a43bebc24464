"""EngineInfo: what the engine runs with: device, dtype, cache size, decode path. EngineState: how busy it is."""

from __future__ import annotations

from dataclasses import dataclass

from flambeau.llm.config import Quantization, SpeculationKind


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """The settings that result from configuration, checkpoint and machine."""

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
        speculation = f"{self.speculation} of {self.speculate_k} tokens" if self.speculation else "none"
        return (
            f"device {self.device}, dtype {self.dtype}, quantization {self.quantization or 'none'}, "
            f"{self.num_blocks} blocks of {self.block_size} tokens, at most {self.max_length} tokens in a sequence, "
            f"speculation {speculation}, decoding by {self.decode}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineState:
    """How busy an engine is."""

    num_running: int
    num_waiting: int
    num_blocks: int
    num_blocks_used: int
    num_preempted: int
