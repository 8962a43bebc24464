"""Parts of a network for some ranks, and processes that generate tokens with them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flambeau.llm.checkpoints.checkpoint import load_model, read_architecture
from flambeau.llm.checkpoints.layer_formats import NO_FORMS, KeptForms
from flambeau.llm.checkpoints.parameter_filler import Arrived
from flambeau.llm.executor.shard import Shard, add_all_reduce, local_architecture
from flambeau.llm.models.transformer import Transformer
from flambeau.llm.quantize.quantizer import build
from support.ranks import run_ranks

GENERATE = """
import json, os, sys
import torch
from pathlib import Path
from flambeau.llm.sampling_params import SamplingParams
from flambeau.llm.loader import load_engine, load_follower
from flambeau.llm.speculation.adaptive_k import AdaptiveK

torch.set_num_threads(1)
AdaptiveK.num_ahead = lambda self, _: max(self._numbers)  # whether it pays is another matter
folder, size, (prompts, max_tokens, options) = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
options["tensor_parallel_size"] = size
if os.environ["RANK"] != "0":
    load_follower(folder, **options)()
else:
    engine = load_engine(folder, **options)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        engine.add(str(number), prompt, params)
    tokens, drafted = {str(number): [] for number in range(len(prompts))}, 0
    while engine.has_work:
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
            drafted += output.counts.num_drafted if output.counts else 0
    print(json.dumps([[*tokens.values()], drafted, engine.state.num_blocks_restored]))
    engine.close()
"""
OPTIONS: dict[str, Any] = {"num_blocks": 80, "block_size": 4, "compile": False, "device": "cpu"}


def load_part(
    folder: Path, rank: int, size: int = 2, *, arrived: Arrived | None = None, forms: KeptForms = NO_FORMS
) -> Transformer:
    """One rank's part of a network, in float32."""
    arch = read_architecture(folder, forms)
    shard = Shard(arch, rank, size)
    part = load_model(
        folder,
        dtype=torch.float32,
        build=lambda _: build(local_architecture(arch, size), whole=arch),
        shard=shard,
        arrived=arrived,
        forms=forms,
    )
    add_all_reduce(part, shard)
    return part


@dataclass(frozen=True, slots=True)
class Generated:
    """What two processes have generated."""

    tokens: list[list[int]]
    num_drafted: int
    num_restored: int  # blocks of the KV cache


def generate_on_ranks(
    folder: Path, prompts: list[list[int]], max_tokens: int = 30, size: int = 2, **options: Any
) -> Generated:
    [found] = run_ranks(folder, size, GENERATE, [prompts, max_tokens, {**OPTIONS, **options}])
    assert isinstance(found, list)
    return Generated(*found)
