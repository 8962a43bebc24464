"""Measures one decode step: operation by operation, compiled, by the CPU kernels, and transformers beside.

    python benchmarks/llm/step.py [--batches 1,8,32] [--seconds 3] [--inductor]

The network has the shape of the shipped model and random weights that bfloat16 holds exactly, as the shipped ones. The
subjects take turns, a few steps each, so that a busy moment of the machine meets them all; beside the time on the clock
there is the time of the processors, which neighbors on the machine change least. The result is a dated JSON file.
Takes about a minute, with --inductor a few more.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "serving"))

import machine  # noqa: E402
import results  # noqa: E402
import torch  # noqa: E402
from torchvision_stand_in import stand_in_for_torchvision  # noqa: E402

from flambeau.llm.backends import inductor  # noqa: E402
from flambeau.llm.backends.cpu.attention import choose_attention  # noqa: E402
from flambeau.llm.backends.cpu.backend import CpuBackend  # noqa: E402
from flambeau.llm.backends.cpu.bindings import kernels  # noqa: E402
from flambeau.llm.backends.cpu.network import CpuNetwork  # noqa: E402
from flambeau.llm.backends.eager import EagerBackend  # noqa: E402
from flambeau.llm.executor.inputs import StepInputs  # noqa: E402
from flambeau.llm.executor.kv_cache import KVCache  # noqa: E402
from flambeau.llm.models.architecture import Architecture  # noqa: E402
from flambeau.llm.models.transformer import Transformer  # noqa: E402

SHAPE = {
    "vocab_size": 1536,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
}
CONTEXT, BLOCK_SIZE, STEPS_OF_A_TURN = 128, 16, 10
Step = Callable[[], object]
Times = list[tuple[float, float]]  # of the clock, of the processors; milliseconds


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", default="1,8,32", help="numbers of sequences (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=3, help="for each number of sequences (default %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="of torch (default %(default)s)")
    parser.add_argument("--inductor", action="store_true", help="also what torch.compile makes of the step")
    parser.add_argument("--out", type=Path, default=results.REPOSITORY / "benchmarks" / "results")
    return parser.parse_args()


def make_network() -> tuple[Transformer, KVCache]:
    """A random network of the shipped model's shape, and a cache with something in it."""
    arch = Architecture(
        vocab_size=SHAPE["vocab_size"],
        hidden_size=SHAPE["hidden_size"],
        num_layers=SHAPE["num_hidden_layers"],
        num_heads=SHAPE["num_attention_heads"],
        num_kv_heads=SHAPE["num_key_value_heads"],
        head_size=SHAPE["hidden_size"] // SHAPE["num_attention_heads"],
        intermediate_size=SHAPE["intermediate_size"],
        tied_embeddings=True,
    )
    torch.manual_seed(0)
    model = Transformer(arch).eval().requires_grad_(False)
    for weight in model.parameters():
        weight.copy_(weight.bfloat16())
    cache = KVCache(arch, 1 + 64 * CONTEXT // BLOCK_SIZE, BLOCK_SIZE)
    for tensor in (*cache.keys, *cache.values):
        tensor.normal_()
    return model, cache


def step_inputs(num_sequences: int) -> StepInputs:
    """A decode step of sequences in the middle of their text."""
    num_blocks = CONTEXT // BLOCK_SIZE
    tables_SB = 1 + torch.arange(num_sequences * num_blocks).view(num_sequences, num_blocks)
    positions_T = torch.full((num_sequences,), CONTEXT - 1)
    return StepInputs(
        ids_T=torch.randint(SHAPE["vocab_size"], (num_sequences,)),
        positions_T=positions_T,
        slots_T=tables_SB[:, -1] * BLOCK_SIZE + BLOCK_SIZE - 1,
        query_starts=torch.arange(num_sequences + 1),
        context_lens_S=positions_T + 1,
        block_tables_SB=tables_SB,
        query_len=1,
    )


def transformers_step(num_sequences: int) -> Callable[[], tuple[float, float]]:
    """One token of `transformers.generate` with its cache: greedy, over as many sequences of the same length."""
    stand_in_for_torchvision()
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(**SHAPE, max_position_embeddings=2048)).eval()
    ids = torch.randint(SHAPE["vocab_size"], (num_sequences, CONTEXT - STEPS_OF_A_TURN))
    long, short = 2 * STEPS_OF_A_TURN + 1, 1

    def generate(num_tokens: int) -> tuple[float, float]:
        options = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens, "do_sample": False, "pad_token_id": 0}
        return timed(lambda: model.generate(ids, **options))

    def per_token() -> tuple[float, float]:  # the prompt's own time is in both, and cancels
        (wall, cpu), (wall_short, cpu_short) = generate(long), generate(short)
        return (wall - wall_short) / (long - short), (cpu - cpu_short) / (long - short)

    return per_token


def timed(step: Step) -> tuple[float, float]:
    """Milliseconds of the clock and of this process's threads together."""
    began, used = time.perf_counter(), time.process_time()
    step()
    return 1000 * (time.perf_counter() - began), 1000 * (time.process_time() - used)


def subjects(model: Transformer, cache: KVCache, num_sequences: int, with_inductor: bool) -> dict[str, Step]:
    """What is measured, each ready to run."""
    inputs = step_inputs(num_sequences)
    eager = EagerBackend(model, cache, choose_attention)
    library = kernels.library
    network = CpuNetwork(model, cache)

    def plain() -> object:
        kernels.library = None
        try:
            return eager.decode(inputs)
        finally:
            kernels.library = library

    found: dict[str, Step] = {
        "eager": plain,
        "eager, kernel's attention": lambda: eager.decode(inputs),
        "kernels": lambda: network.run(inputs),
    }
    if with_inductor:
        example = inductor.dummy_inputs(num_sequences, 1, 2, torch.device("cpu"))
        step = inductor.compile_step(model, cache, 1, choose_attention, example)
        found["inductor"] = lambda: step(inputs)
    return found


@torch.inference_mode()
def measure(found: dict[str, Step], reference: Callable[[], tuple[float, float]], seconds: float) -> dict[str, Times]:
    """The times of every step; subjects take turns."""
    taken: dict[str, Times] = {name: [] for name in (*found, "transformers")}
    for step in found.values():
        step()
    reference()
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline or len(taken["transformers"]) < 5:
        for name, step in found.items():
            taken[name] += [timed(step) for _ in range(STEPS_OF_A_TURN)]
        taken["transformers"].append(reference())
    return taken


def summary(taken: Times) -> dict[str, float]:
    """Medians."""
    wall, cpu = zip(*taken, strict=True)
    return {
        "median_ms": round(statistics.median(wall), 3),
        "cpu_ms": round(statistics.median(cpu), 3),
        "steps": len(taken),
    }


def time_to_compiled(model: Transformer, cache: KVCache) -> float:
    """Seconds until a new backend has its fast path, with the caches that the machine has."""
    began = time.monotonic()
    backend = CpuBackend(model, cache)
    backend.wait_until_compiled()
    backend.close()
    return round(time.monotonic() - began, 2)


def ratios(figures: dict[str, dict[str, dict[str, float]]], measure_of: str) -> dict[str, float]:
    """What is promised, from the figures of every batch."""
    first = figures[min(figures, key=int)]
    last = figures[max(figures, key=int)]
    return {
        "transformers / kernels, one sequence": round(
            first["transformers"][measure_of] / first["kernels"][measure_of], 2
        ),
        "most sequences / one, kernels": round(last["kernels"][measure_of] / first["kernels"][measure_of], 2),
    }


def main() -> None:
    asked, began = arguments(), time.monotonic()
    torch.set_num_threads(asked.threads)
    model, cache = make_network()
    compiled_s = time_to_compiled(model, cache)
    before = machine.Usage.now({})
    figures: dict[str, dict[str, dict[str, float]]] = {}
    for number in map(int, asked.batches.split(",")):
        found = subjects(model, cache, number, asked.inductor)
        taken = measure(found, transformers_step(number), asked.seconds)
        figures[str(number)] = {name: summary(times) for name, times in taken.items()}
        for name, figure in figures[str(number)].items():
            print(f"{number:3} sequences  {name:26} {figure}", file=sys.stderr)
    noise = machine.cores_between(before, machine.Usage.now({}))
    date = datetime.now(UTC)
    result: dict[str, Any] = {
        "date": date.isoformat(timespec="seconds"),
        "command": " ".join(["python", "benchmarks/llm/step.py", *sys.argv[1:]]),
        "duration_s": round(time.monotonic() - began),
        "machine": machine.describe(),
        "versions": results.versions(Path(sys.executable), Path("none")),
        "threads": asked.threads,
        "shape": SHAPE,
        "context": CONTEXT,
        "time_to_compiled_s": compiled_s,
        "other_cores": noise["other_cores"],
        "noisy": noise["noisy"],
        "ratios_of_medians": ratios(figures, "median_ms"),
        "ratios_of_processor_time": ratios(figures, "cpu_ms"),
        "figures": figures,
    }
    file = asked.out / f"{date:%Y-%m-%d-%H%M}-llm-step.json"
    file.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: value for key, value in result.items() if key.startswith("ratios")}, indent=1))
    print(file)


if __name__ == "__main__":
    main()
