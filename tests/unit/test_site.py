"""The documentation site: links lead to its own pages or to the repository, and nothing is fetched from elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from scripts.site import REPOSITORY, rewrite

from support.snippets import ROOT

FETCHED = re.compile(r"<(?:link|script|img|iframe)\b[^>]*(?:src|href)=\"?(?:https?:)?//[^>]+>")
PLACES = {"docs/llm.md": "llm.md", "docs/tasks/gpus.md": "tasks/gpus.md", "README.md": "index.md"}


@pytest.mark.parametrize(
    ("link", "source", "expected"),
    [
        ("../llm.md#several-gpus", "docs/tasks/gpus.md", "../llm.md#several-gpus"),
        (f"{REPOSITORY}/blob/main/docs/llm.md", "README.md", "llm.md"),
        ("../src/flambeau", "docs/llm.md", f"{REPOSITORY}/blob/main/src/flambeau"),
        ("#anchor", "docs/llm.md", "#anchor"),
        ("https://pypi.org/project/torch/", "docs/llm.md", "https://pypi.org/project/torch/"),
    ],
)
def test_links_lead_to_pages_or_to_the_repository(link, source, expected):
    assert rewrite(link, source, PLACES) == expected


def test_site_builds_without_warnings_and_fetches_nothing_from_elsewhere(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=140)
    assert result.returncode == 0, result.stdout + result.stderr
    pages = [*tmp_path.rglob("*.html")]
    assert len(pages) > 50
    for page in pages:
        fetched = re.findall(
            r"<(?:link|script|img|iframe)\b[^>]*(?:src|href)=\"?(?:https?:)?//[^>]+>", page.read_text()
        )
        assert not fetched, (page, fetched)
    assert "tasks/streaming/" in (tmp_path / "search" / "search_index.json").read_text()
