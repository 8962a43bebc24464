"""CpuBackend: the same tokens before, while and after a faster path is compiled."""

from __future__ import annotations

import pytest
from torch import nn

from flambeau.llm.backends import inductor
from flambeau.llm.backends.cpu.backend import CpuBackend
from flambeau.llm.backends.cpu.bindings import KINDS
from flambeau.llm.backends.cpu.packed_linear import PackedLinear
from flambeau.llm.backends.eager import EagerBackend
from flambeau.llm.quantize.quantizer import quantize
from support.cpu_kernels import need_cpu_kernels
from support.llm_steps import greedy, prompts, random_model, room, step_inputs

pytestmark = pytest.mark.timeout(300)  # a compiler runs, perhaps on a busy machine


# A cache of one latent of 20 and a rotated key of 8 for each token: they fill no vectors of the kernels.
LATENT = {
    "num_kv_heads": 1,
    "head_size": 28,
    "latent_size": 20,
    "rotary_size": 8,
    "unrotated_size": 12,
    "value_size": 10,
}


def expected_tokens(model, asked, num_tokens=8):
    """What the plain network says."""
    return greedy(EagerBackend(model, room(model, len(asked))), asked, num_tokens)


@pytest.mark.parametrize("changes", [{}, {"num_experts": 4, "expert_size": 16}])
def test_a_network_says_the_same_once_the_kernels_are_there(caplog, changes):
    caplog.set_level("INFO")
    need_cpu_kernels()
    model, asked = random_model(head_size=16, **changes), prompts(5)
    expected = expected_tokens(model, asked)
    assert not any(isinstance(module, PackedLinear) for module in model.modules())
    backend = CpuBackend(model, room(model, 5))
    assert backend.wait_until_compiled(timeout_s=250)
    assert backend._network is not None
    assert greedy(backend, asked, 8) == expected
    assert all(type(module) is not nn.Linear or name.endswith("gate") for name, module in model.named_modules())
    assert expected_tokens(model, asked) == expected  # layer by layer, now that they are packed
    switched = [record.args for record in caplog.records if record.name == "flambeau.llm.backends.cpu.backend"]
    assert switched == [("the model", "CPU kernels")]
    assert backend.decode_path == "CPU kernels"
    backend.close()


@pytest.mark.parametrize("tied", [False, True])
def test_the_last_layer_has_8_bits_beside_integer_weights(tied):
    need_cpu_kernels()
    model = quantize(random_model(head_size=16, tied_embeddings=tied), "int4", group_size=32)
    backend = CpuBackend(model, room(model, 1))
    assert backend.wait_until_compiled(timeout_s=250)
    assert KINDS[backend._network._network.head.kind] == "int8"
    backend.close()


def test_what_was_compiled_is_named_when_it_takes_over_and_not_again(caplog, monkeypatch):
    caplog.set_level("INFO")
    model = random_model(head_size=16, qk_norm=True, rotated_qk_norm=True)
    plain = EagerBackend(model, room(model, 3))
    monkeypatch.setattr(CpuBackend, "_compile_with_inductor", lambda *_: plain.decode)
    backend = CpuBackend(model, room(model, 3), steps_before_compiling=2, name="the draft")
    inputs = [step_inputs({i: (0, [1]) for i in range(number)}, query_len=1) for number in (1, 2)]
    backend.decode(inputs[0])
    assert backend.decode_path == "plain PyTorch until Inductor has compiled a step"
    for _ in range(5):
        for each in inputs:
            backend.decode(each)
        backend.wait_until_compiled(timeout_s=60)
    assert [record.args for record in caplog.records] == [
        ("the draft", "CPU", "norms of queries and keys after the rotation"),
        ("the draft", "Inductor"),
    ]
    backend.close()


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # the compiler's own
def test_a_network_that_the_kernels_do_not_know_is_compiled_while_steps_go_on(monkeypatch):
    monkeypatch.setattr(inductor, "CPU_OPTIONS", {})  # half the time to compile
    model, asked = random_model(num_layers=1, norm="layer", **LATENT), prompts(3)
    expected = expected_tokens(model, asked)
    backend = CpuBackend(model, room(model, 3), steps_before_compiling=0)
    rounds = 0
    while True:  # every round asks for the same tokens, most of them while the compiler runs
        assert greedy(backend, asked, 8) == expected
        rounds += 1
        if backend.wait_until_compiled(timeout_s=0.5):
            break
    assert rounds > 1
    assert backend._find(step_inputs({0: (3, [1]), 1: (5, [2])}, query_len=1)) is not None
    assert greedy(backend, asked, 8) == expected
    assert greedy(backend, asked[:2], 8) == expected[:2]
    backend.close()


def test_a_compiler_that_fails_is_named_once_and_steps_go_on(monkeypatch, caplog):
    def fail(*arguments: object) -> None:
        raise RuntimeError("no such backend\nand a long story")

    monkeypatch.setattr(inductor, "compile_step", fail)
    model, asked = random_model(**LATENT), prompts(3)
    backend = CpuBackend(model, room(model, 3), steps_before_compiling=0)
    for _ in range(2):
        assert greedy(backend, asked, 4) == expected_tokens(model, asked, 4)
        backend.wait_until_compiled()
    assert [(record.levelname, *record.args) for record in caplog.records if record.args] == [
        ("WARNING", "no such backend and a long story")
    ]


def test_a_shape_is_compiled_on_a_cpu_only_when_it_has_run_for_long(monkeypatch):
    asked = []
    monkeypatch.setattr(CpuBackend, "_compile_with_inductor", lambda self, *key: asked.append(key))
    model = random_model(**LATENT)
    backend, inputs = (
        CpuBackend(model, room(model, 1), steps_before_compiling=3),
        step_inputs({0: (0, [1])}, query_len=1),
    )
    for _ in range(3):
        backend.decode(inputs)
    assert backend.wait_until_compiled()
    assert asked == []
    backend.decode(inputs)
    assert backend.wait_until_compiled()
    assert asked == [(1, 1)]
