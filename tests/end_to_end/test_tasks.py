"""Every task page of docs/tasks is followed word for word on a real server: only the ports are others."""

from __future__ import annotations

import pytest

from support.pages import Reader
from support.snippets import ROOT

PAGES = sorted((ROOT / "docs" / "tasks").glob("*.md"))


def test_there_are_ten_pages():
    assert len(PAGES) == 10


@pytest.mark.slow
@pytest.mark.timeout(600)  # a busy machine is no failure
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_page_can_be_followed(page, tmp_path):
    with Reader(tmp_path) as reader:
        reader.follow(page)
    assert reader.comparisons > 0
