"""make_head: the network of a head of any kind."""

from __future__ import annotations

from flambeau.llm.models.assistant_head import AssistantHead
from flambeau.llm.models.block_head import BlockHead
from flambeau.llm.models.draft_heads import DraftHead, Eagle3Head, EagleHead, HeadKind, HeadSettings, MtpHead

HEADS: dict[HeadKind, type[DraftHead]] = {
    "eagle3": Eagle3Head,
    "eagle": EagleHead,
    "mtp": MtpHead,
    "assistant": AssistantHead,
    "dflash": BlockHead,
}


def make_head(settings: HeadSettings) -> DraftHead:
    return HEADS[settings.kind](settings)
