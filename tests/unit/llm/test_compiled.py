"""CompiledForward: the same tokens before, while and after something quicker is made."""

from __future__ import annotations

import threading

import pytest
import torch

from flambeau.llm.compiled import CompiledForward, Workshop
from flambeau.llm.forward import EagerForward
from flambeau.llm.kernels import binding, inductor
from support.llm_steps import greedy, prompts, random_model, room, step_inputs

pytestmark = pytest.mark.timeout(300)  # a compiler runs, perhaps on a busy machine


def expected_tokens(model, asked, num_tokens=8):
    """What the plain network says."""
    return greedy(EagerForward(model, room(model, len(asked))), asked, num_tokens)


def test_a_plain_network_says_the_same_once_the_kernels_are_there():
    if not binding.kernels.load():
        pytest.skip("the CPU kernels cannot be built here: there is no C++ compiler")
    model, asked = random_model(head_size=16), prompts(5)
    forward = CompiledForward(model, room(model, 5))
    assert forward.wait_until_compiled(timeout_s=250)
    assert forward._native is not None
    assert greedy(forward, asked, 8) == expected_tokens(model, asked)
    forward.close()


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the compiler's own
def test_a_network_with_biases_is_compiled_while_steps_go_on(monkeypatch):
    monkeypatch.setattr(inductor, "CPU_OPTIONS", {})  # half the time to compile
    model, asked = random_model(head_size=16, num_layers=1, qkv_bias=True), prompts(3)
    torch.nn.init.normal_(model.model.layers[0].self_attn.qkv_proj.bias)
    expected = expected_tokens(model, asked)
    forward = CompiledForward(model, room(model, 3))
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
    forward = CompiledForward(model, room(model, 3))
    for _ in range(2):
        assert greedy(forward, asked, 4) == expected_tokens(model, asked, 4)
        forward.wait_until_compiled()
    said = [record.getMessage() for record in caplog.records if "not compiled" in record.getMessage()]
    assert len(said) == 1
    assert "no such backend" in said[0]


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
