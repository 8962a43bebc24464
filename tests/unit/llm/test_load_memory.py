"""Loading takes little more memory than the files, for the main kinds of checkpoints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.cpu_kernels import need_cpu_kernels

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "llm" / "load_memory.py"
KINDS = ("bfloat16", "GPTQ int4", "compressed-tensors int8", "fp8 blocks")


@pytest.mark.perf
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_takes_no_more_than_the_files_and_one_shard(tmp_path):
    need_cpu_kernels()
    command = [
        sys.executable,
        str(SCRIPT),
        "--kinds",
        ";".join(KINDS),
        "--networks",
        "dense,tied,experts",
        "--out",
        str(tmp_path),
    ]
    subprocess.run([*command, "--folder", str(tmp_path)], check=True)
    [file] = tmp_path.glob("*.json")
    rows = json.loads(file.read_text())["rows"]
    assert {row["kind"] for row in rows} == {*KINDS}
    assert [row for row in rows if not row["is_within"]] == []
