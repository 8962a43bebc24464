"""Adapters on a GPU: the kernels give what their plain twins give, on a GPU or by Triton's interpreter."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace

import pytest
import torch

from flambeau.llm.adapters.adapter_store import AdapterStore
from flambeau.llm.adapters.layer_changes import AdapterChanges, LayerChange
from flambeau.llm.adapters.lora_weights import AdapterTarget, LoraPart
from flambeau.llm.backends.cuda.lora_slots import LoraSlots, can_hold, layer_shapes, rank_of
from flambeau.llm.backends.cuda.lora_steps import WithAdapter
from flambeau.llm.backends.eager import EagerBackend
from flambeau.llm.models.hidden_states import HiddenStates
from flambeau.llm.quantize.cuda_groups import CudaGroupedLinear
from flambeau.llm.quantize.groups import GroupedLinear, GroupLayout, JoinedLinear
from flambeau.llm.quantize.quantizer import quantize
from support.llm_steps import random_model, room, step_inputs

pytest.importorskip("triton", reason="there is no Triton here")

from flambeau.llm.backends.cuda import backend as backend_module
from flambeau.llm.backends.cuda import lora_activation, lora_check, lora_kernel, lora_norm, lora_products, lora_slots
from flambeau.llm.backends.cuda.lora_check import find_error
from flambeau.llm.backends.cuda.lora_layers import NO_FUSIONS, Fusions
from flambeau.llm.backends.cuda.lora_network import LoraNetwork
from flambeau.llm.backends.cuda.network import CudaNetwork

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1",
        reason="needs a CUDA device, or Triton's interpreter (TRITON_INTERPRET=1)",
    ),
]
LAYER_NORMS = {"norm": "layer", "norm_bias": True, "qkv_bias": True, "output_bias": True, "mlp_bias": True}
NETWORKS = {
    "Llama": {},
    "Qwen 2": {"qkv_bias": True, "tied_embeddings": True, "residual_scale": 0.5},
    "Mixtral": {"num_experts": 4, "expert_size": 48},
    "Gemma 2": {"norm_offset": 1.0, "norm_places": "both", "activation": "gelu_tanh", "num_kv_heads": 4},
    "Exaone 4": {"norm_places": "after", "qk_norm": True, "num_kv_heads": 1},
    "GPT-NeoX": {**LAYER_NORMS, "is_parallel": True, "parallel_norms": True, "has_gate": False, "activation": "gelu"},
    "Command R": {"norm": "layer", "is_parallel": True},
    "OPT-350M": {**LAYER_NORMS, "norm_places": "sum", "has_last_norm": False, "has_gate": False, "activation": "relu"},
    "Qwen 3 Next": {"gates_attention": True, "qk_norm": True},
}


def adapter_of(model, seed: int, ranks: dict[str, int]) -> AdapterChanges:
    """Random matrices for the layers whose names end so; queries, keys and values have their own."""
    generator, layers = torch.Generator().manual_seed(seed), {}
    for name, shape in layer_shapes(model.arch).items():
        rank = ranks.get(name.rpartition(".")[2])
        if rank is not None:
            layers[name] = LayerChange(
                [
                    LoraPart(
                        start,
                        (torch.randn(rank, shape.inputs, generator=generator) * 0.3).to(DEVICE),
                        (torch.randn(stop - start, rank, generator=generator) * 0.3).to(DEVICE),
                    )
                    for start, stop in shape.segments
                ]
            )
    return AdapterChanges(layers=layers)


def make_store(model, rank: int = 12) -> AdapterStore:
    arch = model.arch
    store = AdapterStore(AdapterTarget(arch=arch, local=arch, shard=None, device=DEVICE, dtype=torch.float32), model)
    store.adapters[3] = adapter_of(
        model, 1, dict.fromkeys(("qkv_proj", "o_proj", "gate_up_proj", "up_proj", "down_proj"), 4)
    )
    store.adapters[7] = adapter_of(model, 2, {"qkv_proj": rank, "down_proj": 3})
    return store


def slots_of(model, store, num_slots: int = 3) -> LoraSlots:
    rank = max(map(rank_of, store.adapters.values()))
    slots = LoraSlots(layer_shapes(model.arch), num_slots, rank, DEVICE, torch.float32)
    assert all(can_hold(adapter, layer_shapes(model.arch)) for adapter in store.adapters.values())
    slots.update(store.adapters)
    return slots


def filled_room(model, num_sequences: int):
    """A cache with the same numbers every time."""
    cache = room(model, num_sequences, device=DEVICE)
    torch.manual_seed(5)
    for tensor in (*cache.keys, *cache.values):
        tensor.normal_()
    return cache


STEPS = {
    "one sequence": ({0: (11, [1])}, [7]),
    "several": ({0: (11, [1]), 1: (0, [2]), 2: (30, [3])}, [3, 0, 7]),
    "verified": ({0: (4, [1] * 4), 1: (17, [2] * 4)}, [7, 3]),
    "prompts": ({0: (0, [1] * 7), 1: (5, [2, 3] * 11), 2: (8, [3])}, [3, 0, 7]),
}


FUSIONS = {
    "all": Fusions(),
    "none": NO_FUSIONS,
    "norms": Fusions(attention=False, activations=False),
}
CHECKED = [
    *(("Llama", case, "all") for case in STEPS),
    *(("Llama", case, "none") for case in ("several", "prompts")),
    ("Llama", "several", "norms"),
    *((network, "several", "all") for network in NETWORKS if network != "Llama"),
]


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """How many programs the interpreter has patience for."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr("flambeau.llm.backends.cuda.attention.PROGRAMS", 4)
        monkeypatch.setattr(lora_norm, "NUM_PROGRAMS", 16)


@pytest.mark.parametrize(("network", "case", "fusions"), CHECKED)
def test_steps_give_the_twins_logits(network, case, fusions):
    model = random_model(head_size=16, **NETWORKS[network]).to(DEVICE)
    store = make_store(model, rank=40 if fusions == "none" else 12)
    slots = slots_of(model, store)
    sequences, numbers = STEPS[case]
    has_prompts = case == "prompts"
    inputs = step_inputs(sequences, query_len=0 if has_prompts else len(sequences[0][1]))
    inputs.adapters_T = torch.tensor(numbers).repeat_interleave(inputs.query_starts.diff())
    caches = [filled_room(model, len(sequences)) for _ in range(2)]
    rows_N = inputs.query_starts[1:] - 1
    states = [HiddenStates((1, 2)) if network in ("Llama", "Qwen 2") else None for _ in range(2)]
    expected = EagerBackend(model, caches[0], adapters=store, states=states[0]).prefill(inputs, rows_N)
    step = LoraNetwork(model, caches[1], slots, states[1], FUSIONS[fusions])
    placed = replace(inputs, adapters_T=slots.places(inputs.adapters_T))
    with torch.inference_mode():
        if has_prompts:
            found = step.prefill(placed, rows_N)
        else:
            found = step.run(replace(placed.to(DEVICE), adapters_T=placed.adapters_T.to(DEVICE)))[rows_N]
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
    if states[0] is not None:  # before the last norm, too, which adds adapters to them in place
        torch.testing.assert_close(states[1].take(), states[0].take(), atol=2e-4, rtol=1e-4)


def multiply_and_expand(x, linear, slots, division, inner_TX):
    """The twin of the product that adds its adapters."""
    y, inner = linear.layer(x), inner_TX.view(len(x), len(slots.shape.starts), -1)
    for number, (start, stop) in enumerate(slots.shape.segments):
        y[:, start:stop] += inner[:, number] @ slots.b_OY[start:stop].T
    if not linear.gates:
        return y
    gate, up = y.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def multiply_and_shrink(x, linear, slots, division):
    """The twin of the product that multiplies with A, too."""
    return linear.layer(x), (x @ slots.a_LXI.flatten(0, 1).T)[None]


class TestProducts:
    """The layers give the CUDA products what they need; their twins stand for them."""

    @pytest.fixture(autouse=True)
    def calls(self, monkeypatch):
        found = []

        def counted(compute):
            def call(*arguments):
                found.append(compute.__name__)
                return compute(*arguments)

            return call

        def has_kernel(linear, num_rows, adapters):
            return "as it is" if num_rows > 1 and linear.has_kernel else None

        monkeypatch.setattr(lora_slots, "can_be_together", lambda *_: True)
        monkeypatch.setattr(lora_products, "division_of", has_kernel)
        for twin in (multiply_and_expand, multiply_and_shrink):
            monkeypatch.setattr(lora_products, twin.__name__, counted(twin))
        return found

    @pytest.mark.parametrize(
        ("network", "expands", "shrinks"), [("Llama", 2, 2), ("Qwen 2", 2, 2), ("Gemma 2", 1, 2), ("GPT-NeoX", 1, 0)]
    )
    def test_steps_give_the_twins_logits(self, network, expands, shrinks, calls):
        model = random_model(head_size=16, **NETWORKS[network]).to(DEVICE)
        store = make_store(model)
        slots = slots_of(model, store, num_slots=4)
        sequences, numbers = STEPS["several"]
        inputs = step_inputs(sequences, query_len=1)
        inputs.adapters_T = torch.tensor(numbers)
        expected = EagerBackend(model, filled_room(model, 3), adapters=store).decode(inputs)
        placed = replace(inputs.to(DEVICE), adapters_T=slots.places(inputs.adapters_T).to(DEVICE))
        with torch.inference_mode():
            found = LoraNetwork(model, filled_room(model, 3), slots).run(placed)
        torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
        num_layers = model.arch.num_layers
        assert calls.count("multiply_and_expand") == expands * num_layers
        assert calls.count("multiply_and_shrink") == shrinks * num_layers

    def test_products_that_are_wrong_are_found(self, monkeypatch):
        monkeypatch.setattr(lora_check, "CHECKED_ROWS", (5,))
        model = random_model(head_size=16, num_layers=1).to(DEVICE)
        slots = slots_of(model, make_store(model), num_slots=4)
        assert find_error(slots, model) is None
        wrong = {
            "with its adapters": ("multiply_and_expand", lambda *args: 2 * multiply_and_expand(*args)),
            "beside its adapters": (
                "multiply_and_shrink",
                lambda *args: (2 * multiply_and_shrink(*args)[0], multiply_and_shrink(*args)[1]),
            ),
            "gives to adapters": (
                "multiply_and_shrink",
                lambda *args: (multiply_and_shrink(*args)[0], 2 * multiply_and_shrink(*args)[1]),
            ),
        }
        for expected, (name, instead) in wrong.items():
            with monkeypatch.context() as patched:
                patched.setattr(lora_products, name, instead)
                assert expected in find_error(slots, model)


def in_several_forms(model):
    """The first projections of each module in 5 bits, the others as they are."""
    for layer in model.model.layers:
        for owner, leaf in ((layer.self_attn, "qkv_proj"), (layer.mlp, "gate_up_proj")):
            whole = getattr(owner, leaf)
            first = GroupedLinear(whole.in_features, 32, GroupLayout(5, 32, False, 16))
            first.weight.random_(0, 32)
            first.scales.fill_(0.01)
            second = torch.nn.Linear(whole.in_features, whole.out_features - 32, bias=False)
            second.weight = torch.nn.Parameter(whole.weight[32:].clone(), requires_grad=False)
            setattr(owner, leaf, JoinedLinear([CudaGroupedLinear(first), second], whole.bias))
    return model


QUANTIZED = {
    "int8": lambda: quantize(random_model(head_size=16).to(DEVICE), "int8"),
    "several forms": lambda: in_several_forms(random_model(head_size=16)).to(DEVICE),
}


@pytest.mark.parametrize("kind", QUANTIZED)
def test_quantized_layers_have_adapters(kind):
    model = QUANTIZED[kind]()
    store = make_store(model)
    slots = slots_of(model, store)
    sequences, numbers = STEPS["several"]
    inputs = step_inputs(sequences, query_len=1)
    inputs.adapters_T = torch.tensor(numbers)
    expected = EagerBackend(model, filled_room(model, 3), adapters=store).decode(inputs)
    placed = replace(inputs.to(DEVICE), adapters_T=slots.places(inputs.adapters_T).to(DEVICE))
    with torch.inference_mode():
        found = LoraNetwork(model, filled_room(model, 3), slots).run(placed)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)


def test_another_adapter_in_a_slot_is_used_without_another_network():
    model = random_model(head_size=16).to(DEVICE)
    store = make_store(model)
    slots = slots_of(model, store, num_slots=2)
    step = LoraNetwork(model, filled_room(model, 1), slots)
    inputs = step_inputs({0: (3, [5])}, query_len=1)

    def logits_of(number):
        given = replace(inputs, adapters_T=torch.tensor([number]))
        expected = EagerBackend(model, filled_room(model, 1), adapters=store).decode(given)
        placed = replace(given.to(DEVICE), adapters_T=slots.places(given.adapters_T).to(DEVICE))
        with torch.inference_mode():
            torch.testing.assert_close(step.run(placed), expected, atol=2e-4, rtol=1e-4)
        return expected

    before = logits_of(3)
    del store.adapters[3]
    store.adapters[9] = adapter_of(model, 8, {"o_proj": 2})
    slots.update(store.adapters)
    assert not torch.allclose(logits_of(9), before, atol=0.01)
    logits_of(7)


def with_other_sums(found):
    return found if found.inner is None else found._replace(inner=found.inner + 9)


def test_kernels_that_are_wrong_are_found(monkeypatch):
    monkeypatch.setattr(lora_check, "CHECKED_ROWS", (5,))
    model = random_model(head_size=16, num_layers=1).to(DEVICE)
    slots = slots_of(model, make_store(model))
    assert find_error(slots, model) is None
    activate, launch_norm = lora_activation.expand_active, lora_norm.launch_norm
    wrong = {
        "outputs of qkv_proj": (lora_kernel, "expand", lambda *_: None),
        "with its activation": (lora_activation, "expand_active", lambda y, *args: activate(2 * y, *args)),
        "for the next adapter": (
            lora_activation,
            "expand_active",
            lambda *args: (activate(*args)[0], 2 * activate(*args)[1]),
        ),
        "residual stream": (
            lora_norm,
            "launch_norm",
            lambda norm, x, *args, **options: launch_norm(norm, 3 * x, *args, **options),
        ),
        "gives to adapters": (
            lora_norm,
            "launch_norm",
            lambda *args, **options: with_other_sums(launch_norm(*args, **options)),
        ),
    }
    for expected, (module, name, instead) in wrong.items():
        with monkeypatch.context() as patched:
            patched.setattr(module, name, instead)
            assert expected in find_error(slots, model)


def test_comparisons_have_rows_with_an_adapter_and_without():
    class Inner:
        prefill = staticmethod(lambda inputs, rows_N: inputs.adapters_T.tolist())
        run = staticmethod(lambda inputs: inputs.adapters_T.tolist())

    assert WithAdapter(Inner, 7).prefill(step_inputs(STEPS["prompts"][0]), None) == [7] * 7 + [0] * 22 + [7]
    assert WithAdapter(Inner, 7).run(step_inputs({0: (11, [1])}, query_len=1)) == [7]


class StandIn:
    """A graph that runs its step."""

    def __init__(self, step, buffers, pool, chooser, states=None):
        self.num_runs, self._step = 0, step
        assert buffers.adapters_T is not None

    def run(self, inputs):
        self.num_runs += 1
        return self._step(inputs)


@pytest.mark.timeout(300)
@pytest.mark.skipif(DEVICE.type == "cuda", reason="its graphs are stand-ins on a CPU")
def test_the_backend_captures_steps_with_adapters_once(monkeypatch):
    cuda = {"device": lambda _: contextlib.nullcontext(), "graph_pool_handle": object, "current_stream": object}
    for name, value in cuda.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(backend_module.CudaBackend, "_on_side_stream", lambda self: contextlib.nullcontext())
    monkeypatch.setattr(backend_module.CudaBackend, "_chooser", lambda *_: None)
    monkeypatch.setattr(backend_module, "CapturedStep", StandIn)
    monkeypatch.setattr(backend_module, "CapturedPrompts", None)
    monkeypatch.setattr(backend_module, "PROMPT_LENGTHS", (1,))
    monkeypatch.setattr(backend_module.prompt_graphs, "size_for", lambda *_: None)
    monkeypatch.setattr(lora_check, "CHECKED_ROWS", (5,))
    monkeypatch.setattr("flambeau.llm.backends.cuda.comparison.LENGTHS", (9, 4))
    model = random_model(head_size=16, num_layers=1)
    store, cache = make_store(model), filled_room(model, 3)
    expected = EagerBackend(model, filled_room(model, 3), adapters=store)
    backend = backend_module.CudaBackend(model, cache, max_num_seqs=4, max_blocks=8, adapters=store)
    backend.wait_until_compiled(60)
    backend._network = CudaNetwork(model, cache)  # as on a GPU

    def check(numbers):
        inputs = step_inputs({i: (3, [i + 5]) for i in range(len(numbers))}, query_len=1)
        inputs.adapters_T = torch.tensor(numbers)
        store.unload(0)  # there is none: what was stacked is made again
        torch.testing.assert_close(backend.decode(inputs), expected.decode(inputs), atol=2e-4, rtol=1e-4)

    for _ in range(3):
        check([3, 0, 7])
        backend.wait_until_compiled(120)
    assert [*backend._captured] == [(1, 4, 1)]
    graph = backend._captured[1, 4, 1]
    assert graph.num_runs == 1
    slots, build = backend._lora.slots, backend._lora_builder(1)
    del backend._lora_networks[1]
    with torch.inference_mode():
        slots.update({8: store.adapters[7]})  # as if others were loaded before the comparison begins
        build()
        slots.update(store.adapters)
    assert [*backend._lora_networks] == [1]
    store.adapters[9] = adapter_of(model, 8, {"o_proj": 2})  # into a free slot
    check([9, 0, 7])
    assert graph.num_runs == 2
    prompt = step_inputs({0: (0, [5, 6, 7]), 1: (0, [8])})
    prompt.adapters_T = torch.tensor([9, 9, 9, 3])
    rows_N = prompt.query_starts[1:] - 1
    torch.testing.assert_close(backend.prefill(prompt, rows_N), expected.prefill(prompt, rows_N), atol=2e-4, rtol=1e-4)
    store.adapters[10] = AdapterChanges(
        layers={"lm_head": LayerChange([LoraPart(0, torch.ones(1, model.arch.hidden_size), torch.ones(5, 1))])}
    )
    check([9, 10, 0])  # as plain PyTorch
    assert graph.num_runs == 2
    store.adapters[11] = adapter_of(model, 8, {"o_proj": 40})  # of a larger rank: another generation
    for _ in range(3):
        check([9, 11, 0])
        backend.wait_until_compiled(120)
    assert [*backend._captured] == [(1, 4, 2)]
    build()  # of slots that were replaced meanwhile
    assert [*backend._lora_networks] == [2]
    backend.close()
