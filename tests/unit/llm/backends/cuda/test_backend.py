"""CudaBackend's decisions, without a GPU: what is captured when, and what computes steps meanwhile.

The graphs are stand-ins that compute by plain PyTorch; the last test and test_engine_on_gpu.py use real ones.
"""

from __future__ import annotations

import contextlib
import sys
from types import SimpleNamespace

import pytest
import torch

from flambeau.llm.adapters.adapter_store import AdapterStore
from flambeau.llm.adapters.layer_changes import AdapterChanges, LayerChange
from flambeau.llm.adapters.lora_weights import AdapterTarget, LoraPart
from flambeau.llm.backends.cuda import backend as module
from flambeau.llm.backends.cuda.backend import COMPILING, CudaBackend
from flambeau.llm.backends.eager import EagerBackend
from flambeau.llm.models.families.recurrence import Recurrence
from support.llm_steps import greedy, prompts, random_model, room, step_inputs
from support.log_records import logged

FIRST = {"layers": frozenset({0}), "inner_size": 64}
HEADS = {"num_heads": 4, "head_size": 16, "state_size": 8, "num_groups": 2}
RECURRENT = {
    "Mamba 1": Recurrence(kind="mamba", state_size=6, time_step_rank=3, **FIRST),
    "Mamba 2": Recurrence(kind="mamba2", **HEADS, **FIRST),
    "delta nets": Recurrence(kind="delta_net", **HEADS, **FIRST),
    "short convolutions": Recurrence(kind="short_conv", layers=frozenset({0}), inner_size=32),
}


class StandIn:
    """A graph that runs its step."""

    fails = False

    def __init__(self, step, buffers, pool, chooser, states=None):
        if self.fails:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        self.num_sequences = len(buffers.context_lens_S)
        self.num_runs = 0
        self._step = step

    def run(self, inputs):
        self.num_runs += 1
        return self._step(inputs)


@pytest.fixture
def backend(monkeypatch):
    """One whose compiler gives back plain steps."""
    cuda = {"device": lambda _: contextlib.nullcontext(), "graph_pool_handle": object, "current_stream": object}
    for name, value in {**cuda, "set_stream": lambda _: None}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(CudaBackend, "_on_side_stream", lambda self: contextlib.nullcontext())
    monkeypatch.setattr(module, "CapturedStep", StandIn)
    model = random_model()
    cache = room(model, 5)
    plain = EagerBackend(model, cache)
    monkeypatch.setattr(module.inductor, "compile_step", lambda *_: plain.decode)
    backend = CudaBackend(model, cache, max_num_seqs=8, max_blocks=8)
    yield backend
    backend.close()


def use_kernels(monkeypatch, network):
    """Let a class stand in for CudaNetwork, which needs Triton."""
    package = "flambeau.llm.backends.cuda"
    monkeypatch.setitem(sys.modules, f"{package}.network", SimpleNamespace(CudaNetwork=network))
    supported = SimpleNamespace(can_compute=lambda *_: True)
    monkeypatch.setitem(sys.modules, f"{package}.supported_networks", supported)


def steps_of(num_sequences):
    return step_inputs({i: (3, [i]) for i in range(num_sequences)}, query_len=1)


def test_a_step_is_captured_when_it_has_been_made_and_a_larger_one_will_do_meanwhile(backend, monkeypatch):
    backend.decode(steps_of(5))
    assert backend.wait_until_compiled(60)
    assert backend._captured == {}
    backend.decode(steps_of(5))
    assert [*backend._captured] == [(1, 8)]
    monkeypatch.setattr(backend._compiler, "find", lambda *_: None)  # the compiler is slow
    backend.decode(steps_of(3))
    assert backend._captured[1, 8].num_runs == 2


def test_it_says_what_plain_steps_say_all_the_way(backend):
    asked = prompts(5)
    expected = greedy(EagerBackend(backend.model, room(backend.model, 5)), asked, 8)
    for _ in range(2):
        assert greedy(backend, asked, 8) == expected
        assert greedy(backend, asked[:2], 8) == expected[:2]
        assert backend.wait_until_compiled(60)
    assert {*backend._captured} == {(1, 8), (1, 2)}


def test_a_capture_without_memory_is_logged_once_and_steps_go_on(backend, monkeypatch, caplog):
    monkeypatch.setattr(StandIn, "fails", True)
    expected = EagerBackend(backend.model, backend.cache).decode(steps_of(2))
    backend.decode(steps_of(2))
    assert backend.wait_until_compiled(60)
    for _ in range(3):
        torch.testing.assert_close(backend.decode(steps_of(2)), expected)
    told = [record.args for record in caplog.records if record.levelname == "WARNING" and len(record.args) == 2]
    assert told == [("steps of 2 sequences", "CUDA out of memory. Tried to allocate 2.00 GiB")]
    monkeypatch.setattr(StandIn, "fails", False)
    backend.decode(steps_of(4))  # others are captured all the same
    assert backend.wait_until_compiled(60)
    backend.decode(steps_of(4))
    assert [*backend._captured] == [(1, 4)]


def test_steps_are_compiled_with_the_inputs_of_a_real_step(backend, monkeypatch):
    examples = []
    monkeypatch.setattr(module.inductor, "compile_step", lambda *given: examples.append(given[4]))
    backend.decode(steps_of(3))
    assert backend.wait_until_compiled(60)
    assert [example.context_lens_S.tolist() for example in examples] == [[1] * 4]


def test_nothing_is_captured_while_a_compiler_runs(backend):
    backend.decode(steps_of(1))
    assert backend.wait_until_compiled(60)
    with COMPILING:
        backend.decode(steps_of(1))
        assert backend._captured == {}
    backend.decode(steps_of(1))
    assert [*backend._captured] == [(1, 1)]


def test_without_triton_one_warning_is_logged(backend, monkeypatch, caplog):
    assert backend.wait_until_compiled(60)
    caplog.clear()
    # Where there is a Triton, an earlier test may have imported what needs it.
    ours = {name: each for name, each in sys.modules.items() if name.startswith("flambeau.llm.backends.cuda.")}
    for name in [name for name, each in ours.items() if name.endswith(".network") or hasattr(each, "triton")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)
    backend._build_kernels()
    [(error,)] = logged(caplog, "flambeau.llm.backends.cuda.backend")
    assert isinstance(error, ImportError)


@pytest.mark.parametrize("is_wrong", [True, False])
def test_kernels_that_differ_from_plain_pytorch_are_not_used(backend, monkeypatch, caplog, is_wrong):
    assert backend.wait_until_compiled(60)
    caplog.clear()

    class Kernels(EagerBackend):
        def __init__(self, model, cache, states=None):
            super().__init__(model, cache)

        def run(self, inputs):
            return self.decode(inputs) * (-1 if is_wrong else 1)

    use_kernels(monkeypatch, Kernels)
    backend.model = random_model(norm_offset=1.0, max_length=200)  # not Llama's
    checked = []
    monkeypatch.setattr(backend, "_check_sampling", lambda: checked.append(True))
    backend._build_kernels()
    assert checked
    assert (backend._network is None) == is_wrong
    warned = [record.args for record in caplog.records if record.levelname == "WARNING"]
    reason = "the logits of several sequences differ by 200% of their norm; parts beyond Llama's: norm_offset"
    assert warned == ([("the model", reason)] if is_wrong else [])


@pytest.mark.parametrize("kind", RECURRENT)
def test_kernels_of_recurrent_layers_are_compared_and_compiled_without_a_sequence_being_touched(
    backend, monkeypatch, caplog, kind
):
    assert backend.wait_until_compiled(60)
    caplog.clear()
    model = random_model(max_length=200, recurrence=RECURRENT[kind])
    cache = room(model, 5)
    lengths = []

    class Kernels(EagerBackend):
        def __init__(self, model, cache, states=None):
            super().__init__(model, cache)

        def prefill(self, inputs, rows_N):
            lengths.append(len(inputs.ids_T))
            return super().prefill(inputs, rows_N)

        run = EagerBackend.decode

    use_kernels(monkeypatch, Kernels)
    backend.model, backend.cache = model, cache
    monkeypatch.setattr(backend, "_check_sampling", lambda: None)
    backend._build_kernels()
    assert isinstance(backend._network, Kernels)
    assert {*module.PROMPT_LENGTHS} <= {*lengths}
    assert all(state[1:].isnan().all() for layer in cache.states.layers.values() for state in layer)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    assert backend._build_one_row(None, None) is None  # its kernels know attention only


def test_a_step_whose_states_go_from_slot_to_slot_runs_as_plain_pytorch(backend):
    assert backend.wait_until_compiled(60)
    inputs = steps_of(2)
    inputs.state_slots_S, inputs.state_ends_T = torch.tensor([1, 2]), torch.tensor([3, 4])
    backend.decode(inputs)
    assert backend.wait_until_compiled(60)
    backend.decode(inputs)
    assert backend._captured == {}


def test_adapters_are_added_in_plain_pytorch_where_their_kernels_cannot_be_used(backend, monkeypatch, caplog):
    model, cpu = backend.model, torch.device("cpu")
    target = AdapterTarget(arch=model.arch, local=model.arch, shard=None, device=cpu, dtype=torch.float32)
    store, size = AdapterStore(target, model), model.arch.hidden_size
    part = LoraPart(0, torch.ones(2, model.arch.intermediate_size), torch.ones(size, 2))
    store.adapters[1] = AdapterChanges(layers={"model.layers.0.mlp.down_proj": LayerChange([part])})
    monkeypatch.setitem(sys.modules, "flambeau.llm.backends.cuda.lora_network", None)
    monkeypatch.setattr(module, "LoraSteps", lambda *_: OneSlot())
    other = CudaBackend(model, backend.cache, max_num_seqs=8, max_blocks=8, adapters=store)
    assert other.wait_until_compiled(60)
    other._network = object()  # the kernels compute steps without adapters
    for _ in range(3):
        inputs = steps_of(2)
        inputs.adapters_T = torch.tensor([1, 0])
        expected = EagerBackend(model, backend.cache, adapters=store).decode(inputs)
        torch.testing.assert_close(other.decode(inputs), expected)
        assert other.wait_until_compiled(60)
    assert other._captured == {}
    told = [record for record in caplog.records if "adapters" in record.message and record.levelname == "WARNING"]
    assert len(told) == 1
    other.close()


class OneSlot:
    """Slots that hold every adapter."""

    generation = 1

    def __init__(self):
        self.slots = self

    def place(self, adapters_T):
        return adapters_T

    def places(self, adapters_T):
        return adapters_T

    def holdable(self):
        return {1: None}


@pytest.mark.gpu
@pytest.mark.timeout(300)  # a compiler runs
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    "kind",
    [
        "kernels",
        "kernels, with experts",
        "kernels, of a family",
        *(f"kernels, {kind}" for kind in RECURRENT),
        "Inductor",
    ],
)
def test_cuda_graphs_give_the_tokens_of_eager_steps(kind):
    parts = {
        "kernels, with experts": {"num_experts": 4, "expert_size": 48},
        "kernels, of a family": {"norm": "layer", "norm_bias": True, "is_parallel": True, "rotary_size": 16},
        "Inductor": {"num_experts": 4, "expert_size": 48, "has_gate": False},  # experts without gates
    }
    parts |= {f"kernels, {name}": {"recurrence": recurrence} for name, recurrence in RECURRENT.items()}
    model = random_model(head_size=32, windows=(None, 6), **parts.get(kind, {})).to("cuda")
    asked = prompts(5)
    on_gpu = {"device": "cuda"}
    expected = greedy(EagerBackend(model, room(model, 5, **on_gpu)), asked, 8)
    backend = CudaBackend(model, room(model, 5, **on_gpu), max_num_seqs=8, max_blocks=8)
    for _ in range(2):  # eager steps that ask for the graphs; then the graphs
        assert greedy(backend, asked, 8) == expected
        assert greedy(backend, asked[:1], 8) == expected[:1]
        assert backend.wait_until_compiled(timeout_s=280)
    assert set(backend._captured) == {(1, 8), (1, 1)}
    assert kind.partition(",")[0] in backend.decode_path
    assert bool(backend._captured_prompts) == (kind != "Inductor")
    backend.close()
