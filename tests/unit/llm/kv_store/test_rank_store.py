"""Ranks keep prefixes of packed networks in host memory, with adapters too."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from support.adapters import write_adapter
from support.packed_files import write_kind
from support.ranks import run_ranks

PROGRAM = """
import json, os, sys
from pathlib import Path

import torch

from flambeau.llm.loader import load_engine, load_follower
from flambeau.llm.sampling_params import SamplingParams

torch.set_num_threads(1)
folder, size, adapter = Path(sys.argv[1]), int(sys.argv[2]), Path(json.loads(sys.argv[3]))
options = {"tensor_parallel_size": size, "num_blocks": 20, "block_size": 4, "compile": False, "device": "cpu"}
options |= {"kv_cache_dtype": "int8"} | ({"kv_host_memory_mb": 1} if size > 1 else {})


def generate(first, name=None):
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    before = engine.state.num_blocks_restored
    [found] = engine.generate([[*range(first, first + 48)]], params, adapter=name)
    return [found.token_ids, engine.state.num_blocks_restored > before]


if os.environ["RANK"] != "0":
    load_follower(folder, **options)()
else:
    engine = load_engine(folder, **options)
    engine.load_adapter("a", adapter)
    print(json.dumps([generate(*each) for each in ((10,), (60,), (10, "a"), (60, "a"), (10,), (10, "a"))]))
    engine.close()
"""


def test_blocks_of_four_ranks_come_back(tmp_path):
    folder = write_kind(tmp_path / "model", "GGUF Q8_0", "dense")
    names = [f"model.layers.{i}.self_attn.{name}" for i in range(2) for name in ("q_proj", "o_proj")]
    adapter = write_adapter(tmp_path / "adapter", dict.fromkeys(names, (256, 256)))
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(folder), "1", json.dumps(str(adapter))]
    printed = subprocess.run(command, env={**os.environ, "RANK": "0"}, stdout=subprocess.PIPE, check=True).stdout
    alone = [tokens for tokens, _ in json.loads(printed.splitlines()[-1])]
    assert alone[0] != alone[2]  # the adapter has an effect
    [found] = run_ranks(folder, 4, PROGRAM, str(adapter))
    assert isinstance(found, list)
    assert [tokens for tokens, _ in found] == alone
    assert [is_restored for _, is_restored in found] == [False] * 4 + [True] * 2  # others have evicted the first
