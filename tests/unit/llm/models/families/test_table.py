"""The table of families."""

from __future__ import annotations

from pathlib import Path

from flambeau.archive.pretrained import IMAGE_READERS
from flambeau.llm.models.families.table import FAMILIES

PAGE = Path(__file__).parents[5] / "docs" / "model-families.md"


def test_the_page_lists_all_families_and_no_others():
    named = {
        word for word in PAGE.read_text().split("`") if word.endswith(("ForCausalLM", "LMHeadModel", "Generation"))
    }
    assert named == set(FAMILIES)


def test_families_that_read_images_are_served_by_the_engine():
    assert set(IMAGE_READERS) == {name for name, family in FAMILIES.items() if family.vision is not None}
