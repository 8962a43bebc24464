"""Recurrent layers by the kernels give outputs and states of plain PyTorch: on a GPU, or by Triton's interpreter.

Products around the kernels are plain ones here: `test_network.py` has whole networks.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from flambeau.llm.backends import inductor
from flambeau.llm.backends.cuda.graphs import InputBuffers
from flambeau.llm.backends.recurrent import PagedRecurrence
from flambeau.llm.core.state_slots import StateCopy
from flambeau.llm.executor.inputs import StepInputs
from flambeau.llm.executor.kv_cache import KVCache
from support.tiny_models import tiny_hybrid

pytest.importorskip("triton", reason="there is no Triton here")

from flambeau.llm.backends.cuda.recurrent_layer import first_projection, recurrent_part
from flambeau.llm.backends.cuda.recurrent_sequences import sequences_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1",
        reason="needs a CUDA device, or Triton's interpreter (TRITON_INTERPRET=1)",
    ),
]
KINDS = {
    "Mamba 1": ("mamba", {}),
    "Mamba 1 with norms inside": ("mamba", {"inner_norms": "plain", "projection_bias": True}),
    "Mamba 2": ("mamba2", {}),
    "Mamba 2 with many groups": ("mamba2", {"num_groups": 8, "norm_groups": 4, "time_step_limits": (0.1, 0.8)}),
    "Mamba 2 with its norm before the gate": ("mamba2", {"norm": "before_gate", "conv_bias": False}),
    "Mamba 2 without a norm": ("mamba2", {"norm": "none", "part_scales": (0.5, 1.5, 0.7, 1.2, 0.9)}),
    "short convolutions": ("short_conv", {"inner_size": 48}),
    "wide short convolutions": ("short_conv", {"inner_size": 48, "conv_width": 6, "conv_bias": False}),
    "delta nets": ("delta_net", {}),
    "delta nets, each projection apart": ("delta_net", {"is_grouped": False, "max_beta": 2.0}),
    "delta nets without shared keys": (
        "delta_net",
        {"num_groups": 4, "state_size": 12, "head_size": 24, "inner_size": 96},
    ),
}
SLOTS = {0: 3, 1: 1, 2: 5, 3: 2}  # of sequences
NUM_SLOTS = 6
# Chunks of prompts of several lengths: some sequences are new, others go on.
PROMPTS = [
    {0: (0, [0] * 7), 1: (0, [0])},
    {1: (1, [0] * 2), 2: (0, [0] * 20), 0: (7, [0])},
    {0: (8, [0] * 2), 3: (0, [0] * 5)},
]
DECODES = [(2, 0, 3), (1,), (0, 1, 2, 3)]


@pytest.fixture(autouse=True)
def exact_products(monkeypatch):
    """Those of plain PyTorch on a GPU."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


class Layer:
    """A layer in two caches: by the kernels, and in plain PyTorch."""

    def __init__(self, kind, num_parts=1):
        name, changes = KINDS[kind]
        torch.manual_seed(1)
        model = tiny_hybrid(name, **changes)
        for parameter_name, parameter in model.named_parameters():
            if parameter.dim() == 1 or "A_log" in parameter_name:
                parameter.add_(torch.randn(parameter.shape) * 0.3)
        self.hidden_size, self.mixer = model.arch.hidden_size, model.model.layers[0].mixer.to(DEVICE)
        self.caches = [KVCache(model.arch, 2, 4, device=DEVICE, num_slots=NUM_SLOTS) for _ in range(2)]
        for state in (state for cache in self.caches for state in cache.states.layers[0]):
            state.fill_(torch.nan)  # of sequences that have left
        self.num_parts, self.used = num_parts, set()
        self.part = recurrent_part(self.mixer, self.caches[0].states.layers[0], self.product)

    def product(self, linear):
        """A layer whose outputs are parts of sums, as those of products of few rows may be."""
        shares = torch.arange(1.0, self.num_parts + 1, device=DEVICE) / sum(range(1, self.num_parts + 1))

        def multiply(x):
            y = linear(x)
            return y if self.num_parts == 1 else y * shares.view(-1, 1, 1)

        return multiply

    def compare(self, inputs, ours=None, *, are_alike=False):
        """Advance both; `ours` are the inputs of the kernels, which may have padding."""
        inputs, ours = inputs.to(DEVICE), inputs.to(DEVICE) if ours is None else ours
        x = torch.randn(len(ours.ids_T), self.hidden_size, device=DEVICE)
        x = x[:1].expand_as(x).contiguous() if are_alike else x
        num_tokens = len(inputs.ids_T)
        expected = self.mixer(x[:num_tokens], PagedRecurrence(self.caches[1].states, inputs))
        projections = self.product(first_projection(self.mixer))(x)
        y = self.mixer.out_proj(self.part(x, projections, sequences_of(ours)))
        torch.testing.assert_close(y[:num_tokens], expected, atol=1e-4, rtol=1e-4)
        slots = inputs.state_slots_S if inputs.state_ends_T is None else inputs.state_ends_T
        self.used |= {*slots.tolist()}
        for state, other in zip(*(cache.states.layers[0] for cache in self.caches), strict=True):
            for slot in range(1, NUM_SLOTS + 1):  # slot 0 is for padding
                if slot in self.used:
                    torch.testing.assert_close(state[slot], other[slot], atol=1e-4, rtol=1e-4)
                else:
                    assert state[slot].isnan().all()

    def copy(self, copies):
        for cache in self.caches:
            cache.states.copy(copies)
        self.used |= {target for _, target in copies}


def inputs_of(tokens, query_len=0):
    """A step of sequences: how many tokens each has in its state, and the ids that come next."""
    ids, starts = [new for _, new in tokens.values()], [0]
    for new in ids:
        starts.append(starts[-1] + len(new))
    positions = [torch.arange(first, first + len(new)) for first, new in tokens.values()]
    zeros = torch.zeros(starts[-1], dtype=torch.int64)
    return StepInputs(
        ids_T=zeros,
        positions_T=torch.cat(positions),
        slots_T=zeros,
        query_starts=torch.tensor(starts),
        context_lens_S=torch.tensor([first + len(new) for first, new in tokens.values()]),
        block_tables_SB=torch.zeros(len(tokens), 1, dtype=torch.int64),
        query_len=query_len,
        state_slots_S=torch.tensor([SLOTS[sequence] for sequence in tokens]),
    )


@pytest.mark.parametrize(("kind", "num_parts"), [*((kind, 1) for kind in KINDS), ("Mamba 1", 3), ("delta nets", 2)])
@torch.inference_mode()
def test_prompts_in_chunks_then_decode_steps_with_padding(kind, num_parts):
    layer = Layer(kind, num_parts)
    lengths = {}
    for tokens in PROMPTS:
        layer.compare(inputs_of(tokens))
        lengths |= {sequence: first + len(new) for sequence, (first, new) in tokens.items()}
    layer.copy([StateCopy(SLOTS[0], 6), StateCopy(SLOTS[1], SLOTS[3])])  # a snapshot, and a sequence that goes on
    buffers = InputBuffers(inductor.dummy_inputs(5, 1, 8, DEVICE, has_states=True))
    for sequences in DECODES:
        inputs = inputs_of({each: (lengths[each], [0]) for each in sequences}, query_len=1)
        buffers.fill(inputs)
        layer.compare(inputs, buffers.inputs)
        lengths |= {each: lengths[each] + 1 for each in sequences}


@pytest.mark.parametrize("kind", ["Mamba 1", "Mamba 2", "short convolutions", "delta nets"])
@torch.inference_mode()
def test_sequences_without_tokens_fill_up_a_captured_step_of_prompts(kind):
    layer = Layer(kind)
    for tokens in PROMPTS:
        inputs = inputs_of(tokens).to(DEVICE)
        more, total = 32 - len(inputs.ids_T), len(inputs.ids_T)
        padded = {
            name: torch.nn.functional.pad(getattr(inputs, name), (0, more))
            for name in ("ids_T", "positions_T", "slots_T")
        }
        starts = torch.nn.functional.pad(inputs.query_starts, (0, 4), value=total)
        slots = torch.nn.functional.pad(inputs.state_slots_S, (0, 4))
        layer.compare(inputs, replace(inputs, **padded, query_starts=starts, state_slots_S=slots))


@pytest.mark.parametrize("kind", ["Mamba 1", "Mamba 2", "short convolutions", "wide short convolutions", "delta nets"])
@torch.inference_mode()
def test_the_state_after_each_verified_token_is_kept(kind):
    layer = Layer(kind)
    layer.compare(inputs_of({0: (0, [0] * 7), 1: (0, [0])}))
    inputs = inputs_of({0: (7, [0] * 3), 1: (1, [0] * 3)}, query_len=3)
    inputs.state_ends_T = torch.tensor([SLOTS[0], 2, 4, SLOTS[1], 5, 6])
    layer.compare(inputs)


@pytest.mark.parametrize("kind", ["Mamba 1", "Mamba 2", "short convolutions", "delta nets"])
@torch.inference_mode()
def test_verified_tokens_in_a_captured_step_with_padding(kind):
    """A replay with fewer sequences than were captured; then one goes on from the slot of its last accepted token."""
    layer = Layer(kind)
    layer.compare(inputs_of({0: (0, [0] * 7), 1: (0, [0])}))
    buffers = InputBuffers(inductor.dummy_inputs(4, 2, 8, DEVICE, has_states=True))
    for first, slots in (({0: 7, 1: 1}, ([3, 4], [1, 5])), ({1: 3, 0: 8}, ([5, 1], [3, 4]))):
        inputs = inputs_of({each: (place, [0] * 2) for each, place in first.items()}, query_len=2)
        inputs.state_slots_S = torch.tensor([ends[0] for ends in slots])
        inputs.state_ends_T = torch.tensor(slots).flatten()
        buffers.fill(inputs)
        layer.compare(inputs, buffers.inputs)


@pytest.mark.parametrize("kind", ["Mamba 2", "delta nets"])
@torch.inference_mode()
def test_long_prompts(kind):
    layer = Layer(kind)
    layer.compare(inputs_of({0: (0, [0] * 70), 1: (0, [0] * 33)}))
    layer.compare(inputs_of({1: (33, [0] * 65), 0: (70, [0])}))


@torch.inference_mode()
def test_betas_and_time_steps_in_different_parts():
    layer = Layer("delta nets, each projection apart", num_parts=2)
    layer.part = replace(layer.part, times=layer.mixer.in_proj_a)
    layer.compare(inputs_of({0: (0, [0] * 5), 1: (0, [0])}))
    layer.compare(inputs_of({0: (5, [0]), 1: (1, [0])}, query_len=1))


@torch.inference_mode()
def test_keys_that_are_all_alike():
    layer = Layer("delta nets, each projection apart")
    layer.mixer.dt_bias.fill_(-9.0)  # the state stays
    layer.compare(inputs_of({0: (0, [0] * 70)}), are_alike=True)
