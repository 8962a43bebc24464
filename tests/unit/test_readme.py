"""README is short. The table of docs/migrate.md names tests that exist, and every contract test is in it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
OTHERS = {"test_configuration_docs.py", "test_doctor.py", "test_same_scheduling_as_torchserve.py"}  # beside a row's own


def test_every_row_is_backed_by_a_test_and_every_contract_test_by_a_row():
    table = (
        (ROOT / "docs" / "migrate.md").read_text().partition("## Compatibility, row by row")[2].partition("\n## ")[0]
    )
    named = set(re.findall(r"`(test_\w+\.py)`", table))
    there = {path.name for path in (ROOT / "tests" / "contract").glob("test_*.py")}
    assert named == there - OTHERS


def test_readme_is_short():
    text, _, links = (ROOT / "README.md").read_text().partition("\n\n[")
    assert len(text.splitlines()) <= 90
    assert all("]: https://" in line for line in links.splitlines())
