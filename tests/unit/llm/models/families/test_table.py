"""The table of families."""

from __future__ import annotations

from pathlib import Path

from flambeau.archive.pretrained import LANGUAGE_MODELS
from flambeau.llm.models.families.table import FAMILIES

PAGE = Path(__file__).parents[5] / "docs" / "model-families.md"


def test_the_page_lists_all_families_and_no_others():
    named = {
        word for word in PAGE.read_text().split("`") if word.endswith(("ForCausalLM", "LMHeadModel", "Generation"))
    }
    assert named == set(FAMILIES)


def test_families_with_encoders_are_served_by_the_engine():
    assert {name for name in FAMILIES if name.endswith("ForConditionalGeneration")} <= set(LANGUAGE_MODELS)
