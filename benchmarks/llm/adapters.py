"""Measures what LoRA adapters cost in a decode step: eight sequences without one, with one, and with eight.

    python benchmarks/llm/adapters.py [--shapes 135m,1b] [--ranks 8,16] [--kinds lora,dora,head] [--rounds 60]

Networks have random weights and fewer layers than their models. The adapters change all projections (`lora`), scale
their outputs too (`dora`), or change the last layer and the embeddings too (`head`). The subjects take turns, and the
result is the median of the ratios of each turn. Times are those of the process on all cores, so that other load on the
machine counts little. The result is a dated JSON file. Takes about two minutes.
"""

import argparse
import itertools
import json
import statistics
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "serving"))

import machine  # noqa: E402
import results  # noqa: E402
import torch  # noqa: E402

from flambeau.llm.adapters.adapter_store import AdapterStore  # noqa: E402
from flambeau.llm.adapters.layer_changes import AdapterChanges, EmbeddingChange, LayerChange  # noqa: E402
from flambeau.llm.adapters.lora_weights import HEAD, AdapterTarget, EmbeddingLora, LoraPart  # noqa: E402
from flambeau.llm.backends.cpu.attention import choose_attention  # noqa: E402
from flambeau.llm.backends.cpu.backend import CpuBackend  # noqa: E402
from flambeau.llm.backends.eager import EagerBackend  # noqa: E402
from flambeau.llm.executor.backend import Backend  # noqa: E402
from flambeau.llm.executor.inputs import StepInputs  # noqa: E402
from flambeau.llm.executor.kv_cache import KVCache  # noqa: E402
from flambeau.llm.models.architecture import Architecture  # noqa: E402
from flambeau.llm.models.transformer import Transformer  # noqa: E402

NUM_SEQUENCES, CONTEXT, BLOCK_SIZE = 8, 64, 16
SHAPES: dict[str, dict[str, int]] = {  # of SmolLM 135M and Llama 3.2 1B, with fewer layers and a small vocabulary
    "135m": {
        "hidden_size": 576,
        "num_heads": 9,
        "num_kv_heads": 3,
        "head_size": 64,
        "intermediate_size": 1536,
        "num_layers": 10,
    },
    "1b": {
        "hidden_size": 2048,
        "num_heads": 32,
        "num_kv_heads": 8,
        "head_size": 64,
        "intermediate_size": 8192,
        "num_layers": 2,
    },
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="135m,1b", help="networks (default %(default)s)")
    parser.add_argument("--ranks", default="8,16", help="of the adapters (default %(default)s)")
    parser.add_argument("--kinds", default="lora,dora,head", help="of the adapters (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=60, help="steps of each subject (default %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of torch; more than one also wait for each other")
    parser.add_argument("--out", type=Path, default=results.REPOSITORY / "benchmarks" / "results")
    return parser.parse_args()


def make_network(shape: dict[str, int]) -> tuple[Transformer, KVCache]:
    torch.manual_seed(0)
    model = Transformer(Architecture(vocab_size=2000, max_length=CONTEXT, **shape)).eval().requires_grad_(False)
    cache = KVCache(model.arch, 1 + NUM_SEQUENCES * CONTEXT // BLOCK_SIZE, BLOCK_SIZE)
    for tensor in (*cache.keys, *cache.values):
        tensor.normal_()
    return model, cache


def make_store(model: Transformer, rank: int, kind: str) -> AdapterStore:
    """Random adapters, numbered from 1."""
    arch, cpu = model.arch, torch.device("cpu")
    target = AdapterTarget(arch=arch, local=arch, shard=None, device=cpu, dtype=torch.float32)
    store = AdapterStore(target, model)
    q, kv, inner, hidden = (
        arch.num_heads * arch.head_size,
        arch.num_kv_heads * arch.head_size,
        arch.intermediate_size,
        arch.hidden_size,
    )
    spans = {
        "self_attn.qkv_proj": (hidden, [(0, q), (q, kv), (q + kv, kv)]),
        "self_attn.o_proj": (q, [(0, hidden)]),
        "mlp.gate_up_proj": (hidden, [(0, inner), (inner, inner)]),
        "mlp.down_proj": (inner, [(0, hidden)]),
    }
    layers = {f"model.layers.{i}.{name}": found for i in range(arch.num_layers) for name, found in spans.items()}
    if kind == "head":
        layers[HEAD] = hidden, [(0, arch.vocab_size)]
    for number in range(1, NUM_SEQUENCES + 1):
        changes = {name: make_change(rank, size, found, kind) for name, (size, found) in layers.items()}
        lora = EmbeddingLora(torch.randn(arch.vocab_size, rank) * 0.01, torch.randn(rank, hidden) * 0.01)
        embedding = EmbeddingChange(lora=lora) if kind == "head" else None
        store.adapters[number] = AdapterChanges(layers=changes, embedding=embedding)
    return store


def make_change(rank: int, size: int, spans: list[tuple[int, int]], kind: str) -> LayerChange:
    parts = [LoraPart(start, torch.randn(rank, size) * 0.01, torch.randn(count, rank) * 0.01) for start, count in spans]
    return LayerChange(parts, torch.rand(sum(spans[-1])) + 0.5 if kind == "dora" else None)


def step_inputs(adapters: list[int] | None) -> StepInputs:
    """A decode step of sequences in the middle of their text."""
    num_blocks = CONTEXT // BLOCK_SIZE
    tables_SB = 1 + torch.arange(NUM_SEQUENCES * num_blocks).view(NUM_SEQUENCES, num_blocks)
    positions_T = torch.full((NUM_SEQUENCES,), CONTEXT - 1)
    return StepInputs(
        ids_T=torch.arange(NUM_SEQUENCES),
        positions_T=positions_T,
        slots_T=tables_SB[:, -1] * BLOCK_SIZE + BLOCK_SIZE - 1,
        query_starts=torch.arange(NUM_SEQUENCES + 1),
        context_lens_S=positions_T + 1,
        block_tables_SB=tables_SB,
        query_len=1,
        adapters_T=None if adapters is None else torch.tensor(adapters),
    )


def measure(backend: Backend, rounds: int) -> dict[str, float]:
    """The time of a step without adapters on all cores, and the others relative to it."""
    steps = {
        "none": step_inputs(None),
        "one adapter": step_inputs([1] * NUM_SEQUENCES),
        "eight adapters": step_inputs([*range(1, NUM_SEQUENCES + 1)]),
    }
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(rounds + 1):
        for name, inputs in steps.items():
            began = time.process_time()
            backend.decode(inputs)
            if i:  # the first round warms up
                taken[name].append(time.process_time() - began)
    found = {"none_cpu_ms": round(1000 * statistics.median(taken["none"]), 3)}
    for name in ("one adapter", "eight adapters"):
        ratios = [with_it / without for with_it, without in zip(taken[name], taken["none"], strict=True)]
        found[f"{name}, ratio"] = round(statistics.median(ratios), 3)
    return found


def main() -> None:
    asked, began = arguments(), time.monotonic()
    torch.set_num_threads(asked.threads)
    before = machine.Usage.now({})
    figures: dict[str, dict[str, float]] = {}
    for shape in asked.shapes.split(","):
        model, cache = make_network(SHAPES[shape])
        for rank, kind in itertools.product(map(int, asked.ranks.split(",")), asked.kinds.split(",")):
            store = make_store(model, rank, kind)
            fast = CpuBackend(model, cache, adapters=store)
            fast.wait_until_compiled()
            plain = EagerBackend(model, cache, choose_attention, adapters=store)
            for path, backend in ((fast.decode_path, fast), (plain.decode_path, plain)):
                name = f"{shape}, {kind}, rank {rank}, {path}"
                figures[name] = measure(backend, asked.rounds)
                print(f"{name:40} {figures[name]}", file=sys.stderr)
            fast.close()
    noise = machine.cores_between(before, machine.Usage.now({}))
    date = datetime.now(UTC)
    result: dict[str, Any] = {
        "date": date.isoformat(timespec="seconds"),
        "command": " ".join(["python", "benchmarks/llm/adapters.py", *sys.argv[1:]]),
        "duration_s": round(time.monotonic() - began),
        "machine": machine.describe(),
        "versions": results.versions(Path(sys.executable), Path("none")),
        "threads": asked.threads,
        "shapes": SHAPES,
        "sequences": NUM_SEQUENCES,
        "other_cores": noise["other_cores"],
        "noisy": noise["noisy"],
        "figures": figures,
    }
    asked.out.mkdir(parents=True, exist_ok=True)
    file = asked.out / f"{date:%Y-%m-%d-%H%M}-llm-adapters.json"
    file.write_text(json.dumps(result, indent=2) + "\n")
    print(file)


if __name__ == "__main__":
    main()
