"""Families with recurrent layers, alone or between layers with attention."""

from __future__ import annotations

from flambeau.llm.models.families.delta_nets import DELTA_NETS
from flambeau.llm.models.families.gated_recurrences import GATED_RECURRENCES
from flambeau.llm.models.families.kimi_delta import KIMI_DELTA
from flambeau.llm.models.families.lightning_layers import LIGHTNING
from flambeau.llm.models.families.mamba_hybrids import MAMBA_HYBRIDS
from flambeau.llm.models.families.qwen_4 import QWEN_4_ROWS
from flambeau.llm.models.families.rwkv import RWKV
from flambeau.llm.models.families.short_convolutions import SHORT_CONVOLUTIONS
from flambeau.llm.models.families.state_space import STATE_SPACE
from flambeau.llm.models.families.zamba import ZAMBA

HYBRID = {
    **STATE_SPACE,
    **SHORT_CONVOLUTIONS,
    **DELTA_NETS,
    **QWEN_4_ROWS,
    **KIMI_DELTA,
    **LIGHTNING,
    **MAMBA_HYBRIDS,
    **GATED_RECURRENCES,
    **ZAMBA,
    **RWKV,
}
