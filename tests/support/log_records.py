"""What a logger of the package has logged, without the wording."""

from __future__ import annotations

from typing import Any

import pytest


def logged(caplog: pytest.LogCaptureFixture, name: str, level: str = "WARNING") -> list[Any]:
    """The arguments of each record of a logger at a level."""
    return [record.args for record in caplog.records if (record.name, record.levelname) == (name, level)]
