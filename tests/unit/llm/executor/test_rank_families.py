"""Families whose parts depend on all ranks: two and four ranks find what transformers finds.

All checkpoints of a number of ranks are computed by one group of processes: starting them takes longest.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from flambeau.llm.backends.eager import WholeAttention
from flambeau.llm.checkpoints.checkpoint import load_model
from flambeau.llm.checkpoints.quantized import save_quantized
from flambeau.llm.models.transformer import Transformer
from flambeau.llm.quantize.row_scaled import Int8Linear
from flambeau.testing.server import free_ports
from support.adapters import read_peft_adapter, write_peft_adapter
from support.checkpoints import COMPRESSED_KINDS, HYBRID_KINDS, SPARSE_KINDS, reference, write_checkpoint
from support.ranks import logits_in_threads, run_ranks
from support.tokenizer_files import write_sentencepiece

pytestmark = pytest.mark.timeout(900)
TOLERANCE = {"atol": 1e-4, "rtol": 0.0}
VOCAB_SIZE = 400  # the tokenizer's
CHUNKS = (5, 1, 14, 11)  # of a prompt
NUM_GREEDY = 8  # each step of each rank waits for sums, which take most of the time
NUM_LONG = 30  # on two ranks
LONG = ("olmo-2", "gemma-4", "qwen-3.5", "kimi-linear", "deepseek-v3.2", "deepseek-v4", "falcon-h1-norm")

# Rank 0 writes what it finds beside each checkpoint.
PROGRAM = """
import json, os, sys
from pathlib import Path

import torch

from flambeau.llm.core import state_slots
from flambeau.llm.loader import load_engine, load_follower
from flambeau.llm.sampling_params import SamplingParams
from support.llm_steps import step_inputs

torch.set_num_threads(1)
state_slots.MIN_SPARED_TOKENS = 8
base, size, given = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
settings = {"block_size": 4, "num_blocks": 120, "max_num_seqs": 4, "max_step_tokens": 24}


def generate(engine, prompts, number, **options):
    greedy = SamplingParams(temperature=0.0, max_tokens=number, ignore_eos=True)
    return engine.generate(prompts, greedy, **options)


def all_found(engine, adapters, num_greedy):
    ids, done, logits = given["prompts"][0], 0, []
    has_states = engine._executor._state_cache is not None and engine._executor._state_cache.has_layers
    for length in given["chunks"]:
        inputs = step_inputs({0: (done, ids[done : done + length])}, has_states=has_states)
        logits.append(engine._backend.prefill(inputs, torch.arange(length)))
        done += length
    batch = [one.token_ids for one in generate(engine, given["prompts"], 4)]
    [first] = generate(engine, [given["turn"]], num_greedy)
    turn = [*given["turn"], *first.token_ids, *given["prompts"][1]]
    [second] = generate(engine, [turn], 4)
    return {
        "logits": torch.cat(logits),
        "batch": batch,
        "first": first.token_ids,
        "second": second.token_ids,
        "num_cached": second.counts.num_cached,
        "layers": sorted({type(module).__name__ for module in engine._backend.model.modules()}),
        "adapted": [generate(engine, [given["turn"]], 8, adapter=name)[0].token_ids for name in adapters],
    }


for port, (name, changes, label) in zip(given["ports"], given["runs"], strict=True):
    os.environ["MASTER_PORT"] = str(port)  # ranks that meet again where they have met hang
    folder, options = base / name, {"tensor_parallel_size": size, "compile": False, "device": "cpu", **settings}
    options |= changes
    if os.environ["RANK"] != "0":
        load_follower(folder, **options)()
        continue
    engine = load_engine(folder, **options)
    found = all_found(engine, options.get("lora_adapters", ()), given["num_greedy"][name])
    torch.save(found, folder / f"found-{label}.pt")
    engine.close()
"""


def some_ids(length: int, seed: int) -> list[int]:
    return torch.randint(VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


PROMPTS = [some_ids(length, seed) for seed, length in enumerate((sum(CHUNKS), 3, 40))]
TURN = some_ids(38, 9)

TWO: dict[str, dict[str, Any]] = {  # how a network differs from the tiny one of its kind
    "bloom": {},
    "bloom-6-heads": {},
    "mpt": {},
    "falcon-alibi": {},
    "baichuan": {},
    "olmo-2": {},
    "olmo-3": {},
    "olmoe": {},
    "minimax-m2": {},
    "gemma-4": {"vocab_size_per_layer_input": VOCAB_SIZE},
    "gemma-4-moe": {},
    "bitnet": {},
    "laguna": {},
    "mimo-v2": {},
    "longcat": {},
    "dots-3-plain": {},
    "apertus": {},
    "dbrx": {},
    "ax-k1": {},
    "kolibri": {},
    "neox-japanese": {},
    **{kind: {} for kind in (*HYBRID_KINDS, *SPARSE_KINDS, *COMPRESSED_KINDS)},
}
ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2}  # each key-value head on two ranks
FOUR: dict[str, dict[str, Any]] = {
    "olmo-2": {},  # two key-value heads
    "minimax-m2": {"num_key_value_heads": 1},
    # Two groups of heads, or key heads, each on two ranks.
    "lfm-2": ATTENTION,
    "qwen-3-next": {**ATTENTION, "linear_num_value_heads": 8},
    "nemotron-h-moe": ATTENTION,
    "ling-3": {**ATTENTION, "num_key_value_heads": 4},
    "minimax-01": ATTENTION,
    "falcon-h1-norm": ATTENTION,
}
ROUNDED = ("olmo-2", "gemma-4", "mamba-2-biased", "lfm-2", "qwen-3.5")
ADAPTED: dict[str, dict[str, Any]] = {
    "olmo-2": {"target_modules": ["q_proj", "k_proj", "o_proj"], "modules_to_save": ["q_norm", "k_norm"]},
    "gemma-4": {"target_modules": ["q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"]},
    "lfm-2": {"target_modules": ["q_proj", "v_proj", "w1", "w2"]},
    "lfm-3": {"target_modules": ["q_proj", "o_proj", "w1", "w2"]},
    "qwen-3.5": {"target_modules": ["q_proj", "o_proj", "gate_proj", "down_proj"]},
    "falcon-h1": {"target_modules": ["k_proj", "o_proj", "up_proj", "down_proj"]},
}
WRITTEN = (
    "olmo-2",
    "gemma-4",
    "mamba-2-biased",
    "mamba",
    "lfm-2-biased",
    "lfm-3",
    "qwen-3-next",
    "qwen-3.5",
    "olmo-hybrid",
    "nemotron-h-moe",
    "bamba",
    "kimi-linear",
    "minimax-01",
    "deepseek-v3.2",
    "dots-3",
    "deepseek-v4",
)  # in int8


def num_greedy(kind: str, size: int) -> int:
    return NUM_LONG if kind in LONG and size == 2 else NUM_GREEDY


def write_baichuan(folder: Path) -> None:
    """A checkpoint of Baichuan's form, which transformers does not know; above 7B it has ALiBi."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith(".q_proj.weight")]:
        parts = [tensors.pop(name.replace(".q_proj.", f".{part}_proj.")) for part in "qkv"]
        tensors[name.replace(".q_proj.", ".W_pack.")] = torch.cat(parts)
    save_file(tensors, file)
    config = json.loads((folder / "config.json").read_text())
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    own = {"architectures": ["BaichuanForCausalLM"], "model_type": "baichuan", "model_max_length": 128}
    (folder / "config.json").write_text(json.dumps({**own, **{key: config[key] for key in kept}}))


class Families:
    """Checkpoints, what transformers finds for them, and what ranks found."""

    def __init__(
        self,
        base: Path,
        size: int,
        kinds: dict[str, dict[str, Any]],
        rounded: tuple[str, ...] = (),
    ) -> None:
        self._base, self._size = base, size
        self._networks: dict[str, Any] = {}
        for kind, changes in kinds.items():
            self._networks[kind] = self._write(kind, changes)
        runs: list[tuple[str, dict[str, Any], str]]
        runs = [(kind, {"lora_adapters": self._adapters(kind)}, "whole") for kind in kinds]
        runs += [(kind, {"quantization": "int8"}, "int8") for kind in rounded]
        runs += [(kind, {"dtype": "bfloat16"}, "bfloat16") for kind in rounded]
        given = {
            "prompts": PROMPTS,
            "turn": TURN,
            "chunks": CHUNKS,
            "num_greedy": {kind: num_greedy(kind, size) for kind in kinds},
        }
        run_ranks(base, size, PROGRAM, {**given, "runs": runs, "ports": free_ports(len(runs))}, timeout_s=700)

    def _write(self, kind: str, changes: dict[str, Any]) -> Any:
        folder = self._base / kind
        known = "llama-2" if kind == "baichuan" else kind
        network = reference(known, vocab_size=VOCAB_SIZE, **changes)
        network.save_pretrained(folder)
        write_sentencepiece(folder)
        if kind == "baichuan":
            write_baichuan(folder)
            return load_model(folder)
        return network

    def _adapters(self, kind: str) -> dict[str, str]:
        """An adapter of some kinds of networks; one has norms of its own."""
        if self._size != 2 or kind not in ADAPTED:
            return {}
        return {"one": str(write_peft_adapter(self._base / kind, self._base / f"{kind}-adapter", **ADAPTED[kind]))}

    def check_adapted(self, kind: str) -> None:
        adapted = read_peft_adapter(self._base / kind, self._base / f"{kind}-adapter")
        [tokens] = self.found(kind)["adapted"]
        with torch.inference_mode():
            logits = adapted(torch.tensor([[*TURN, *tokens]])).logits[0]
        assert logits[len(TURN) - 1 : -1].argmax(-1).tolist() == tokens
        assert tokens != self.found(kind)["first"][: len(tokens)]

    def found(self, kind: str, label: str = "whole") -> dict[str, Any]:
        return torch.load(self._base / kind / f"found-{label}.pt")

    def logits(self, kind: str, ids: list[int]) -> Tensor:
        network = self._networks[kind]
        with torch.inference_mode():
            if isinstance(network, Transformer):
                return network.logits(network(torch.tensor(ids), torch.arange(len(ids)), WholeAttention()))
            return network(torch.tensor([ids])).logits[0].float()

    def check_greedy(self, kind: str, prompt: list[int], tokens: list[int]) -> None:
        """Each token is the likeliest after those before it."""
        logits = self.logits(kind, [*prompt, *tokens])
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == tokens

    def check(self, kind: str) -> None:
        found = self.found(kind)
        torch.testing.assert_close(found["logits"], self.logits(kind, PROMPTS[0]), **TOLERANCE)
        assert len(found["first"]) == num_greedy(kind, self._size)
        self.check_greedy(kind, TURN, found["first"])
        for prompt, tokens in zip(PROMPTS, found["batch"], strict=True):
            self.check_greedy(kind, prompt, tokens)
        self.check_greedy(kind, [*TURN, *found["first"], *PROMPTS[1]], found["second"])
        assert found["num_cached"] >= len(TURN) // 2


@pytest.fixture(scope="module")
def two(tmp_path_factory) -> Families:
    return Families(tmp_path_factory.mktemp("two"), 2, TWO, ROUNDED)


@pytest.fixture(scope="module")
def four(tmp_path_factory) -> Families:
    return Families(tmp_path_factory.mktemp("four"), 4, FOUR)


@pytest.mark.parametrize("kind", TWO)
def test_two_ranks_find_what_transformers_finds(two, kind):
    two.check(kind)


@pytest.mark.parametrize("kind", FOUR)
def test_four_ranks_find_what_transformers_finds(four, kind):
    four.check(kind)


@pytest.mark.parametrize("label", ["int8", "bfloat16"])
@pytest.mark.parametrize("kind", ROUNDED)
def test_two_ranks_with_rounded_weights_are_close(two, kind, label):
    found, expected = two.found(kind, label), two.logits(kind, PROMPTS[0])
    assert label != "int8" or any(layer.endswith("Int8Linear") for layer in found["layers"])
    assert (found["logits"] - expected).norm() < 0.1 * expected.norm()


@pytest.mark.parametrize("kind", ADAPTED)
def test_two_ranks_share_adapters(two, kind):
    two.check_adapted(kind)


@pytest.mark.parametrize("kind", WRITTEN)
def test_ranks_find_what_one_finds_with_quantized_files(kind, tmp_path, monkeypatch):
    write_checkpoint(tmp_path / "original", kind)
    save_quantized(tmp_path / "original", tmp_path / "int8", kind="int8")
    network, ids = load_model(tmp_path / "int8", dtype=torch.float32), [one % 101 for one in PROMPTS[0]]
    assert any(isinstance(module, Int8Linear) for module in network.modules())
    with torch.inference_mode():
        expected = network.logits(network(torch.tensor(ids), torch.arange(len(ids)), WholeAttention()))
    for found in logits_in_threads(tmp_path / "int8", 2, ids, monkeypatch):
        torch.testing.assert_close(found, expected, **TOLERANCE)


PRESSURE = """
import json, os, random, sys
from pathlib import Path

import torch

from flambeau.llm.core import state_slots
from flambeau.llm.loader import load_engine, load_follower
from flambeau.llm.sampling_params import SamplingParams

torch.set_num_threads(1)
state_slots.MIN_SPARED_TOKENS = 8
folder, size, options = Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
options["tensor_parallel_size"] = size
if os.environ["RANK"] != "0":
    load_follower(folder, **options)()
else:
    engine, rng, texts = load_engine(folder, **options), random.Random(5), [[*range(1, 31)], [*range(50, 90)]]
    greedy = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    found, num_cached = [], 0
    for _ in range(8):
        prompts = []
        for _ in range(rng.choice([1, 4])):
            text = rng.choice(texts)
            prompts.append([*text[: rng.randrange(1, len(text) + 1)], *(rng.randrange(400) for _ in range(5))][:80])
        completions = engine.generate(prompts, greedy)
        found += [[prompt, one.token_ids] for prompt, one in zip(prompts, completions)]
        num_cached += sum(one.counts.num_cached for one in completions)
        texts += prompts
    print(json.dumps([found, num_cached, engine.state.num_preempted]))
    engine.close()
"""


def test_states_that_come_and_go_are_those_of_their_sequences_on_all_ranks(tmp_path):
    network = reference("falcon-h1-norm", vocab_size=VOCAB_SIZE)
    network.save_pretrained(tmp_path)
    write_sentencepiece(tmp_path)
    options = {"compile": False, "device": "cpu", "block_size": 4, "num_blocks": 40, "max_num_seqs": 6}
    [line] = run_ranks(tmp_path, 2, PRESSURE, options)
    found, num_cached, num_preempted = line
    for prompt, tokens in found:
        with torch.inference_mode():
            logits = network(torch.tensor([[*prompt, *tokens]])).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == tokens
    assert num_cached > 0
    assert num_preempted > 0
