"""Measures what LoRA adapters cost in a decode step on a GPU: batches without one, with one, and with eight in turn.

    python benchmarks/llm/gpu_adapters.py [--presets Llama-3.2-1B,Llama-2-7B] [--ranks 8,16,64] [--streams 1,8,32]
    python benchmarks/llm/gpu_adapters.py --presets Llama-3.2-1B --ranks 16 --streams 8 --variants [names]

Networks have random weights in bfloat16, or quantized ones (`--quantization`). The adapters change all projections.
Printed are the times of graph replays of the whole network with 200 tokens in the cache of each stream, in
milliseconds, and how much longer a step is than without adapters. A dated JSON file has them, too; it is written after
each step, and names what failed.

With `--variants`, the same is measured with launches of their own for all products of adapters ("alone"), with all of
them within other kernels ("all"), and with some choices changed, in one run. A variant that fails is named, and the
others go on. The logits of each are compared with those of "alone" in the same step. With `--profile`, the kernels of a
layer with eight adapters of the first rank follow, with the microseconds at which they start and end; they overlap.
"""

import argparse
import contextlib
import dataclasses
import gc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "serving")]

import gpu  # noqa: E402
import machine  # noqa: E402
import results  # noqa: E402
import torch  # noqa: E402
from cuda_device import need_device  # noqa: E402
from kept_results import KeptResults  # noqa: E402
from one_row_step import difference, print_profile  # noqa: E402
from persistent_step import BLOCK_SIZE, replay_ms  # noqa: E402

from flambeau.llm.backends.cuda import lora_norm  # noqa: E402
from flambeau.llm.backends.cuda.lora_check import find_error  # noqa: E402
from flambeau.llm.backends.cuda.lora_layers import NO_FUSIONS, Fusions  # noqa: E402
from flambeau.llm.backends.cuda.lora_network import LoraNetwork  # noqa: E402
from flambeau.llm.backends.cuda.lora_slots import MIN_RANK, LoraSlots, layer_shapes  # noqa: E402
from flambeau.llm.backends.cuda.network import CudaNetwork  # noqa: E402
from flambeau.llm.executor.inputs import StepInputs  # noqa: E402
from flambeau.llm.executor.kv_cache import KVCache  # noqa: E402
from flambeau.llm.models.presets import preset  # noqa: E402
from flambeau.llm.models.transformer import Transformer  # noqa: E402
from flambeau.llm.quantize.packed_layers import use_fast_layers  # noqa: E402
from flambeau.llm.quantize.quantizer import quantize  # noqa: E402

NUM_ADAPTERS, CONTEXT = 8, 200
KERNELS_OF_A_LAYER = 16
APART = dataclasses.replace(Fusions(), products=False)
MODULES = (lora_norm,)
# What is part of other kernels, and constants of these modules.
VARIANTS: dict[str, tuple[Fusions, dict[str, int]]] = {
    "alone": (NO_FUSIONS, {}),
    "norms": (Fusions(products=False, attention=False, activations=False), {}),
    "norms, activations": (Fusions(products=False, attention=False), {}),
    "all but products": (APART, {}),
    "all": (Fusions(), {}),
    "all, 64 programs": (Fusions(), {"NUM_PROGRAMS": 64}),
    "all, 256 programs": (Fusions(), {"NUM_PROGRAMS": 256}),
    "all, 8 ranks before": (Fusions(), {"RANKS_BEFORE": 8}),
    "all, 8 ranks of a program": (Fusions(), {"RANKS_EACH": 8}),
}


def step_inputs(num_streams: int) -> StepInputs:
    """A decode step of streams in the middle of their text, whose blocks lie anywhere."""
    num_blocks = -(-CONTEXT // BLOCK_SIZE)
    tables_SB = 1 + torch.randperm(num_streams * num_blocks, device="cuda").view(num_streams, num_blocks)
    positions_T = torch.full((num_streams,), CONTEXT - 1, device="cuda")
    return StepInputs(
        ids_T=torch.arange(num_streams, device="cuda"),
        positions_T=positions_T,
        slots_T=tables_SB[:, -1] * BLOCK_SIZE + (CONTEXT - 1) % BLOCK_SIZE,
        query_starts=torch.arange(num_streams + 1, device="cuda"),
        context_lens_S=positions_T + 1,
        block_tables_SB=tables_SB,
        query_len=1,
    )


def make_slots(model: Transformer, rank: int) -> LoraSlots:
    """Eight adapters of random numbers; ranks are padded as those of loaded ones."""
    slots = LoraSlots(layer_shapes(model.arch), NUM_ADAPTERS, max(MIN_RANK, rank), torch.device("cuda"), torch.bfloat16)
    for layer in slots.layers.values():
        layer.a_LXI.normal_(std=0.02)
        layer.b_LRO.normal_(std=0.02)
        for slot in range(NUM_ADAPTERS):
            layer.arrange(slot)
    return slots


def with_places(inputs: StepInputs, num_adapters: int) -> StepInputs:
    places_T = torch.arange(len(inputs.ids_T), device="cuda") % num_adapters + 1
    return dataclasses.replace(inputs, adapters_T=places_T)


@contextlib.contextmanager
def constants(changed: dict[str, int]) -> Iterator[None]:
    """Other constants of the kernels for a while."""
    with contextlib.ExitStack() as stack:
        for name, value in changed.items():
            module: Any = next(each for each in MODULES if hasattr(each, name))
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, value)
        yield


def step_times(network: LoraNetwork, inputs: StepInputs) -> dict[int, float]:
    """Milliseconds of a step with one adapter and with eight."""
    return {number: replay_ms(network.run, with_places(inputs, number)) for number in (1, NUM_ADAPTERS)}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", default="Llama-3.2-1B,Llama-2-7B", help="default: %(default)s")
    parser.add_argument("--quantization", default="none", help="of the weights: none, int8, fp8, int4 (default none)")
    parser.add_argument("--ranks", default="8,16,64", help="of the adapters (default %(default)s)")
    parser.add_argument("--streams", default="1,8,32", help="sequences of a step (default %(default)s)")
    parser.add_argument("--variants", nargs="*", choices=VARIANTS, metavar="NAME", help=f"all, or of {[*VARIANTS]}")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path, default=results.REPOSITORY / "benchmarks" / "results")
    asked = parser.parse_args()
    need_device()
    figures: dict[str, Any] = {
        "command": f"python benchmarks/llm/gpu_adapters.py {gpu.command_line(sys.argv[1:])}".strip(),
        "machine": machine.describe(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "context": CONTEXT,
        "steps": [],
    }
    kept = KeptResults(asked.out, "llm-gpu-adapters", figures)
    for name in asked.presets.split(","):
        with kept.part(f"{name} {asked.quantization}"):
            run_preset(asked, name, kept)
        gc.collect()
        torch.cuda.empty_cache()
    print(kept.file)
    if kept.has_errors:
        raise SystemExit(f"failed: {', '.join(kept.figures['errors'])}")


def run_preset(asked: argparse.Namespace, name: str, kept: KeptResults) -> None:
    """All ranks and numbers of streams with one network."""
    model = gpu.random_network(preset(name), "cuda", torch.bfloat16)
    if asked.quantization != "none":
        quantize(model, asked.quantization)
        use_fast_layers(model, torch.bfloat16)
    numbers = [*map(int, asked.streams.split(","))]
    num_blocks = 1 + max(numbers) * -(-CONTEXT // BLOCK_SIZE)
    cache = KVCache(model.arch, num_blocks, BLOCK_SIZE, device="cuda", dtype=torch.bfloat16)
    for tensor in (*cache.keys, *cache.values):
        tensor.normal_()
    for rank in map(int, asked.ranks.split(",")):
        slots = make_slots(model, rank)
        with kept.part(f"{name}, rank {rank}, the comparison"):
            if (reason := find_error(slots, model)) is not None:
                raise RuntimeError(f"the kernels are wrong: {reason}")
        for number in numbers:
            what = f"{name} {asked.quantization}, {number} streams, rank {rank}"
            with kept.part(what):
                run_step(asked, what, (model, cache), slots, step_inputs(number), kept)
        del slots


def run_step(
    asked: argparse.Namespace,
    what: str,
    made: tuple[Transformer, KVCache],
    slots: LoraSlots,
    inputs: StepInputs,
    kept: KeptResults,
) -> None:
    """One step without adapters, and with each variant of the kernels."""
    network = CudaNetwork(*made)
    alone_ms = replay_ms(network.run, inputs)
    print(f"{what}: {alone_ms:.3f} ms without adapters", flush=True)
    name, streams, rank = what.split(" ")[0], len(inputs.ids_T), int(what.split(" ")[-1])
    sizes = {"preset": name, "quantization": asked.quantization, "streams": streams, "rank": rank}
    step: dict[str, Any] = {**sizes, "without_ms": alone_ms, "variants": {}}
    kept.figures["steps"].append(step)
    kept.save()
    profiles = asked.profile and rank == int(asked.ranks.split(",")[0])
    if profiles:
        with kept.part(f"{what}, profile"):
            print_profile(network.run, inputs, KERNELS_OF_A_LAYER)
    given = with_places(inputs, NUM_ADAPTERS)
    expected = LoraNetwork(*made, slots, fusions=NO_FUSIONS).run(given).clone()
    for variant in ["all"] if asked.variants is None else asked.variants or [*VARIANTS]:
        fusions, changed = VARIANTS[variant]
        with kept.part(f"{what}, {variant}"), constants(changed):
            adapted = LoraNetwork(*made, slots, fusions=fusions)
            off = difference(adapted.run(given), expected)
            times = step_times(adapted, inputs)
            words = (f"{count} adapters {ms:.3f} ms ({ms / alone_ms - 1:+.1%})" for count, ms in times.items())
            print(f"  {variant:25} {', '.join(words)}, logits differ {off:.4f}", flush=True)
            step["variants"][variant] = {"ms_by_adapters": times, "difference": off}
            if profiles:
                print_profile(adapted.run, given, KERNELS_OF_A_LAYER)


if __name__ == "__main__":
    main()
