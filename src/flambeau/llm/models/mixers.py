"""The kinds of recurrent layers, by name."""

from __future__ import annotations

from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.gated_recurrence import GatedRecurrence
from flambeau.llm.models.kimi_delta import KimiDeltaNet
from flambeau.llm.models.lightning_attention import LightningAttention
from flambeau.llm.models.receptance import TimeMix
from flambeau.llm.models.recurrent import DeltaNet, Mamba, Mamba2, Mixer, ShortConvolution

MIXERS: dict[str, type[Mixer]] = {
    "short_conv": ShortConvolution,
    "mamba": Mamba,
    "mamba2": Mamba2,
    "delta_net": DeltaNet,
    "kimi_delta": KimiDeltaNet,
    "lightning": LightningAttention,
    "gated": GatedRecurrence,
    "rwkv": TimeMix,
}


def make_mixer(arch: Architecture, layer: int) -> Mixer:
    assert arch.recurrence is not None
    return MIXERS[arch.recurrence.kind](arch, layer)
