"""Two ranks, each a process with half of the network, give the tokens of one."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from flambeau.llm.errors import LLMError
from flambeau.llm.executor import rank_inputs
from flambeau.llm.executor.inputs import StepInputs
from flambeau.llm.executor.rank_inputs import PREFILL, receive_header, receive_inputs, send_inputs
from flambeau.llm.executor.shard import Shard, local_architecture
from flambeau.llm.loader import load_engine
from flambeau.llm.models.step_media import StepMedia
from flambeau.llm.sampling_params import SamplingParams
from support.ranks import run_ranks, start_ranks
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
    rules = {"allowed_token_ids": [*range(40, 50)], "no_repeat_ngram_size": 2, "typical_p": 0.8, "dry_multiplier": 0.5}
    found += engine.generate(prompts, SamplingParams(seed=3, max_tokens=24, dry_sequence_breakers=(), **rules))
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


def test_two_ranks_give_the_tokens_of_one(checkpoint):
    engine = load_engine(checkpoint, num_blocks=60, block_size=4, compile=False, device="cpu")
    alone = engine.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=24))
    rules = {"allowed_token_ids": [*range(40, 50)], "no_repeat_ngram_size": 2, "typical_p": 0.8, "dry_multiplier": 0.5}
    alone += engine.generate(PROMPTS, SamplingParams(seed=3, max_tokens=24, dry_sequence_breakers=(), **rules))
    assert {token for completion in alone[3:] for token in completion.token_ids} <= {*range(40, 50)}
    assert run_ranks(checkpoint, 2, RANK, PROMPTS) == [[completion.token_ids for completion in alone]]


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
    ranks = start_ranks(checkpoint, 2, head + FAILING, PROMPTS)
    try:
        output = ranks[0].wait(timeout_s=100)
    finally:
        for rank in ranks:
            rank.kill()
    assert output.split() == ["ZeroDivisionError", "LLMError", "closed"]


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


ROWS, FEATURES, SEEN = torch.tensor([1, 3]), torch.rand(2, 8).bfloat16(), torch.arange(6)
ROTARY, SLOTS = torch.arange(18).view(3, 6), torch.tensor([3, 1])


@pytest.mark.parametrize("has_adapters", [False, True])
@pytest.mark.parametrize(
    "media",
    [
        None,
        StepMedia(ROWS, FEATURES, SEEN),
        StepMedia(ROWS, FEATURES, None, ROTARY),
        StepMedia(ROWS, FEATURES),
        StepMedia(ROWS[:0], torch.zeros(0, 0), None, ROTARY),  # a text before an image
    ],
)
@pytest.mark.parametrize("states", [(None, None), (SLOTS, None), (SLOTS, torch.arange(6))])
def test_followers_get_all_inputs_of_a_pass(monkeypatch, states, media, has_adapters):
    sent: list[torch.Tensor] = []
    monkeypatch.setattr(rank_inputs.dist, "broadcast", lambda tensor, src, group: sent.append(tensor.clone()))
    inputs = StepInputs(
        *(torch.arange(6) + 10 * i for i in range(3)),
        torch.tensor([0, 2, 6]),
        torch.tensor([5, 7]),
        torch.tensor([[1, 2], [3, 4]]),
        adapters_T=torch.arange(6) if has_adapters else None,
        media=media,
        state_slots_S=states[0],
        state_ends_T=states[1],
    )
    send_inputs(PREFILL, inputs, torch.tensor([1, 5]), None)
    monkeypatch.setattr(rank_inputs.dist, "broadcast", lambda tensor, src, group: tensor.copy_(sent.pop(0)))
    found, rows_N = receive_inputs(receive_header(None), torch.device("cpu"), None)
    assert sent == []
    assert rows_N is not None
    assert rows_N.tolist() == [1, 5]
    for one, other in zip(found.tensors, inputs.tensors, strict=True):
        assert torch.equal(one, other)
    assert (found.adapters_T is None) == (not has_adapters)
    assert (found.media is None) == (media is None)
    if media is not None and found.media is not None:
        assert torch.equal(found.media.rows_M, media.rows_M)
        assert torch.equal(found.media.features_ME.bfloat16(), media.features_ME.bfloat16())
        for one, other in ((found.media.last_seen_T, media.last_seen_T), (found.media.rotary_3T, media.rotary_3T)):
            assert (one is None) == (other is None)
            assert other is None or torch.equal(one, other)


@pytest.mark.parametrize(
    ("changes", "size", "message"),
    [
        ({"is_differential": True, "value_size": 16}, 2, "heads that are subtracted .* divided .*; use one rank"),
        ({}, 3, "4 heads cannot be divided among 3 ranks; numbers of ranks that work: 2, 4"),
        ({"num_heads": 12, "num_kv_heads": 3}, 2, "3 key-value heads cannot be divided among 2 ranks; .*: 3, 6, 12"),
        ({"intermediate_size": 82}, 4, "an intermediate size of 82 cannot be divided among 4 ranks; .* work: 2$"),
        ({"num_heads": 1, "num_kv_heads": 1}, 2, "1 heads cannot be divided among 2 ranks; use one rank"),
        ({"num_experts": 4, "expert_size": 6}, 4, "experts with an intermediate size of 6 .* 4 ranks; .* work: 2$"),
    ],
)
def test_sizes_that_cannot_be_divided_are_named_with_numbers_that_can(changes, size, message):
    with pytest.raises(LLMError, match=message):
        local_architecture(replace(ARCH, **{"intermediate_size": 96, **changes}), size)


def test_only_sizes_that_are_used_must_be_divisible():
    sizes = {"num_experts": 4, "expert_size": 6, "intermediate_size": 81}
    assert local_architecture(replace(ARCH, **sizes), 2).expert_size == 3
    with pytest.raises(LLMError, match="an intermediate size of 81"):
        local_architecture(replace(ARCH, **sizes, dense_layers=frozenset({1})), 2)


@pytest.mark.parametrize(
    ("kind", "changes", "size", "message"),
    [
        ("mamba", {}, 3, "64 channels of recurrent layers cannot be divided among 3 ranks; .* work: 2, 4, 8, 16$"),
        ("mamba2", {}, 16, "8 heads of recurrent layers cannot be divided among 16 ranks"),
        ("mamba2", {"num_groups": 3, "num_heads": 12, "inner_size": 96}, 2, "3 groups of heads with the same B and C"),
        ("mamba2", {"norm_groups": 3}, 2, "3 groups of channels that are normalized together"),
        ("delta_net", {"num_groups": 1, "num_heads": 9}, 2, "9 heads of recurrent layers .*; numbers of ranks .*: 3$"),
        ("delta_net", {"num_groups": 3, "num_heads": 6}, 2, "3 key heads of recurrent layers cannot be divided among"),
    ],
)
def test_recurrent_layers_that_cannot_be_divided_are_named_with_numbers_that_can(kind, changes, size, message):
    arch = replace(tiny_hybrid(kind, **changes).arch, num_heads=48, num_kv_heads=48, intermediate_size=48 * 16)
    with pytest.raises(LLMError, match=message):
        local_architecture(arch, size)


def test_a_network_without_attention_is_divided_by_its_recurrent_layers_only():
    arch = tiny_hybrid("mamba2", layers=frozenset({0, 1, 2})).arch
    local = local_architecture(replace(arch, num_heads=1, num_kv_heads=1, has_mlp=False, intermediate_size=1), 4)
    assert local.recurrence is not None
    assert (local.recurrence.num_heads, local.recurrence.num_groups, local.recurrence.inner_size) == (2, 1, 16)
    assert (local.num_heads, local.intermediate_size) == (1, 1)
