"""What the process of a rank runs. Its parent has imported torch, which takes longer than most tests of ranks."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Mapping, Sequence


def run(script: str, arguments: Sequence[str], environment: Mapping[str, str], output: str) -> None:
    """Run a script as `python -c` does; what it prints goes to a file."""
    os.environ.update(environment)
    sys.argv = ["-c", *arguments]
    os.dup2(os.open(output, os.O_WRONLY), sys.stdout.fileno())
    warnings.simplefilter("ignore")
    exec(compile(script, "<rank>", "exec"), {"__name__": "__main__"})
