from __future__ import annotations

import os
import re
import subprocess
import sys

from flambeau.metrics.log_lines import parse_line
from flambeau.serving.server_metrics import parse_output

METRICS = {
    "CPUUtilization",
    "MemoryUsed",
    "MemoryAvailable",
    "MemoryUtilization",
    "DiskUsage",
    "DiskAvailable",
    "DiskUtilization",
}


def test_the_script_prints_lines_that_the_server_parses():
    program = [sys.executable, "-m", "ts.metrics.metric_collector", "--gpu", "0"]
    done = subprocess.run(program, input=f"{os.getpid()},\n", capture_output=True, text=True, check=True, timeout=50)
    readings = parse_output(done.stdout.splitlines())
    assert {name for name, _, _, _ in readings} == METRICS
    assert re.search(rf"^{os.getpid()}:[1-9]", done.stdout, re.MULTILINE)
    assert all(parse_line(line) for line in done.stdout.split("\n\n")[0].splitlines())
