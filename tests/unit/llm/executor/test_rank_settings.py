"""What works with one rank works with two: types of the cache, drafts, n-grams, grammars, the CPU kernels of layers."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flambeau.llm import loader, network_loader
from flambeau.llm.checkpoints.checkpoint import load_model
from flambeau.llm.config import EngineConfig
from flambeau.llm.errors import LLMError
from flambeau.llm.executor import tensor_parallel
from flambeau.llm.executor.tensor_parallel import RankSum, TensorParallelGroup
from flambeau.llm.loader import load_engine
from flambeau.llm.sampling_params import SamplingParams
from support.cpu_kernels import need_cpu_kernels
from support.packed_files import write_kind
from support.ranks import run_as_threads, run_ranks
from support.sharded import OPTIONS, generate_on_ranks
from support.weights import logits_of

PROMPTS = [[*range(40, 56)], [9] * 20, [77], [*range(40, 54), 3, 4]]


SETTINGS: list[dict[str, Any]] = [  # of a request each, in one batch
    {"structured_outputs": {"json": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}}},
    {"structured_outputs": {"regex": "[a-c]{3}-[0-9]{2,4}"}, "temperature": 0.9, "seed": 7},
    {"structured_outputs": {"choice": ["yes please", "no thanks"]}},
    {"logit_bias": {33: 5.0, 40: -100.0}, "repetition_penalty": 1.3, "presence_penalty": 0.5, "min_tokens": 9},
    {"temperature": 0.8, "seed": 11, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "frequency_penalty": 0.3},
]
CHOOSE = """
import json, os, sys
import torch
from pathlib import Path
from flambeau.llm.loader import load_engine, load_follower
from flambeau.llm.sampling_params import SamplingParams

torch.set_num_threads(1)
folder, size, (settings, options) = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
options["tensor_parallel_size"] = size
if os.environ["RANK"] != "0":
    load_follower(folder, **options)()
else:
    engine = load_engine(folder, **options)
    for number, given in enumerate(settings):
        bias = {int(token): value for token, value in given.pop("logit_bias", {}).items()}
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": 24, "logit_bias": bias, **given})
        engine.add(str(number), [*range(40 + number, 56)], params)
    found = {str(number): [[], ""] for number in range(len(settings))}
    while engine.has_work:
        for output in engine.step():
            found[output.request_id][0] += output.token_ids
            found[output.request_id][1] += output.text
    print(json.dumps([*found.values()]))
    engine.close()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_kind(tmp_path_factory.mktemp("ranks") / "model", "float32", "dense")


def expected_of(folder: Path, **options: Any) -> list[list[int]]:
    engine = load_engine(folder, **{**OPTIONS, **options})
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    return [completion.token_ids for completion in engine.generate(PROMPTS, params)]


@pytest.mark.parametrize("kind", ["int8", "bfloat16"])
def test_the_cache_of_two_ranks_has_any_type(kind, folder):
    found = generate_on_ranks(folder, PROMPTS, kv_cache_dtype=kind)
    assert found.tokens == expected_of(folder, kv_cache_dtype=kind)


@pytest.mark.parametrize("network", ["experts", "latent"])
def test_int8_caches_of_other_networks(network, tmp_path):
    folder = write_kind(tmp_path / "model", "float32", network)
    assert generate_on_ranks(folder, PROMPTS, kv_cache_dtype="int8").tokens == expected_of(
        folder, kv_cache_dtype="int8"
    )


def test_a_draft_model_proposes_beside_two_ranks(folder):
    found = generate_on_ranks(folder, PROMPTS, draft=str(folder))  # the best of all drafts
    assert found.tokens == expected_of(folder)
    assert found.num_drafted > 0


def test_n_grams_propose_beside_two_ranks(folder):
    found = generate_on_ranks(folder, PROMPTS, max_tokens=60, speculation="lookup", speculate_k=4)
    assert [tokens[:30] for tokens in found.tokens] == expected_of(folder)
    assert found.num_drafted > 0


def test_grammars_and_logit_processors_choose_from_what_ranks_compute(folder):
    given = [SETTINGS, {**OPTIONS, "speculation": "lookup", "speculate_k": 4}]
    command = [sys.executable, "-W", "ignore", "-c", CHOOSE, str(folder), "1", json.dumps(given)]
    alone = subprocess.run(command, env={**os.environ, "RANK": "0"}, stdout=subprocess.PIPE, check=True).stdout
    [found] = run_ranks(folder, 2, CHOOSE, given)
    assert found == json.loads(alone.splitlines()[-1])
    assert isinstance(found, list)
    assert re.fullmatch("[a-c]{3}-[0-9]{2,4}", found[1][1])
    assert found[2][1] in ("yes please", "no thanks")


@pytest.mark.parametrize("network", ["dense", "tied", "experts", "latent"])
def test_the_cpu_kernels_compute_the_layers_of_two_ranks(network, tmp_path):
    need_cpu_kernels()
    folder = write_kind(tmp_path / "model", "bfloat16", network)
    assert generate_on_ranks(folder, PROMPTS, compile=True).tokens == expected_of(folder)


def test_tied_embeddings_of_a_rank_stay_in_16_bits(tmp_path, monkeypatch):
    need_cpu_kernels()
    folder = write_kind(tmp_path / "model", "bfloat16", "tied")
    expected = logits_of(load_model(folder, dtype=torch.float32))
    monkeypatch.setattr(network_loader, "minimum_of_ranks", lambda number, ranks: number)
    config = EngineConfig(device="cpu", num_blocks=8, block_size=4, max_num_seqs=2)
    parts: list[Any] = [
        network_loader.load_network(
            folder, config, torch.device("cpu"), TensorParallelGroup(rank, 2, None)
        ).backend.model  # type: ignore[arg-type]
        for rank in range(2)
    ]
    for found in run_as_threads(monkeypatch, lambda rank: logits_of(parts[rank])):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    for part in parts:
        assert part.model.embed_tokens.weight.dtype == torch.bfloat16
        assert part.lm_head.kind == "bfloat16"
        assert not any(one.dtype == torch.float32 and one.dim() > 1 for one in part.parameters())


@pytest.mark.parametrize("others", ["fails", "has less", "has nothing to add"])
def test_a_sum_that_a_rank_takes_no_part_in_raises_on_all_of_them(others, monkeypatch):
    meeting, numbers = threading.Barrier(2, timeout=60), {}

    def minimum_of_ranks(number: int, ranks: TensorParallelGroup) -> int:
        numbers[ranks.rank] = number
        meeting.wait()
        found = min(numbers.values())
        meeting.wait()
        return found

    monkeypatch.setattr(tensor_parallel, "minimum_of_ranks", minimum_of_ranks)
    monkeypatch.setattr(
        tensor_parallel, "sum_over_ranks", lambda numbers, ranks: pytest.fail("nobody waits for the others")
    )

    def take_part(rank: int) -> str:
        total = RankSum(TensorParallelGroup(rank, 2, None))  # type: ignore[arg-type]
        try:
            if rank == 0 or others == "has less":
                total(torch.ones(3 - rank))
            else:
                total.skip(has_failed=others == "fails")
        except LLMError as error:
            total.skip(has_failed=True)  # as `load_on_all` does; it is over
            return str(error)
        return ""

    for found in run_as_threads(monkeypatch, take_part):
        assert "could not be read on all ranks" in found


def test_rank_0_alone_says_what_the_files_have(monkeypatch, caplog):
    def load_network(*_: object) -> SimpleNamespace:
        logging.getLogger("flambeau.llm.checkpoints.checkpoint").warning("of the files")
        logging.getLogger("flambeau.llm.checkpoints.checkpoint").error("an error")
        logging.getLogger("flambeau.llm.loader").warning("of the rank")
        return SimpleNamespace(backend=None, adapters=(), state_cache=None, store=None)

    monkeypatch.setattr(loader, "load_network", load_network)
    monkeypatch.setattr(TensorParallelGroup, "join", lambda _: None)
    with caplog.at_level(logging.INFO):
        loader.load_follower(Path("a"), device="cpu")
    assert caplog.messages == ["an error", "of the rank"]
    assert logging.getLogger("flambeau.llm.checkpoints").level == logging.NOTSET
