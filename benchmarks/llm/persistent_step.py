"""Checks and times the persistent kernel for one sequence beside the Triton kernels of the engine.

    python benchmarks/llm/persistent_step.py [--preset Llama-2-7B] [--length 200] [--kinds none int8 fp8 int4]
    python benchmarks/llm/persistent_step.py --variants [present direct …] [--kinds int8 fp8 int4]

Both compute the same step from the same weights and KV cache. Printed are the times of graph replays, the limit that
memory bandwidth sets, and the relative difference of the logits.

With `--variants`, a kernel that is not in the package yet (candidates/persistent_products.py) is compiled with each of
the switches of VARIANTS and timed. The table has milliseconds of a step, and in brackets the largest difference of the
logits at several lengths; "unstable" if they change between launches. A variant that cannot be compiled or launched is
named, and the others go on. Run it under `timeout`: a kernel that is wrong could wait forever.

A dated JSON file has the figures, too; it is written after each of them.
"""

import argparse
import gc
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "candidates"), str(HERE.parent / "serving")]

import gpu  # noqa: E402
import machine  # noqa: E402
import results  # noqa: E402
import torch  # noqa: E402
from cuda_device import need_device  # noqa: E402
from kept_results import KeptResults  # noqa: E402
from persistent_products import CandidateStep  # noqa: E402

from flambeau.llm.backends.cuda.network import CudaNetwork  # noqa: E402
from flambeau.llm.backends.cuda.persistent_step import PersistentStep  # noqa: E402
from flambeau.llm.executor.inputs import StepInputs  # noqa: E402
from flambeau.llm.executor.kv_cache import KVCache  # noqa: E402
from flambeau.llm.models.architecture import Architecture  # noqa: E402
from flambeau.llm.models.presets import preset  # noqa: E402
from flambeau.llm.models.transformer import Transformer  # noqa: E402
from flambeau.llm.quantize.packed_layers import use_fast_layers  # noqa: E402
from flambeau.llm.quantize.quantizer import quantize  # noqa: E402

KINDS = ("none", "int8", "fp8", "int4")
BLOCK_SIZE = 16
INTEGER = {"DIRECT": 1, "INTEGER": 1}
CHECKED = {**INTEGER, "RELAXED": 1, "CHECKED": 1}
ALL = {**CHECKED, "LOCAL": 1, "ALONE": 1}
VARIANTS: dict[str, dict[str, int]] = {  # those that could wait forever, if they were wrong, come last
    "present": {},
    "128 blocks": {"NB": 128},
    "direct": {"DIRECT": 1},
    "integer": INTEGER,
    "prefetch 4": {**INTEGER, "PREFETCH": 4},
    "relaxed": {**INTEGER, "RELAXED": 1},
    "alone": {**INTEGER, "RELAXED": 1, "ALONE": 1},
    "local": {**INTEGER, "RELAXED": 1, "LOCAL": 1},
    "checked": CHECKED,
    "all": ALL,
    "all, rounded": {**ALL, "ROUNDED": 1},
    "all, 128 blocks": {**ALL, "NB": 128},
    "all, prefetch 2": {**ALL, "PREFETCH": 2},
    "all, prefetch 4": {**ALL, "PREFETCH": 4},
    "all, prefetch 8": {**ALL, "PREFETCH": 8},
}
INTEGER_KINDS = ("int8", "int4")
CHECKED_LENGTHS = (1, 33, 1003)
NUM_REPEATS = 30  # launches whose logits must be the same


def inputs_of(length: int, first_block: int = 1) -> StepInputs:
    """A step of one sequence of this length, whose blocks lie anywhere from the first one on."""
    table = torch.randperm(-(-length // BLOCK_SIZE) + 1, device="cuda").view(1, -1) + first_block
    slot = table[0, (length - 1) // BLOCK_SIZE] * BLOCK_SIZE + (length - 1) % BLOCK_SIZE
    one, starts = torch.tensor([length], device="cuda"), torch.tensor([0, 1], device="cuda")
    return StepInputs(torch.tensor([17], device="cuda"), one - 1, slot.view(1), starts, one, table, query_len=1)


def replay_ms(run: Callable[[StepInputs], torch.Tensor], inputs: StepInputs) -> float:
    """The median time of a captured step."""
    run(inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(inputs)
    times = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(30):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 30)
    return sorted(times)[2]


def quantized_network(arch: Architecture, kind: str) -> Transformer:
    model = gpu.random_network(arch, "cuda", torch.bfloat16)
    if kind != "none":
        quantize(model, kind)
    use_fast_layers(model, torch.bfloat16)
    return model


def random_cache(arch: Architecture, inputs: StepInputs) -> KVCache:
    cache = KVCache(arch, int(inputs.block_tables_SB.max()) + 2, BLOCK_SIZE, device="cuda", dtype=torch.bfloat16)
    for tensor in (*cache.keys, *cache.values):
        tensor.normal_()
    return cache


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def start_thread() -> None:
    torch.zeros(1, device="cuda")  # the driver's functions need a current context


def switches(name: str, kind: str) -> tuple[tuple[str, int], ...]:
    """What a variant is compiled with; those that are the same for these weights are measured once."""
    return tuple((key, value) for key, value in VARIANTS[name].items() if key != "INTEGER" or kind in INTEGER_KINDS)


def variant_figures(model: Transformer, kind: str, names: list[str], length: int, kept: KeptResults) -> None:
    """What the table has for each variant."""
    cases = [inputs_of(length)]
    for each in CHECKED_LENGTHS:  # no step writes into the blocks of another one
        cases.append(inputs_of(each, int(cases[-1].block_tables_SB.max()) + 1))
    cache = random_cache(model.arch, cases[-1])
    network = CudaNetwork(model, cache)
    expected = [network.run(inputs).clone() for inputs in cases]
    CandidateStep(model, cache)  # puts scales into order, once for all
    steps = candidates(model, cache, kind, names)
    figures = kept.figures["variants"].setdefault(kind, {})
    found: dict[tuple[tuple[str, int], ...], str] = {}
    for name in names:
        given = switches(name, kind)
        if given not in found:
            found[given] = "failed"
            with kept.part(f"{kind} {name}"):
                found[given] = figure_of(steps[given].result(), cases, expected)
            print(f"  {name}: {found[given]}", flush=True)
        figures[name] = found[given]
        kept.save()


def candidates(
    model: Transformer, cache: KVCache, kind: str, names: list[str]
) -> dict[tuple[tuple[str, int], ...], Any]:
    """The compiled variants, or what is wrong with them, by their switches."""

    @torch.inference_mode()
    def make(given: tuple[tuple[str, int], ...]) -> CandidateStep:
        return CandidateStep(model, cache, dict(given))

    began = time.monotonic()
    with ThreadPoolExecutor(8, initializer=start_thread) as pool:  # compiles
        steps = {given: pool.submit(make, given) for given in dict.fromkeys(switches(name, kind) for name in names)}
    torch.cuda.synchronize()
    print(f"  {len(steps)} variants compiled in {time.monotonic() - began:.0f} s", flush=True)
    return steps


def figure_of(step: CandidateStep, cases: list[StepInputs], expected: list[torch.Tensor]) -> str:
    off = max(difference(step.run(inputs), logits) for inputs, logits in zip(cases, expected, strict=True))
    first = step.run(cases[0]).clone()
    is_stable = all(torch.equal(first, step.run(cases[0])) for _ in range(NUM_REPEATS))
    return f"{replay_ms(step.run, cases[0]):.3f} ({off:.4f}){'' if is_stable else ' unstable'}"


def print_variants(arch: Architecture, names: list[str], kinds: list[str], length: int, kept: KeptResults) -> None:
    kept.figures["variants"] = {}
    for kind in kinds:
        print(kind, flush=True)
        with kept.part(kind):
            variant_figures(quantized_network(arch, kind), kind, names, length, kept)
        gc.collect()
        torch.cuda.empty_cache()
    print(variants_table(kept.figures["variants"], names))


def variants_table(found: dict[str, dict[str, str]], names: list[str]) -> str:
    lines = [f"\n{'variant':18}" + "".join(f"{kind:24}" for kind in found)]
    lines += [f"{name:18}" + "".join(f"{found[kind].get(name, ''):24}" for kind in found) for name in names]
    return "\n".join(lines)


def compare(arch: Architecture, kind: str, length: int, read: float) -> dict[str, float]:
    """The kernel in use beside the network."""
    model, inputs = quantized_network(arch, kind), inputs_of(length)
    cache = random_cache(arch, inputs)
    network, step = CudaNetwork(model, cache), PersistentStep(model, cache)
    off = difference(step.run(inputs), network.run(inputs))
    persistent_ms, network_ms = (replay_ms(each.run, inputs) for each in (step, network))
    limit_ms = gpu.weight_bytes(model) / read * 1e3
    figures = f"persistent {persistent_ms:.2f} ms, network {network_ms:.2f} ms, limit {limit_ms:.2f} ms"
    print(f"{kind:5} {figures}, difference {off:.4f}", flush=True)
    return {"persistent_ms": persistent_ms, "network_ms": network_ms, "limit_ms": limit_ms, "difference": off}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="Llama-2-7B", help="default: %(default)s")
    parser.add_argument("--length", type=int, default=200, help="tokens in the KV cache (default %(default)s)")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, help="weights (default: all; with variants: quantized)")
    parser.add_argument("--variants", nargs="*", choices=VARIANTS, help="time variants of the candidate (default: all)")
    parser.add_argument("--out", type=Path, default=results.REPOSITORY / "benchmarks" / "results")
    asked = parser.parse_args()
    need_device()
    arch = preset(asked.preset)
    given = {
        "command": f"python benchmarks/llm/persistent_step.py {gpu.command_line(sys.argv[1:])}".strip(),
        "machine": machine.describe(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }
    kept = KeptResults(asked.out, "llm-persistent-step", given)
    if asked.variants is not None:
        print_variants(arch, asked.variants or [*VARIANTS], asked.kinds or [*KINDS[1:]], asked.length, kept)
    else:
        read, kept.figures["kinds"] = gpu.bandwidth("cuda"), {}
        for kind in asked.kinds or KINDS:
            with kept.part(kind):
                kept.figures["kinds"][kind] = compare(arch, kind, asked.length, read)
            gc.collect()
            torch.cuda.empty_cache()
    print(kept.file)
    if kept.has_errors:
        raise SystemExit(f"failed: {', '.join(kept.figures['errors'])}")


if __name__ == "__main__":
    main()
