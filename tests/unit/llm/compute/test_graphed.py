"""GraphedForward's decisions, without a GPU: what is captured when, and what answers meanwhile.

The graphs are stand-ins that compute by plain PyTorch; the real ones are tested on a GPU (test_compiled.py,
test_engine_on_gpu.py).
"""

from __future__ import annotations

import contextlib
import sys

import pytest
import torch

from flambeau.llm.compute import graphed
from flambeau.llm.compute.forward import EagerForward
from flambeau.llm.compute.graphed import COMPILING, GraphedForward
from support.llm_steps import greedy, prompts, random_model, room, step_inputs


class StandIn:
    """A graph that runs its step."""

    fails = False

    def __init__(self, step, buffers, pool):
        if self.fails:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        self.num_sequences = len(buffers.context_lens_S)
        self.num_runs = 0
        self._step = step

    def run(self, inputs):
        self.num_runs += 1
        return self._step(inputs)


@pytest.fixture
def forward(monkeypatch):
    """One whose compiler gives back plain steps."""
    cuda = {"device": lambda _: contextlib.nullcontext(), "graph_pool_handle": object, "current_stream": object}
    for name, value in {**cuda, "set_stream": lambda _: None}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(GraphedForward, "_beside", lambda self: contextlib.nullcontext())
    monkeypatch.setattr(graphed, "Graph", StandIn)
    model = random_model()
    cache = room(model, 5)
    plain = EagerForward(model, cache)
    monkeypatch.setattr(graphed.inductor, "compile_step", lambda *_: plain.decode)
    forward = GraphedForward(model, cache, max_num_seqs=8, max_blocks=8)
    yield forward
    forward.close()


def steps_of(num_sequences):
    return step_inputs({i: (3, [i]) for i in range(num_sequences)}, query_len=1)


def test_a_step_is_captured_when_it_has_been_made_and_a_larger_one_will_do_meanwhile(forward, monkeypatch):
    forward.decode(steps_of(5))
    assert forward.wait_until_compiled(60)
    assert forward._captured == {}
    forward.decode(steps_of(5))
    assert [*forward._captured] == [(1, 8)]
    monkeypatch.setattr(forward._workshop, "find", lambda *_: None)  # the compiler is slow
    forward.decode(steps_of(3))
    assert forward._captured[1, 8].num_runs == 2


def test_it_says_what_plain_steps_say_all_the_way(forward):
    asked = prompts(5)
    expected = greedy(EagerForward(forward.model, room(forward.model, 5)), asked, 8)
    for _ in range(2):
        assert greedy(forward, asked, 8) == expected
        assert greedy(forward, asked[:2], 8) == expected[:2]
        assert forward.wait_until_compiled(60)
    assert [*forward._captured] == [(1, 8), (1, 2)]


def test_a_capture_without_memory_is_told_once_and_steps_go_on(forward, monkeypatch, caplog):
    monkeypatch.setattr(StandIn, "fails", True)
    expected = EagerForward(forward.model, forward._cache).decode(steps_of(2))
    forward.decode(steps_of(2))
    assert forward.wait_until_compiled(60)
    for _ in range(3):
        torch.testing.assert_close(forward.decode(steps_of(2)), expected)
    told = [record.getMessage() for record in caplog.records if "not captured" in record.getMessage()]
    assert told == [
        "steps of 2 sequences are not captured, and slower for it: CUDA out of memory. Tried to allocate 2.00 GiB"
    ]
    monkeypatch.setattr(StandIn, "fails", False)
    forward.decode(steps_of(4))  # others are captured all the same
    assert forward.wait_until_compiled(60)
    forward.decode(steps_of(4))
    assert [*forward._captured] == [(1, 4)]


def test_nothing_is_captured_while_a_compiler_runs(forward):
    forward.decode(steps_of(1))
    assert forward.wait_until_compiled(60)
    with COMPILING:
        forward.decode(steps_of(1))
        assert forward._captured == {}
    forward.decode(steps_of(1))
    assert [*forward._captured] == [(1, 1)]


def test_without_triton_a_line_names_the_remedy(forward, monkeypatch, caplog):
    assert forward.wait_until_compiled(60)
    caplog.clear()
    for name in [name for name in sys.modules if name.startswith("flambeau.llm.kernels.gpu.")]:
        if name.rpartition(".")[2] in ("network", "attention", "linear", "int4", "norms", "rotary"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)
    forward._make_network()
    assert "pip install triton" in caplog.text
