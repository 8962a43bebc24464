"""The kernels give what their plain twins give."""

from __future__ import annotations

import subprocess
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flambeau.llm.compute.attention import PagedAttention
from flambeau.llm.compute.forward import EagerForward
from flambeau.llm.compute.kv_cache import KVCache
from flambeau.llm.kernels import binding, building, native, network
from flambeau.llm.sampling.sampler import NO_TOKEN, chosen
from support.llm_steps import greedy, prompts, random_model, room, step_inputs


@pytest.fixture(scope="module")
def loaded() -> None:
    """The kernels, built if need be."""
    if not binding.kernels.load():
        pytest.skip("the CPU kernels cannot be built here: there is no C++ compiler")


needs_kernels = pytest.mark.usefixtures("loaded")
pytestmark = pytest.mark.timeout(300)  # the kernels may have to be built, on a busy machine
CASES = {
    "decode": {0: (11, [1]), 1: (0, [2]), 2: (30, [3])},
    "verify": {0: (4, [1] * 4), 1: (17, [2] * 4)},
    "verify fewer than the others": {0: (4, [1] * 4), 1: (17, [2] * 4)},
    "chunks of prompts": {0: (0, [1] * 7), 1: (5, [2] * 22), 2: (8, [3])},
}


def attend(kind, model, cache, inputs, window):
    """The output of one layer for random queries, keys and values, which are always the same ones."""
    arch, generator = model.arch, torch.Generator().manual_seed(5)
    shape = (len(inputs.ids_T), arch.num_heads + 2 * arch.num_kv_heads, arch.head_size)
    qkv = torch.randn(shape, generator=generator).to(cache.keys[0].dtype)
    q, k, v = qkv.split([arch.num_heads, arch.num_kv_heads, arch.num_kv_heads], dim=1)
    return kind(cache, inputs)(1, q, k, v, scale=arch.head_size**-0.5, window=window)


def check_decode(model):
    """The kernel attends in a decode step as its twin does."""
    cache = room(model, 3, rubbish=1.0)
    inputs = step_inputs(CASES["decode"], query_len=1)
    expected = attend(PagedAttention, model, copy_of(model, cache), inputs, None)
    found = attend(native.NativeAttention, model, cache, inputs, None)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def copy_of(model, cache: KVCache, dtype=torch.float32) -> KVCache:
    """A cache with the same contents."""
    copy = KVCache(model.arch, cache.num_blocks, cache.block_size, dtype=dtype)
    for ours, theirs in zip((*copy.keys, *copy.values), (*cache.keys, *cache.values), strict=True):
        ours.copy_(theirs)
    return copy


@needs_kernels
@pytest.mark.parametrize("window", [None, 1, 6])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("case", CASES)
def test_the_cpu_kernel_attends_and_keeps_as_its_twin_does(case, num_kv_heads, window):
    model = random_model(head_size=32, num_kv_heads=num_kv_heads)
    cache = room(model, 3, rubbish=1.0)
    twin = copy_of(model, cache)
    inputs = step_inputs(CASES[case], query_len=4 if "verify" in case else 0)
    if "fewer" in case:  # the rest is padding: at the first place, and kept where nobody looks
        inputs.positions_T[6:] = inputs.slots_T[6:] = 0
    found = attend(native.NativeAttention, model, cache, inputs, window)
    expected = attend(PagedAttention, model, twin, inputs, window)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(cache.keys[1], twin.keys[1])
    assert torch.equal(cache.values[1], twin.values[1])


@needs_kernels
@pytest.mark.parametrize("head_size", sorted(native.HEAD_SIZES))
def test_the_cpu_kernel_serves_every_head_size_that_it_lists(head_size):
    check_decode(random_model(head_size=head_size))


@needs_kernels
def test_a_bfloat16_cache_is_summed_in_float32():
    model = random_model(head_size=32)
    cache = room(model, 3, rubbish=1.0, dtype=torch.bfloat16)
    inputs = step_inputs(CASES["chunks of prompts"])
    wide = copy_of(model, cache)  # the same numbers, so that the twin differs by nothing but its last rounding
    found = attend(native.NativeAttention, model, cache, inputs, 6)
    rounded = copy_of(model, wide)
    arch, generator = model.arch, torch.Generator().manual_seed(5)
    qkv = torch.randn((30, arch.num_heads + 2 * arch.num_kv_heads, 32), generator=generator).bfloat16().float()
    q, k, v = qkv.split([arch.num_heads, arch.num_kv_heads, arch.num_kv_heads], dim=1)
    expected = PagedAttention(rounded, inputs)(1, q, k, v, scale=32**-0.5, window=6)
    torch.testing.assert_close(found, expected.bfloat16(), atol=1e-6, rtol=2**-7)


@needs_kernels
def test_a_sequence_gets_the_same_bits_alone_and_among_others():
    model = random_model(head_size=32)
    cache = room(model, 3, rubbish=1.0)
    inputs = step_inputs(CASES["verify"], query_len=4)
    together = attend(native.NativeAttention, model, copy_of(model, cache), inputs, None)
    first = step_inputs({0: CASES["verify"][0]}, query_len=4)
    assert torch.equal(attend_first(model, copy_of(model, cache), first, 8), together[:4])


def attend_first(model, cache, inputs, num_drawn):
    """As `attend`, for the first tokens of so many that are drawn."""
    arch, generator = model.arch, torch.Generator().manual_seed(5)
    qkv = torch.randn((num_drawn, arch.num_heads + 2 * arch.num_kv_heads, arch.head_size), generator=generator)
    parts = qkv[: len(inputs.ids_T)].split([arch.num_heads, arch.num_kv_heads, arch.num_kv_heads], dim=1)
    return native.NativeAttention(cache, inputs)(1, *parts, scale=arch.head_size**-0.5, window=None)


def plain_network(**changes):
    """A network that the kernels compute as a whole, with weights that bfloat16 holds exactly."""
    model = random_model(head_size=16, **changes)
    for weight in model.parameters():
        weight.copy_(weight.bfloat16())
    return model


@needs_kernels
@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize("is_tied", [True, False])
def test_a_whole_step_in_one_call_gives_the_twins_logits(is_exact, is_tied):
    model = plain_network(tied_embeddings=is_tied, windows=(None, 5), hidden_size=40)
    if not is_exact:
        model.model.layers[0].mlp.down_proj.weight.add_(1e-4)
    asked = prompts(5)
    first, cache = step_inputs({i: (0, ids) for i, ids in enumerate(asked)}), room(model, 5)
    twin = copy_of(model, cache)
    native_network, eager = network.NativeNetwork(model, cache), EagerForward(model, twin)
    rows_N = first.query_starts[1:] - 1
    close = {"atol": 2e-5, "rtol": 1e-5}
    torch.testing.assert_close(native_network.run(first, rows_N), eager.prefill(first, rows_N), **close)
    drafted = step_inputs({i: (len(ids), [7 + i, 11, 13]) for i, ids in enumerate(asked)}, query_len=3)
    torch.testing.assert_close(native_network.run(drafted), eager.decode(drafted), **close)


@needs_kernels
def test_a_whole_step_gives_a_sequence_the_same_bits_alone_and_among_others():
    model, asked = plain_network(), prompts(9)
    inputs = step_inputs({i: (0, ids) for i, ids in enumerate(asked)})
    together = network.NativeNetwork(model, room(model, 9)).run(inputs, inputs.query_starts[1:] - 1)
    for i, ids in enumerate(asked):
        alone = step_inputs({0: (0, ids)})
        logits = network.NativeNetwork(model, room(model, 9)).run(alone, alone.query_starts[1:] - 1)
        assert torch.equal(logits[0], together[i])


@needs_kernels
@pytest.mark.parametrize("num_rows", range(1, 10))
def test_any_number_of_rows_gives_each_the_bits_it_gets_alone(num_rows):
    model = plain_network()
    cache = room(model, 9, rubbish=1.0)
    rows = {i: (5 + i, [7 + i]) for i in range(num_rows)}
    together = network.NativeNetwork(model, copy_of(model, cache)).run(step_inputs(rows, query_len=1))
    for i, row in rows.items():
        alone = network.NativeNetwork(model, copy_of(model, cache)).run(step_inputs({i: row}, query_len=1))
        assert torch.equal(alone[0], together[i])


@needs_kernels
@pytest.mark.parametrize("head_size", [16, 32, 64])
def test_groups_of_any_number_of_heads_are_served(head_size):
    check_decode(random_model(head_size=head_size, num_heads=7, num_kv_heads=1))


@needs_kernels
def test_the_likeliest_tokens_are_those_with_the_largest_logits():
    model, asked = plain_network(tied_embeddings=False), prompts(6)
    model.lm_head.weight[50:] = model.lm_head.weight[: 97 - 50]  # of equal ones, the first
    inputs = step_inputs({i: (0, ids) for i, ids in enumerate(asked)})
    expected = network.NativeNetwork(model, room(model, 6)).run(inputs).argmax(-1)
    found = network.NativeNetwork(model, room(model, 6)).choose(inputs)
    assert found.tolist() == expected.tolist()
    assert found.max() < 50
    assert len(set(found.tolist())) > 5


@needs_kernels
@pytest.mark.parametrize("token", [3, 96])  # within a vector, and in the rest
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_logits_that_are_no_numbers_leave_no_token(token, value):
    model = plain_network(tied_embeddings=False)
    model.lm_head.weight[token] = value
    inputs = step_inputs({0: (0, [5, 6, 7]), 1: (0, [8])})
    first = network.NativeNetwork(model, room(model, 2))
    assert first.choose(inputs).tolist() == chosen(first.run(inputs)).tolist()
    later = torch.zeros(1, 2, dtype=torch.long)
    assert NO_TOKEN in first.choose(inputs)
    assert first.go_ahead(inputs, later, later).min() >= 0


@needs_kernels
def test_several_steps_in_one_call_are_those_steps():
    model, asked = plain_network(), prompts(4)
    one_call, step_by_step = (network.NativeNetwork(model, room(model, 4)) for _ in range(2))
    for each in (one_call, step_by_step):
        each.run(step_inputs({i: (0, ids) for i, ids in enumerate(asked)}))
    first = step_inputs({i: (len(ids), [1 + i, 20 + i]) for i, ids in enumerate(asked)}, query_len=2)
    expected = [step_by_step.choose(first)[1::2]]
    later = []
    for ahead in range(3):
        rows = {i: (len(ids) + 2 + ahead, [int(expected[-1][i])]) for i, ids in enumerate(asked)}
        later.append(step_inputs(rows, query_len=1))
        later[-1].positions_T[3] = later[-1].slots_T[3] = 0  # padding: nobody asked for these
        expected.append(step_by_step.choose(later[-1]))
    places = torch.stack([step.positions_T for step in later]), torch.stack([step.slots_T for step in later])
    found = one_call.go_ahead(replace(first, block_tables_SB=later[-1].block_tables_SB), *places)
    assert torch.equal(found, torch.stack(expected))
    assert len(set(found[:, :3].flatten().tolist())) > 3


@needs_kernels
def test_steps_in_several_threads_at_once_do_not_disturb_each_other():
    model, inputs, wrong = plain_network(), step_inputs({0: (0, prompts(5)[4])}), []
    expected = network.NativeNetwork(model, room(model, 1)).run(inputs)

    def repeat() -> None:
        mine = network.NativeNetwork(model, room(model, 1))
        wrong.extend(1 for _ in range(100) if not torch.equal(mine.run(inputs), expected))

    threads = [threading.Thread(target=repeat) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize(
    "changes", [{"qkv_bias": True}, {"qk_norm": True}, {"num_experts": 4, "expert_size": 8}, {"head_size": 8}]
)
def test_networks_with_more_to_them_are_not_computed_in_one_call(changes):
    model = random_model(**{"head_size": 16, **changes})
    assert not network.can_compute(model, room(model, 1))
    plain = random_model(head_size=16)
    assert network.can_compute(plain, room(plain, 1))
    plain.model.layers[1].mlp.down_proj = torch.nn.Identity()
    assert not network.can_compute(plain, room(plain, 1))


@needs_kernels
def test_a_model_says_the_same_with_the_kernels_as_without(monkeypatch):
    model, asked = random_model(head_size=16), prompts(4)
    with_kernels = greedy(EagerForward(model, room(model, 4)), asked, 8)
    monkeypatch.setattr(binding.kernels, "library", None)
    assert greedy(EagerForward(model, room(model, 4)), asked, 8) == with_kernels


@needs_kernels
def test_long_prompts_and_other_heads_go_through_the_twin():
    model = random_model(head_size=8)
    assert isinstance(native.choose_attention(room(model, 1), step_inputs(CASES["decode"], 1)), PagedAttention)
    model = random_model(head_size=32)
    inputs = step_inputs({0: (0, [1] * 20)})
    inputs = replace(inputs, ids_T=torch.ones(native.LONGEST_PROMPT + 1, dtype=torch.long))
    assert isinstance(native.choose_attention(room(model, 1), inputs), PagedAttention)


def test_without_a_compiler_one_line_names_the_remedy(tmp_path: Path, monkeypatch, caplog):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "")
    kernels = binding.Kernels()
    assert not kernels.load()
    assert not kernels.load()
    assert ["install g++" in record.getMessage() for record in caplog.records] == [True]


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing_behind(tmp_path: Path):
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\n[ $1 = --version ] && exit 0\necho 'x.h:1: error: no such thing' >&2; exit 1\n")
    compiler.chmod(0o755)
    with pytest.raises(subprocess.CalledProcessError) as failed:
        building.built_library(tmp_path / "kept", str(compiler))
    assert building.reason(failed.value) == "x.h:1: error: no such thing"
    assert not list((tmp_path / "kept").glob("*.so"))


def test_two_that_build_at_once_build_once(tmp_path: Path):
    compiler, log = tmp_path / "cc", tmp_path / "log"
    compiler.write_text(
        "#!/bin/sh\n[ $1 = --version ] && exit 0\n"
        f"echo built >> {log}\nwhile [ $1 != -o ]; do shift; done\necho library > $2\n"
    )
    compiler.chmod(0o755)
    found: list[Path] = []
    threads = [
        threading.Thread(target=lambda: found.append(building.built_library(tmp_path / "kept", str(compiler))))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert log.read_text() == "built\n"
    assert {path.read_text() for path in found} == {"library\n"}
    assert len(found) == 4
