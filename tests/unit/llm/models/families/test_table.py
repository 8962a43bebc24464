"""The table of families."""

from __future__ import annotations

from pathlib import Path

import pytest

from flambeau.archive.pretrained import LANGUAGE_MODELS
from flambeau.llm.errors import CheckpointError
from flambeau.llm.models.families.image_readers import IMAGE_READERS, REFUSED
from flambeau.llm.models.families.table import FAMILIES, family_of

DOCS = Path(__file__).parents[5] / "docs"
PAGE, IMAGES = DOCS / "model-families.md", DOCS / "images.md"


def test_the_page_lists_all_families_and_no_others():
    named = {
        word
        for word in PAGE.read_text().split("`")
        if word.endswith(("ForCausalLM", "LMHeadModel", "OmniModel", "Reasoning_V3", "Generation"))
    }
    assert named == set(FAMILIES)


def test_the_page_of_images_lists_all_classes_that_read_them_or_are_refused():
    rows = [line.split("|")[1] for line in IMAGES.read_text().splitlines() if line.startswith("| `")]
    assert {name for row in rows for name in row.split("`")[1::2]} == {*IMAGE_READERS, *REFUSED}


def test_the_readme_and_the_changelog_count_the_classes():
    for page in ("README.md", "CHANGELOG.md"):
        assert f"{len(FAMILIES)} classes" in (DOCS.parent / page).read_text()


@pytest.mark.parametrize("name", REFUSED)
def test_a_class_whose_images_cannot_be_read_is_refused_with_the_reason(name):
    with pytest.raises(CheckpointError, match=f"^{name} is not supported, because .* use another"):
        family_of({"architectures": [name]})


def test_no_row_leaves_a_key_to_itself_that_it_has_checked():
    both = {name: family.understands & family.supported.keys() for name, family in FAMILIES.items()}
    assert {name: keys for name, keys in both.items() if keys} == {}


def test_families_with_encoders_are_served_by_the_engine():
    assert {name for name in FAMILIES if name.endswith("ForConditionalGeneration")} <= set(LANGUAGE_MODELS)
