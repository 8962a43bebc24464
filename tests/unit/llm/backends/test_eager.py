"""EagerBackend: steps over the cache give what the whole sequence gives without one."""

from __future__ import annotations

import torch

from flambeau.llm.backends.eager import EagerBackend, WholeAttention
from support.llm_steps import greedy, prompts, random_model, room, step_inputs


def whole_logits(model, ids):
    """The logits of a sequence computed without a cache."""
    ids_T = torch.tensor(ids)
    return model.logits(model(ids_T, torch.arange(len(ids)), WholeAttention()))


def test_prefill_in_chunks_then_decode_gives_the_logits_of_the_whole_sequence():
    model, ids = random_model(), prompts(5)[4]
    forward = EagerBackend(model, room(model, 1))
    first = step_inputs({0: (0, ids[:6])})
    found = [forward.prefill(first, torch.arange(6))]
    found.append(forward.prefill(step_inputs({0: (6, ids[6:9])}), torch.arange(3)))
    found += [forward.decode(step_inputs({0: (n, [ids[n]])}, query_len=1)) for n in range(9, len(ids))]
    torch.testing.assert_close(torch.cat(found), whole_logits(model, ids), atol=1e-5, rtol=1e-5)


def test_prefill_gives_only_the_rows_asked_for():
    model = random_model()
    asked = prompts(3)
    inputs = step_inputs({i: (0, ids) for i, ids in enumerate(asked)})
    rows = EagerBackend(model, room(model, 3)).prefill(inputs, inputs.query_starts[1:] - 1)
    expected = torch.stack([whole_logits(model, ids)[-1] for ids in asked])
    torch.testing.assert_close(rows, expected, atol=1e-5, rtol=1e-5)


def test_several_tokens_of_each_sequence_are_verified_in_one_step():
    model = random_model(windows=(None, 5))
    asked = prompts(2)
    forward = EagerBackend(model, room(model, 2))
    forward.prefill(step_inputs({i: (0, ids) for i, ids in enumerate(asked)}), torch.tensor([0]))
    drafted = {i: (len(ids), [7 + i, 11, 13]) for i, ids in enumerate(asked)}
    logits_SQV = forward.decode(step_inputs(drafted, query_len=3)).view(2, 3, -1)
    for i, ids in enumerate(asked):
        expected = whole_logits(model, [*ids, 7 + i, 11, 13])[-3:]
        torch.testing.assert_close(logits_SQV[i], expected, atol=1e-5, rtol=1e-5)


def test_a_sequence_says_the_same_alone_and_among_others():
    model, asked = random_model(), prompts(6)
    together = greedy(EagerBackend(model, room(model, 6)), asked, 8)
    alone = [greedy(EagerBackend(model, room(model, 1)), [ids], 8)[0] for ids in asked]
    assert together == alone
