"""Times decode steps with sparse attention in the CPU kernels, beside full attention by the same kernels.

    python benchmarks/llm/sparse_decode.py [--contexts 2000 8000 16000 32000] [--layers 4] [--rounds 7]
        [--heads 32] [--indexer-heads 16] [--chosen 2048] [--plain]

One network of a middle size with random weights, and the same without its indexers. Numbers are ms of CPU time of one
thread for a step of one sequence, medians of rounds in which the subjects take turns. With --plain, plain PyTorch
computes the sparse steps, too. The result is a dated JSON file.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "serving")]

import machine  # noqa: E402
import results  # noqa: E402
import torch  # noqa: E402

from flambeau.llm.backends.cpu.bindings import kernels  # noqa: E402
from flambeau.llm.backends.cpu.network import CpuNetwork  # noqa: E402
from flambeau.llm.backends.eager import EagerBackend  # noqa: E402
from flambeau.llm.executor.inputs import StepInputs  # noqa: E402
from flambeau.llm.executor.kv_cache import KVCache  # noqa: E402
from flambeau.llm.models.architecture import Architecture  # noqa: E402
from flambeau.llm.models.families.indexer_shape import IndexerShape  # noqa: E402
from flambeau.llm.models.transformer import Transformer  # noqa: E402

BLOCK_SIZE = 16
PLAIN_ROUNDS = 3


def shape_of(args: argparse.Namespace) -> Architecture:
    """Latents, heads and indexers of the sizes of DeepSeek V3.2, of which there are fewer."""
    return Architecture(
        vocab_size=8192,
        hidden_size=2048,
        num_layers=args.layers,
        num_heads=args.heads,
        num_kv_heads=1,
        head_size=576,
        intermediate_size=6144,
        max_length=max(args.contexts) + 1,
        latent_size=512,
        rotary_size=64,
        unrotated_size=128,
        value_size=128,
        query_latent_size=768,
        attention_scale=192**-0.5,
        paired_rope=True,
        tied_embeddings=True,
        indexer=IndexerShape(num_heads=args.indexer_heads, head_size=128, num_chosen=args.chosen),
    )


def networks(args: argparse.Namespace) -> tuple[Transformer, Transformer]:
    """With indexers and without, with the same weights, which bfloat16 represents."""
    torch.manual_seed(0)
    arch = shape_of(args)
    sparse, full = (Transformer(one).eval().requires_grad_(False) for one in (arch, replace(arch, indexer=None)))
    for weight in sparse.parameters():
        weight.copy_(weight.bfloat16())
    full.load_state_dict(sparse.state_dict(), strict=False)
    return sparse, full


def one_token(context: int) -> StepInputs:
    """The step after so many tokens less one."""
    number, place = -(-context // BLOCK_SIZE), context - 1
    blocks = 1 + torch.randperm(number, generator=torch.Generator().manual_seed(0))
    return StepInputs(
        ids_T=torch.tensor([5]),
        positions_T=torch.tensor([place]),
        slots_T=blocks[place // BLOCK_SIZE, None] * BLOCK_SIZE + place % BLOCK_SIZE,
        query_starts=torch.tensor([0, 1]),
        context_lens_S=torch.tensor([context]),
        block_tables_SB=blocks[None].contiguous(),
        query_len=1,
    )


def cpu_ms(run: Callable[[StepInputs], Any], inputs: StepInputs) -> float:
    began = time.process_time()
    run(inputs)
    return 1e3 * (time.process_time() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--contexts", type=int, nargs="+", default=[2000, 8000, 16000, 32000])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--indexer-heads", type=int, default=16)
    parser.add_argument("--chosen", type=int, default=2048)
    parser.add_argument("--plain", action="store_true", help="plain PyTorch, too")
    parser.add_argument("--out", type=Path, default=results.REPOSITORY / "benchmarks" / "results")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if not kernels.load():
        sys.exit("there are no CPU kernels here")
    sparse, full = networks(args)
    caches = [
        KVCache(model.arch, 1 + -(-max(args.contexts) // BLOCK_SIZE), BLOCK_SIZE, dtype=torch.bfloat16)
        for model in (sparse, full)
    ]
    for cache in caches:
        for tensor in cache.tensors:
            tensor.normal_()
    subjects = {"sparse": CpuNetwork(sparse, caches[0]).run, "full": CpuNetwork(full, caches[1]).run}
    if args.plain:
        subjects["plain"] = EagerBackend(sparse, caches[0]).decode
    before, found = machine.Usage.now({}), []
    for context in args.contexts:
        inputs, times = one_token(context), {name: [] for name in subjects}
        for number in range(args.rounds + 1):  # the first one is not counted
            for name, run in subjects.items():
                if name != "plain" or number <= PLAIN_ROUNDS:
                    times[name].append(cpu_ms(run, inputs))
        row = {"context": context, **{name: round(statistics.median(each[1:]), 2) for name, each in times.items()}}
        row["full_to_sparse"] = round(row["full"] / row["sparse"], 2)
        found.append(row)
        print(row, flush=True)
    date = datetime.now(UTC)
    result = {
        "date": date.isoformat(timespec="seconds"),
        "command": " ".join(["python", "benchmarks/llm/sparse_decode.py", *sys.argv[1:]]),
        "machine": machine.describe(),
        "versions": results.versions(Path(sys.executable), Path("none")),
        "other_cores": machine.cores_between(before, machine.Usage.now({}))["other_cores"],
        "steps": found,
    }
    file = args.out / f"{date:%Y-%m-%d-%H%M}-llm-sparse-decode.json"
    file.write_text(json.dumps(result, indent=2) + "\n")
    print(file)


if __name__ == "__main__":
    main()
