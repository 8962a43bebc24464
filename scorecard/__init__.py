"""Attacks and faults against real server processes, with what was promised and what was measured."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HANDLERS = Path(__file__).parent / "handlers"
CORPUS = Path(__file__).parent / "corpus"
RESULTS = Path(__file__).parent / "results"

# The cases use the servers, archives and clients of tests/support.
if str(ROOT / "tests") not in sys.path:
    sys.path.insert(0, str(ROOT / "tests"))
