"""The kernels give what their plain twins give."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch

from flambeau.llm.backends.cpu import network
from flambeau.llm.backends.eager import EagerBackend
from flambeau.llm.core.outputs import NO_TOKEN
from flambeau.llm.sampling.logits_processors import argmax_tokens
from support.kernel_families import LATENT, copy_of, logits_of_both
from support.llm_steps import prompts, random_model, room, step_inputs

needs_kernels = pytest.mark.usefixtures("loaded")
pytestmark = pytest.mark.timeout(300)  # the kernels may have to be built, on a busy machine


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
    native_network, eager = network.CpuNetwork(model, cache), EagerBackend(model, twin)
    rows_N = first.query_starts[1:] - 1
    close = {"atol": 2e-5, "rtol": 1e-5}
    torch.testing.assert_close(native_network.run(first, rows_N), eager.prefill(first, rows_N), **close)
    drafted = step_inputs({i: (len(ids), [7 + i, 11, 13]) for i, ids in enumerate(asked)}, query_len=3)
    torch.testing.assert_close(native_network.run(drafted), eager.decode(drafted), **close)


@needs_kernels
def test_a_whole_step_gives_a_sequence_the_same_bits_alone_and_among_others():
    model, asked = plain_network(), prompts(9)
    inputs = step_inputs({i: (0, ids) for i, ids in enumerate(asked)})
    together = network.CpuNetwork(model, room(model, 9)).run(inputs, inputs.query_starts[1:] - 1)
    for i, ids in enumerate(asked):
        alone = step_inputs({0: (0, ids)})
        logits = network.CpuNetwork(model, room(model, 9)).run(alone, alone.query_starts[1:] - 1)
        assert torch.equal(logits[0], together[i])


@needs_kernels
@pytest.mark.parametrize("num_rows", range(1, 10))
def test_any_number_of_rows_gives_each_the_bits_it_gets_alone(num_rows):
    model = plain_network()
    cache = room(model, 9, rubbish=1.0)
    rows = {i: (5 + i, [7 + i]) for i in range(num_rows)}
    together = network.CpuNetwork(model, copy_of(model, cache)).run(step_inputs(rows, query_len=1))
    for i, row in rows.items():
        alone = network.CpuNetwork(model, copy_of(model, cache)).run(step_inputs({i: row}, query_len=1))
        assert torch.equal(alone[0], together[i])


@needs_kernels
def test_the_likeliest_tokens_are_those_with_the_largest_logits():
    model, asked = plain_network(tied_embeddings=False), prompts(6)
    model.lm_head.weight[50:] = model.lm_head.weight[: 97 - 50]  # of equal ones, the first
    inputs = step_inputs({i: (0, ids) for i, ids in enumerate(asked)})
    expected = network.CpuNetwork(model, room(model, 6)).run(inputs).argmax(-1)
    found = network.CpuNetwork(model, room(model, 6)).argmax(inputs)
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
    first = network.CpuNetwork(model, room(model, 2))
    assert first.argmax(inputs).tolist() == argmax_tokens(first.run(inputs)).tolist()
    later = torch.zeros(1, 2, dtype=torch.long)
    assert NO_TOKEN in first.argmax(inputs)
    assert first.argmax_steps(inputs, later, later).min() >= 0


@needs_kernels
def test_several_steps_in_one_call_are_those_steps():
    model, asked = plain_network(), prompts(4)
    one_call, step_by_step = (network.CpuNetwork(model, room(model, 4)) for _ in range(2))
    for each in (one_call, step_by_step):
        each.run(step_inputs({i: (0, ids) for i, ids in enumerate(asked)}))
    first = step_inputs({i: (len(ids), [1 + i, 20 + i]) for i, ids in enumerate(asked)}, query_len=2)
    expected = [step_by_step.argmax(first)[1::2]]
    later = []
    for ahead in range(3):
        rows = {i: (len(ids) + 2 + ahead, [int(expected[-1][i])]) for i, ids in enumerate(asked)}
        later.append(step_inputs(rows, query_len=1))
        later[-1].positions_T[3] = later[-1].slots_T[3] = 0  # padding: nobody asked for these
        expected.append(step_by_step.argmax(later[-1]))
    places = torch.stack([step.positions_T for step in later]), torch.stack([step.slots_T for step in later])
    found = one_call.argmax_steps(replace(first, block_tables_SB=later[-1].block_tables_SB), *places)
    assert torch.equal(found, torch.stack(expected))
    assert len(set(found[:, :3].flatten().tolist())) > 3


@needs_kernels
def test_steps_in_several_threads_at_once_do_not_disturb_each_other():
    model, inputs, wrong = plain_network(), step_inputs({0: (0, prompts(5)[4])}), []
    expected = network.CpuNetwork(model, room(model, 1)).run(inputs)

    def repeat() -> None:
        mine = network.CpuNetwork(model, room(model, 1))
        wrong.extend(1 for _ in range(100) if not torch.equal(mine.run(inputs), expected))

    threads = [threading.Thread(target=repeat) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize(
    "changes",
    [
        {"rotated_qk_norm": True, "qk_norm": True},
        {"num_experts": 4, "expert_size": 8},  # half a panel
        {**LATENT, "head_size": 28, "latent_size": 20},
    ],
)
def test_networks_with_more_to_them_are_not_computed_in_one_call(changes):
    model = random_model(**{"head_size": 16, **changes})
    assert not network.can_compute(model, room(model, 1))
    plain = random_model(head_size=16)
    assert network.can_compute(plain, room(plain, 1))
    assert not network.unknown_heads(plain.arch)
    assert bool(network.unknown_heads(model.arch)) == (model.arch.head_size == 28)
    plain.model.layers[1].mlp.down_proj = torch.nn.Identity()
    assert not network.can_compute(plain, room(plain, 1))


@pytest.mark.parametrize("part", [{"has_sinks": True}, {"attention_gate": "sigmoid"}, {"shared_keys": (0, 0)}])
def test_parts_of_heads_are_not_computed_over_latents(part):
    arch = random_model(**LATENT).arch
    assert network.unknown_parts(arch) == []
    assert network.unknown_parts(replace(arch, **part)) == [*part]


ODD_SHAPES = {
    "15 heads for 5": {
        "hidden_size": 240,
        "num_heads": 15,
        "num_kv_heads": 5,
        "head_size": 16,
        "intermediate_size": 100,
    },
    "heads of 96": {"hidden_size": 97, "num_heads": 3, "num_kv_heads": 1, "head_size": 96, "intermediate_size": 131},
    "biases and 1,003 tokens": {"vocab_size": 1003, "head_size": 64, "qkv_bias": True, "mlp_bias": True},
}


@needs_kernels
@pytest.mark.parametrize("shape", ODD_SHAPES)
def test_sizes_that_no_panel_divides_give_the_twins_logits_and_tokens(shape):
    model = random_model(**ODD_SHAPES[shape])
    found, expected = logits_of_both(model)
    torch.testing.assert_close(found / expected.std(), expected / expected.std(), atol=5e-5, rtol=2e-5)
    assert torch.equal(found.argmax(dim=1), expected.argmax(dim=1))
