"""A checkpoint with recurrent layers, as the server loads it: with kernels, quantized, compiled, adapted."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flambeau.llm.backends import inductor
from flambeau.llm.backends.cpu.backend import CpuBackend
from flambeau.llm.backends.eager import EagerBackend
from flambeau.llm.checkpoints.quantized import save_quantized
from flambeau.llm.errors import CheckpointError, LLMError
from flambeau.llm.executor.kv_cache import KVCache
from flambeau.llm.loader import load_engine
from flambeau.llm.sampling_params import SamplingParams
from flambeau.llm.speculation.adaptive_k import AdaptiveK
from support.adapters import layer_shapes, merge, write_adapter
from support.checkpoints import reference
from support.cpu_kernels import need_cpu_kernels
from support.llm_steps import BLOCK_SIZE, BLOCKS_EACH, keep_graphs, step_inputs
from support.tiny_models import tiny_hybrid, tiny_model
from support.tokenizer_files import write_sentencepiece

pytestmark = pytest.mark.timeout(900)  # a compiler may run, on a busy machine
VOCAB_SIZE = 420
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
PROMPTS = ["To be, or not to be", "Or to take arms against a sea of troubles", "And"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("lfm-2")
    reference("lfm-2", vocab_size=VOCAB_SIZE).save_pretrained(folder)
    write_sentencepiece(folder)
    return folder


def greedy_tokens(network, ids: list[int]) -> list[int]:
    """What transformers finds."""
    ids = [*ids]
    with torch.inference_mode():
        for _ in range(10):
            ids.append(int(network(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[-10:]


def test_a_loaded_engine_says_what_transformers_says(folder):
    engine = load_engine(folder, device="cpu", max_num_seqs=4)
    network = reference("lfm-2", vocab_size=VOCAB_SIZE)
    found = [completion.token_ids for completion in engine.generate(PROMPTS, GREEDY)]
    assert found == [greedy_tokens(network, engine.tokenizer.encode(prompt)) for prompt in PROMPTS]
    engine.close()


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_quantized_engine_gives_a_batch_what_it_gives_each_alone(folder, kind):
    engine = load_engine(folder, device="cpu", quantization=kind, max_num_seqs=4)
    together = [completion.token_ids for completion in engine.generate(PROMPTS, GREEDY)]
    assert together == [engine.generate([prompt], GREEDY)[0].token_ids for prompt in PROMPTS]
    engine.close()


@pytest.mark.parametrize("compiles", [False, True])
def test_adapters_of_attention_and_feed_forward_layers_work_and_others_are_refused(folder, tmp_path, compiles):
    shapes = layer_shapes(folder, ("q_proj", "v_proj", "w1", "w2"))
    adapter = write_adapter(tmp_path / "good", shapes)
    recurrent = write_adapter(tmp_path / "bad", layer_shapes(folder, ("in_proj",)))
    adapters = {"good": str(adapter)}
    engine = load_engine(folder, device="cpu", max_num_seqs=4, lora_adapters=adapters, compile=compiles)
    engine._backend.wait_until_compiled(timeout_s=250)
    network = merge(reference("lfm-2", vocab_size=VOCAB_SIZE), adapter)
    found = engine.generate(PROMPTS[:1], GREEDY, adapter="good")[0].token_ids
    assert found == greedy_tokens(network, engine.tokenizer.encode(PROMPTS[0]))
    assert found != engine.generate(PROMPTS[:1], GREEDY)[0].token_ids
    with pytest.raises(CheckpointError, match=r"changes what cannot be changed here: .*conv\.in_proj"):
        engine.load_adapter("bad", recurrent)


@pytest.mark.parametrize("compiles", [False, True])
def test_a_draft_with_recurrent_layers(folder, monkeypatch, compiles):
    """The network as its own draft: whatever it proposes is accepted."""
    monkeypatch.setattr(AdaptiveK, "num_ahead", lambda self, _: max(self._numbers))
    options = {"device": "cpu", "max_num_seqs": 4, "compile": compiles}
    plain, engine = load_engine(folder, **options), load_engine(folder, draft=str(folder), **options)
    for each in (plain, engine):
        each.wait_until_compiled()
    expected = [completion.token_ids for completion in plain.generate(PROMPTS, GREEDY)]
    found = engine.generate(PROMPTS, GREEDY)
    assert [completion.token_ids for completion in found] == expected
    assert sum(each.counts.num_drafted for each in found) > 0
    assert [each.counts.num_accepted for each in found] == [each.counts.num_drafted for each in found]
    plain.close()
    engine.close()


def test_quantized_experts_of_a_narrow_size_are_left_to_pytorch(tmp_path):
    """The outputs of such experts do not fill the panels of the CPU kernels, whatever the hidden size is."""
    reference("nemotron-h-latent", vocab_size=VOCAB_SIZE, hidden_size=64, moe_latent_size=40).save_pretrained(
        tmp_path / "original"
    )
    save_quantized(tmp_path / "original", tmp_path / "fp8", kind="fp8")
    write_sentencepiece(tmp_path / "fp8")
    found = []
    for compiles in (False, True):
        engine = load_engine(tmp_path / "fp8", device="cpu", compile=compiles, max_num_seqs=4)
        found.append([completion.token_ids for completion in engine.generate(PROMPTS, GREEDY)])
        engine.close()
    assert found[0] == found[1]


def test_a_draft_with_recurrent_layers_is_refused_for_a_network_of_transformers(folder):
    with pytest.raises(LLMError, match="has recurrent layers, and this model runs through transformers"):
        load_engine(folder, device="cpu", draft=str(folder), model_impl="transformers")


def test_prefixes_cannot_be_kept(folder):
    with pytest.raises(LLMError, match="not the states of recurrent layers"):
        load_engine(folder, device="cpu", kv_host_memory_mb=64)


@pytest.mark.filterwarnings("default")  # the compiler's own
@pytest.mark.parametrize(
    ("kind", "path"),
    [
        pytest.param("delta_net", "Inductor", marks=pytest.mark.slow),
        *((kind, "CPU kernels") for kind in ("mamba", "mamba2", "short_conv", "delta_net")),
    ],
)
def test_steps_of_a_faster_path_leave_the_same_states(monkeypatch, kind, path):
    monkeypatch.setattr(inductor, "CPU_OPTIONS", {})  # half the time to compile
    model = tiny_hybrid(kind)
    if path == "Inductor":
        # A part of which the kernels know nothing; one layer of each kind, as a compiler takes its time.
        recurrence = replace(model.arch.recurrence, layers=frozenset({0}))
        model = tiny_model(replace(model.arch, value_scale=0.5, num_layers=2, recurrence=recurrence))
    else:
        need_cpu_kernels()
    caches = [KVCache(model.arch, 1 + 3 * BLOCKS_EACH, BLOCK_SIZE, num_slots=3, num_spare=6) for _ in range(2)]
    plain = EagerBackend(copy.deepcopy(model), caches[0])
    compiled = CpuBackend(model, caches[1], steps_before_compiling=0)
    prompt = with_slots(step_inputs({0: (0, [1, 2, 3]), 1: (0, [4, 5]), 2: (0, [6])}))
    steps = [with_slots(step_inputs({i: (3 - i + n, [7 * n + i]) for i in range(3)}, query_len=1)) for n in range(5)]
    for backend in (plain, compiled):
        backend.prefill(prompt, torch.tensor([0]))
    found = [compiled.decode(step) for step in steps[:1]]
    assert compiled.wait_until_compiled(timeout_s=800)
    found += [compiled.decode(step) for step in steps[1:]]
    keep_graphs(monkeypatch)  # of the next steps: Inductor would take half a minute more
    # Then proposed tokens, of which 2, 1 and none are accepted.
    for starts, slots in (
        ([8, 7, 6], [[3, 4, 5], [1, 6, 7], [2, 8, 9]]),
        ([11, 9, 7], [[5, 3, 4], [6, 7, 1], [2, 8, 9]]),
    ):
        steps.append(step_inputs({i: (start, [i, 50 + i, 70 + i]) for i, start in enumerate(starts)}, query_len=3))
        steps[-1].state_slots_S = torch.tensor([each[0] for each in slots])
        steps[-1].state_ends_T = torch.tensor(slots).flatten()
        found.append(compiled.decode(steps[-1]))
        assert compiled.wait_until_compiled(timeout_s=800)
    assert compiled.decode_path == path
    for logits, step in zip(found, steps, strict=True):
        torch.testing.assert_close(logits, plain.decode(step), atol=1e-4, rtol=1e-4)
    for one, other in zip(*(cache.states.layers.values() for cache in caches), strict=True):
        torch.testing.assert_close([state[1:] for state in one], [state[1:] for state in other], atol=1e-4, rtol=1e-4)
    compiled.close()


def with_slots(inputs):
    inputs.state_slots_S = torch.tensor([3, 1, 2])
    return inputs
