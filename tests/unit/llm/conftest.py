"""One thread is enough for tiny networks, and several processes test at a time."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

TRAINING = Path(__file__).parents[3] / "training" / "storyteller"


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def training_modules(monkeypatch):
    """The modules that train the shipped model are found as when they run."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(TRAINING)
    yield
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(TRAINING)):
            del sys.modules[name]
