"""The whole engine on a GPU says what it says on a CPU, in float32."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import flambeau.examples.storyteller
from flambeau.llm import Engine, SamplingParams
from flambeau.llm.checkpoints.checkpoint import load_model
from flambeau.llm.executor.executor import ModelExecutor
from flambeau.llm.executor.head import HeadProposer
from flambeau.llm.speculation.adaptive_k import AdaptiveK
from support.tiny_heads import published_eagle, tiny_head, twin_proposals

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("default"),  # the compiler's own
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MODEL = Path(flambeau.examples.storyteller.__file__).parent / "target"
DRAFT = MODEL.parent / "draft"
PROMPTS = ["Once upon a time", "The future of", "Dear Anna,\n\nthank", "The", "Reader:\nTell me"]


@pytest.fixture(scope="module")
def on_cpu():
    engine = Engine.from_pretrained(MODEL, device="cpu", num_blocks=512)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def head(on_cpu, tmp_path_factory):
    """An EAGLE-3 head with random weights, and its folder."""
    made, folder = (
        tiny_head("eagle3", load_model(MODEL, dtype=torch.float32), draft_vocab_size=256),
        tmp_path_factory.mktemp("head"),
    )
    arch = made.arch
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "num_hidden_layers": 1,
        "hidden_size": arch.hidden_size,
        "num_attention_heads": arch.num_heads,
        "num_key_value_heads": arch.num_kv_heads,
        "head_dim": arch.head_size,
        "intermediate_size": arch.intermediate_size,
        "vocab_size": arch.vocab_size,
        "rms_norm_eps": arch.norm_epsilon,
        "rope_theta": arch.rope_theta,
    }
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: value.contiguous() for name, value in published_eagle(made).items()}, folder / "model.safetensors")
    return made, folder


@pytest.fixture(scope="module", params=["plain", "draft", "lookup", "head"])
def on_gpu(request, head):
    ways = {
        "plain": {},
        "draft": {"draft": str(DRAFT), "speculate_k": 3},
        "lookup": {"speculate_k": 3},
        "head": {"draft": str(head[1]), "speculate_k": 3},
    }
    options = ways[request.param]
    if request.param == "lookup":
        options = {**options, "speculation": "lookup"}
    engine = Engine.from_pretrained(MODEL, device="cuda", dtype="float32", num_blocks=512, **options)
    for number in (1, len(PROMPTS)):  # eager steps that ask for graphs
        engine.generate(PROMPTS[:number], SamplingParams(temperature=0.0, max_tokens=12))
    engine.wait_until_compiled()
    yield engine
    engine.close()


LIST = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "minItems": 3,
}
SETTINGS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=48),
    "sampled": SamplingParams(temperature=0.8, top_k=50, top_p=0.9, seed=7, max_tokens=48),
    "large top-k": SamplingParams(temperature=0.8, top_k=200, seed=3, max_tokens=48),
    "unfiltered": SamplingParams(seed=4, max_tokens=32),
    "top-p": SamplingParams(top_p=0.7, seed=5, max_tokens=32),
    "penalties": SamplingParams(temperature=0.0, repetition_penalty=1.2, presence_penalty=0.3, max_tokens=32),
    "logprobs": SamplingParams(temperature=0.0, logprobs=2, max_tokens=16),
    "greedy grammar": SamplingParams(temperature=0.0, max_tokens=40, structured_outputs={"json": LIST}),
    "sampled grammar": SamplingParams(seed=6, max_tokens=60, structured_outputs={"json": LIST}),
    "filtered grammar": SamplingParams(
        temperature=0.8, top_k=50, top_p=0.9, seed=7, max_tokens=40, structured_outputs={"json": LIST}
    ),
    "short grammar": SamplingParams(seed=8, max_tokens=40, structured_outputs={"regex": "[a-d]{3,30}"}),
}


@pytest.mark.parametrize("settings", SETTINGS)
def test_tokens_are_those_of_a_cpu(on_cpu, on_gpu, settings):
    params = SETTINGS[settings]
    expected = [completion.token_ids for completion in on_cpu.generate(PROMPTS, params)]
    for _ in range(2):
        assert [completion.token_ids for completion in on_gpu.generate(PROMPTS, params)] == expected
    assert on_gpu.generate(PROMPTS[:1], params)[0].token_ids == expected[0]


def test_free_and_constrained_sequences_share_graphs_and_step_ahead(on_cpu, on_gpu, monkeypatch):
    """Those that end, and those that are cancelled, leave while the next step runs."""
    names = ["sampled", "sampled grammar", "short grammar", "greedy grammar", "unfiltered"]
    expected = {name: on_cpu.generate([PROMPTS[0]], SETTINGS[name])[0].token_ids for name in names}
    early, start_next = [], ModelExecutor.start_next

    def recorded(self, started, plan):
        found = start_next(self, started, plan)
        early.append(found is not None and found.needs_masks)
        return found

    monkeypatch.setattr(ModelExecutor, "start_next", recorded)
    assert on_gpu.tokenizer is not None
    prompt = [*on_gpu.tokenizer.encode(PROMPTS[0])]
    for name in [*names, "gone"]:
        on_gpu.add(name, prompt, SETTINGS.get(name, SETTINGS["sampled grammar"]))
    found = {name: [] for name in [*names, "gone"]}
    for step in range(300):
        for output in on_gpu.step():
            found[output.request_id] += output.token_ids
        if step == 8:
            on_gpu.cancel("gone")
    assert not on_gpu.has_work
    found.pop("gone")
    assert found == expected
    if on_gpu.info.speculation is None:
        assert sum(early) > 20


def test_a_head_gets_the_hidden_states_of_graphs(on_gpu, head, monkeypatch):
    """What it proposes is what its plain twin computes on a CPU."""
    if on_gpu.info.speculation != "eagle3":
        pytest.skip("it has no head")
    found, propose = [], HeadProposer.propose

    def recorded(self, sequences, limits, num_ahead):
        proposal = propose(self, sequences, limits, num_ahead)
        if proposal is not None:
            rows = zip(sequences, proposal.ids_SK.tolist(), proposal.lengths, strict=True)
            found.extend(([*sequence.tokens], ids[:length]) for sequence, ids, length in rows if length)
        return proposal

    monkeypatch.setattr(HeadProposer, "propose", recorded)
    monkeypatch.setattr(AdaptiveK, "num_ahead", lambda self, _: max(self._numbers))
    for _ in range(2):
        on_gpu.generate(PROMPTS, SETTINGS["greedy"])
    assert len(found) > 40
    target = load_model(MODEL, dtype=torch.float32)
    sample = random.Random(1).sample(found, 40)
    same = [proposed == twin_proposals(head[0], target, tokens, len(proposed)) for tokens, proposed in sample]
    assert sum(same) >= 38  # the first of almost equal logits may differ


def test_blocks_are_free_at_the_end(on_gpu):
    assert on_gpu.state.num_blocks_used == 0
