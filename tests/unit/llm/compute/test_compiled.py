"""CompiledForward: the same tokens before, while and after something quicker is made."""

from __future__ import annotations

import threading

import pytest
import torch

from flambeau.llm.compute.compiled import CompiledForward
from flambeau.llm.compute.forward import EagerForward
from flambeau.llm.compute.graphed import GraphedForward
from flambeau.llm.compute.workshop import Workshop
from flambeau.llm.kernels import binding, inductor
from flambeau.llm.kernels.gpu import graphs
from support.llm_steps import greedy, prompts, random_model, room, step_inputs

pytestmark = pytest.mark.timeout(300)  # a compiler runs, perhaps on a busy machine


def expected_tokens(model, asked, num_tokens=8):
    """What the plain network says."""
    return greedy(EagerForward(model, room(model, len(asked))), asked, num_tokens)


def test_a_plain_network_says_the_same_once_the_kernels_are_there(caplog):
    caplog.set_level("INFO")
    if not binding.kernels.load():
        pytest.skip("the CPU kernels cannot be built here: there is no C++ compiler")
    model, asked = random_model(head_size=16), prompts(5)
    forward = CompiledForward(model, room(model, 5))
    assert forward.wait_until_compiled(timeout_s=250)
    assert forward._native is not None
    assert greedy(forward, asked, 8) == expected_tokens(model, asked)
    assert caplog.text.count("the model is decoded by CPU kernels from now on") == 1
    assert forward.quicker == "CPU kernels"
    forward.close()


def test_what_was_compiled_is_named_when_it_takes_over_and_not_again(caplog, monkeypatch):
    caplog.set_level("INFO")
    model = random_model(qkv_bias=True)
    plain = EagerForward(model, room(model, 3))
    monkeypatch.setattr(CompiledForward, "_make_inductor", lambda *_: plain.decode)
    forward = CompiledForward(model, room(model, 3), patience=2, name="the draft")
    inputs = [step_inputs({i: (0, [1]) for i in range(number)}, query_len=1) for number in (1, 2)]
    forward.decode(inputs[0])
    assert forward.quicker == ""
    for _ in range(5):
        for each in inputs:
            forward.decode(each)
        forward.wait_until_compiled(timeout_s=60)
    assert caplog.messages == ["the draft is decoded by Inductor from now on"]
    forward.close()


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the compiler's own
def test_a_network_with_biases_is_compiled_while_steps_go_on(monkeypatch):
    monkeypatch.setattr(inductor, "CPU_OPTIONS", {})  # half the time to compile
    model, asked = random_model(head_size=16, num_layers=1, qkv_bias=True), prompts(3)
    torch.nn.init.normal_(model.model.layers[0].self_attn.qkv_proj.bias)
    expected = expected_tokens(model, asked)
    forward = CompiledForward(model, room(model, 3), patience=0)
    rounds = 0
    while True:  # every round asks for the same tokens, most of them while the compiler runs
        assert greedy(forward, asked, 8) == expected
        rounds += 1
        if forward.wait_until_compiled(timeout_s=0.5):
            break
    assert rounds > 1
    assert forward._find(step_inputs({0: (3, [1]), 1: (5, [2])}, query_len=1)) is not None
    assert greedy(forward, asked, 8) == expected
    assert greedy(forward, asked[:2], 8) == expected[:2]
    forward.close()


def test_a_compiler_that_fails_is_named_once_and_steps_go_on(monkeypatch, caplog):
    def fail(*arguments: object) -> None:
        raise RuntimeError("no such backend\nand a long story")

    monkeypatch.setattr(inductor, "compile_step", fail)
    model, asked = random_model(qkv_bias=True), prompts(3)
    torch.nn.init.zeros_(model.model.layers[0].self_attn.qkv_proj.bias)
    torch.nn.init.zeros_(model.model.layers[1].self_attn.qkv_proj.bias)
    forward = CompiledForward(model, room(model, 3), patience=0)
    for _ in range(2):
        assert greedy(forward, asked, 4) == expected_tokens(model, asked, 4)
        forward.wait_until_compiled()
    said = [record.getMessage() for record in caplog.records if "not compiled" in record.getMessage()]
    assert len(said) == 1
    assert "no such backend" in said[0]


def test_a_shape_is_compiled_on_a_cpu_only_when_it_has_run_for_long(monkeypatch):
    asked = []
    monkeypatch.setattr(CompiledForward, "_make_inductor", lambda self, *key: asked.append(key))
    model = random_model()
    forward, inputs = CompiledForward(model, room(model, 1), patience=3), step_inputs({0: (0, [1])}, query_len=1)
    for _ in range(3):
        forward.decode(inputs)
    assert forward.wait_until_compiled()
    assert asked == []
    forward.decode(inputs)
    assert forward.wait_until_compiled()
    assert asked == [(1, 1)]


def test_the_workshop_makes_one_thing_once_and_answers_meanwhile():
    workshop, may_finish, made = Workshop(), threading.Event(), []

    def make():
        may_finish.wait(60)
        made.append(1)
        return lambda inputs: inputs.ids_T

    assert [workshop.find("key", make) for _ in range(3)] == [None] * 3
    assert not workshop.wait(timeout_s=0.01)
    may_finish.set()
    assert workshop.wait(timeout_s=60)
    assert workshop.find("key", make) is not None
    assert made == [1]
    workshop.close()
    assert workshop.find("another", make) is None
    assert workshop.wait(timeout_s=60)


def test_what_a_compiler_tries_out_touches_nothing_but_the_trash_block():
    model = random_model()
    cache = room(model, 2)
    before = [tensor[1:].clone() for tensor in (*cache.keys, *cache.values)]
    EagerForward(model, cache).decode(inductor.trash_inputs(3, 2, 2, torch.device("cpu")))
    after = [tensor[1:] for tensor in (*cache.keys, *cache.values)]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_a_smaller_step_in_the_buffers_of_a_larger_one_gives_its_own_logits():
    model, asked = random_model(), prompts(3)
    forward = EagerForward(model, room(model, 3))
    forward.prefill(step_inputs({i: (0, ids) for i, ids in enumerate(asked)}), torch.tensor([0]))
    buffers = graphs.Buffers(inductor.trash_inputs(4, 1, 8, torch.device("cpu")))
    everyone = step_inputs({i: (len(ids), [9]) for i, ids in enumerate(asked)}, query_len=1)
    buffers.fill(everyone)
    forward.decode(buffers.inputs)
    last = step_inputs({2: (len(asked[2]) + 1, [4])}, query_len=1)
    expected = forward.decode(last)
    kept = [tensor[1:].clone() for tensor in forward._cache.keys]
    buffers.fill(last)
    torch.testing.assert_close(forward.decode(buffers.inputs)[:1], expected, atol=1e-5, rtol=1e-5)
    assert all(torch.allclose(a, b[1:], atol=1e-5) for a, b in zip(kept, forward._cache.keys, strict=True))


def test_sizes_of_graphs_are_near_the_number_of_sequences():
    assert [graphs.size_for(number) for number in (1, 3, 9, 17, 33, 256)] == [1, 4, 16, 24, 48, 256]
    assert graphs.size_for(257) is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("kind", ["kernels", "Inductor"])
def test_cuda_graphs_give_the_tokens_of_eager_steps(kind):
    experts = {"num_experts": 4, "expert_size": 48} if kind == "Inductor" else {}
    model = random_model(head_size=32, windows=(None, 6), **experts).to("cuda")
    asked = prompts(5)
    on_gpu = {"device": "cuda"}
    expected = greedy(EagerForward(model, room(model, 5, **on_gpu)), asked, 8)
    forward = GraphedForward(model, room(model, 5, **on_gpu), max_num_seqs=8, max_blocks=8)
    for _ in range(2):  # eager steps that ask for the graphs; then the graphs
        assert greedy(forward, asked, 8) == expected
        assert greedy(forward, asked[:1], 8) == expected[:1]
        assert forward.wait_until_compiled(timeout_s=280)
    assert set(forward._captured) == {(1, 8), (1, 1)}
    assert kind in forward.quicker
    forward.close()
