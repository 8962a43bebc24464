"""Two ranks, each a process with half of the network, give the tokens of one."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from flambeau.llm.errors import LLMError
from flambeau.llm.executor import parallel
from flambeau.llm.executor.inputs import StepImages, StepInputs
from flambeau.llm.executor.parallel import (
    PREFILL,
    Shard,
    TensorParallelGroup,
    local_architecture,
    receive_header,
    receive_inputs,
    send_inputs,
)
from flambeau.llm.loader import load_engine
from flambeau.llm.sampling_params import SamplingParams
from support.tiny_models import ARCH, tiny_hybrid, tiny_model
from support.tokenizer_files import write_sentencepiece

PROMPTS = [[1, 2, 3, 4, 5], [9] * 20, [40, 41]]
RANK = """
import json, os, sys
import torch
from pathlib import Path
from flambeau.llm.sampling_params import SamplingParams
from flambeau.llm.loader import load_engine, load_follower

torch.set_num_threads(1)
folder, size, prompts = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
options = {"tensor_parallel_size": size, "num_blocks": 60, "block_size": 4, "compile": False, "device": "cpu"}
if os.environ.get("RANK", "0") != "0":
    load_follower(folder, **options)()
else:
    engine = load_engine(folder, **options)
    found = engine.generate(prompts, SamplingParams(temperature=0.0, max_tokens=24))
    print(json.dumps([completion.token_ids for completion in found]))
    engine.close()
"""

FAILING = """
    engine._backend._inner.decode = lambda inputs: 1 / 0  # before the first sum
    for _ in range(2):
        try:
            engine.generate(prompts[:1], SamplingParams(temperature=0.0, max_tokens=24))
        except Exception as error:
            print(type(error).__name__, flush=True)
    engine.close()
    print("closed", flush=True)
    os._exit(0)  # the server ends the others
"""


STORE = """
import json, os, sys, time
import torch
from pathlib import Path
from flambeau.llm.sampling_params import SamplingParams
from flambeau.llm.loader import load_engine, load_follower

torch.set_num_threads(1)
folder, size, (stored, deletes) = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
options = {"tensor_parallel_size": size, "num_blocks": 20, "block_size": 4, "compile": False, "device": "cpu"}
options |= {"kv_host_memory_mb": 1, "kv_disk_folder": stored}
if os.environ["RANK"] != "0":
    load_follower(folder, **options)()
else:
    engine = load_engine(folder, **options)
    for first in (10, 60, 10):
        [found] = engine.generate([[*range(first, first + 48)]], SamplingParams(temperature=0.0, max_tokens=8))
        deadline = time.monotonic() + 20
        while not deletes and engine.state.num_blocks_saved < 12 and time.monotonic() < deadline:
            time.sleep(0.01)
        if deletes:
            for file in Path(stored).glob("rank-1-of-2/*/*.kv"):
                file.unlink()
        print(json.dumps([found.token_ids, engine.state.num_blocks_restored]), flush=True)
    engine.close()
"""


def hugging_face_tensors(model) -> dict[str, torch.Tensor]:
    """The weights under the names of a checkpoint, which knows no fused matrices."""
    arch, tensors = model.arch, {}
    for name, tensor in model.state_dict().items():
        if "qkv_proj" in name:
            sizes = [arch.num_heads * arch.head_size, *[arch.num_kv_heads * arch.head_size] * 2]
            for part, piece in zip("qkv", tensor.split(sizes), strict=True):
                tensors[name.replace("qkv", part)] = piece.clone()
        elif "gate_up_proj" in name:
            for part, piece in zip(("gate", "up"), tensor.chunk(2), strict=True):
                tensors[name.replace("gate_up", part)] = piece.clone()
        else:
            tensors[name] = tensor.clone()
    return tensors


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A folder as Hugging Face writes it; its tokenizer is another model's, and not used."""
    folder = tmp_path_factory.mktemp("tiny")
    arch = replace(ARCH, qkv_bias=True, num_kv_heads=2, vocab_size=400)  # as the tokenizer
    model = tiny_model(arch)
    save_file(hugging_face_tensors(model), folder / "model.safetensors")
    config = {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "vocab_size": arch.vocab_size,
        "hidden_size": arch.hidden_size,
        "num_hidden_layers": arch.num_layers,
        "num_attention_heads": arch.num_heads,
        "num_key_value_heads": arch.num_kv_heads,
        "intermediate_size": arch.intermediate_size,
        "max_position_embeddings": arch.max_length,
        "rms_norm_eps": arch.norm_epsilon,
        "rope_theta": arch.rope_theta,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return write_sentencepiece(folder)


def start_ranks(folder, size: int, script: str = RANK, given: object = PROMPTS) -> list[subprocess.Popen[bytes]]:
    """The processes."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-W", "ignore", "-c", script, str(folder), str(size), json.dumps(given)]
    meeting = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(command, env={**os.environ, **meeting, "RANK": str(rank)}, stdout=subprocess.PIPE)
        for rank in range(size)
    ]


def run_ranks(folder, size: int, script: str = RANK, given: object = PROMPTS) -> list[object]:
    """The lines that rank 0 prints; every rank must end well."""
    ranks = start_ranks(folder, size, script, given)
    try:
        outputs = [rank.communicate(timeout=100)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * size
    return [json.loads(line) for line in outputs[0].splitlines()]


def test_two_ranks_give_the_tokens_of_one(checkpoint):
    engine = load_engine(checkpoint, num_blocks=60, block_size=4, compile=False, device="cpu")
    alone = engine.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=24))
    assert run_ranks(checkpoint, 2) == [[completion.token_ids for completion in alone]]


def test_ranks_keep_their_parts_of_prefixes_and_restore_what_all_have(checkpoint, tmp_path):
    engine = load_engine(checkpoint, num_blocks=60, block_size=4, compile=False, device="cpu")
    prompts = [[*range(first, first + 48)] for first in (10, 60, 10)]
    alone = [
        engine.generate([prompt], SamplingParams(temperature=0.0, max_tokens=8))[0].token_ids for prompt in prompts
    ]
    lines = run_ranks(checkpoint, 2, STORE, [str(tmp_path), False])
    assert [tokens for tokens, _ in lines] == alone
    assert [number > 0 for _, number in lines] == [False, False, True]  # the second prompt has evicted the first
    assert {path.parts[-3] for path in tmp_path.rglob("*.kv")} == {"rank-0-of-2", "rank-1-of-2"}
    # Other processes find them on disk. Then rank 1 loses its files: the second prompt is computed.
    lines = run_ranks(checkpoint, 2, STORE, [str(tmp_path), True])
    assert [tokens for tokens, _ in lines] == alone
    assert lines[0][1] == 11
    assert lines[1][1] == lines[0][1]


def test_after_a_pass_that_failed_on_rank_0_alone_nothing_is_computed_and_nobody_waits(checkpoint):
    """The others are in the middle of that pass: whatever rank 0 told them next would never be heard."""
    head, _, _ = RANK.partition("    found =")
    ranks = start_ranks(checkpoint, 2, head + FAILING)
    try:
        output = ranks[0].communicate(timeout=100)[0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert output.decode().split() == ["ZeroDivisionError", "LLMError", "closed"]


def test_more_ranks_than_key_value_heads_share_them():
    weight = torch.arange(2 * 3 * 5).view(6, 5)
    parts = [
        Shard(replace(ARCH, num_kv_heads=2), rank, 4)("model.layers.0.self_attn.k_proj.weight", weight)
        for rank in range(4)
    ]
    assert [int(part[0, 0]) for part in parts] == [0, 0, 15, 15]


def test_a_bias_of_a_sum_is_added_once():
    bias = torch.ones(4)
    name = "model.layers.0.self_attn.o_proj.bias"
    assert sum(Shard(ARCH, rank, 2)(name, bias).sum() for rank in range(2)) == 4


@pytest.mark.parametrize(("size", "what"), [(3, "heads"), (8, "heads")])
def test_heads_that_cannot_be_shared_out_are_refused(size, what):
    with pytest.raises(LLMError, match=what):
        local_architecture(ARCH, size)


def test_recurrent_layers_are_refused_as_such_whatever_the_sizes():
    with pytest.raises(LLMError, match="recurrent layers cannot be split among ranks"):
        local_architecture(replace(tiny_hybrid("mamba").arch, num_heads=1, intermediate_size=1), 2)


@pytest.mark.parametrize("has_adapters", [False, True])
@pytest.mark.parametrize("has_images", [False, True])
def test_followers_get_all_inputs_of_a_pass(monkeypatch, has_images, has_adapters):
    sent: list[torch.Tensor] = []
    monkeypatch.setattr(parallel.dist, "broadcast", lambda tensor, src, group: sent.append(tensor.clone()))
    inputs = StepInputs(
        *(torch.arange(6) + 10 * i for i in range(3)),
        torch.tensor([0, 2, 6]),
        torch.tensor([5, 7]),
        torch.tensor([[1, 2], [3, 4]]),
        adapters_T=torch.arange(6) if has_adapters else None,
        images=StepImages(torch.tensor([1, 3]), torch.rand(2, 8).bfloat16(), torch.arange(6)) if has_images else None,
    )
    ranks = TensorParallelGroup(0, 2, None)  # type: ignore[arg-type]
    send_inputs(ranks, PREFILL, inputs, torch.tensor([1, 5]))
    monkeypatch.setattr(parallel.dist, "broadcast", lambda tensor, src, group: tensor.copy_(sent.pop(0)))
    found, rows_N = receive_inputs(ranks, receive_header(ranks), torch.device("cpu"))
    assert sent == []
    assert rows_N is not None
    assert rows_N.tolist() == [1, 5]
    for one, other in zip(found.tensors, inputs.tensors, strict=True):
        assert torch.equal(one, other)
    assert (found.adapters_T is None) == (not has_adapters)
    assert (found.images is None) == (not has_images)
    if inputs.images is not None and found.images is not None:
        assert torch.equal(found.images.rows_M, inputs.images.rows_M)
        assert torch.equal(found.images.features_ME.bfloat16(), inputs.images.features_ME)
        assert torch.equal(found.images.last_seen_T, inputs.images.last_seen_T)
