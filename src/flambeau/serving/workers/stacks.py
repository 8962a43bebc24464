"""What the stacks of a worker's process show, on the machine where it runs."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from flambeau.serving.workers.endless_loops import find_endless_loop
from flambeau.small_files import read_small
from flambeau.wire.stack_dumps import StackDump, main_stack


@dataclass(frozen=True, slots=True)
class Stacks:
    """The stacks of all threads; empty if the process could not write them."""

    text: str = ""
    is_endless: bool = False  # the main thread is in a loop whose source shows that it cannot end


def take_stacks(pid: int, after_s: float = 0.0) -> Stacks:
    """The stacks of a process, a moment later. Call it in a thread."""
    time.sleep(after_s)
    text = StackDump(pid).wait()
    return Stacks(text, is_in_endless_loop(text))


def is_in_endless_loop(dump: str) -> bool:
    """Whether the main thread is in a loop whose source shows that it cannot end. Call it in a thread."""
    frames = main_stack(dump)
    if not frames:
        return False
    try:
        source = read_small(Path(frames[0].file)).decode()
    except (OSError, ValueError):
        return False
    return find_endless_loop(source, int(frames[0].line)) is not None
