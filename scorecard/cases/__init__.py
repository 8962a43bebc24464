"""The cases, in the order of the report."""

from __future__ import annotations

from scorecard.case import Case
from scorecard.cases import (
    access,
    chaos,
    connections,
    event_loop,
    files,
    fuzzing,
    hangs,
    held_memory,
    input_errors,
    load,
    model_files,
    processes,
    storms,
)

CASES: tuple[Case, ...] = (
    *storms.CASES,
    *processes.CASES,
    *hangs.CASES,
    *files.CASES,
    *model_files.CASES,
    *event_loop.CASES,
    *held_memory.CASES,
    *connections.CASES,
    *access.CASES,
    *input_errors.CASES,
    *load.CASES,
    *chaos.CASES,
    *fuzzing.CASES,
)
