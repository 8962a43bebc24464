"""Measures what LoRA adapters cost in a decode step on a GPU: batches without one, with one, and with eight in turn.

    python benchmarks/llm/gpu_adapters.py [--presets Llama-3.2-1B,Llama-2-7B] [--ranks 8,16,64] [--streams 1,8,32]
    python benchmarks/llm/gpu_adapters.py --presets Llama-3.2-1B --ranks 16 --streams 8 --variants [names]

Networks have random weights in bfloat16, or quantized ones (`--quantization`). The adapters change all projections.
Printed are the times of graph replays of the whole network with 200 tokens in the cache of each stream, in
milliseconds, and how much longer a step is than without adapters.

With `--variants`, the same is measured with launches of their own for all products of adapters ("alone"), with all of
them within other kernels ("all"), and with each choice changed, in one run. A variant that fails is named, and the
others go on. The logits of each are compared with those of "alone" in the same step. With `--profile`, the kernels of a
layer with eight adapters of the first rank follow, with the microseconds at which they start and end; they overlap.
"""

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import gpu  # noqa: E402
import torch  # noqa: E402
from one_row_step import difference, print_profile  # noqa: E402
from persistent_step import BLOCK_SIZE, replay_ms  # noqa: E402

from flambeau.llm.backends.cuda import lora_activation, lora_norm  # noqa: E402
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
NORMS_ONLY = Fusions(attention=False, activations=False, attended="launch")
# What is part of other kernels, and constants of lora_norm.py and lora_activation.py.
VARIANTS: dict[str, tuple[Fusions, dict[str, int]]] = {
    "alone": (NO_FUSIONS, {}),
    "norms": (NORMS_ONLY, {}),
    "norms, attended": (dataclasses.replace(NORMS_ONLY, attended="norm"), {}),
    "norms, activations": (dataclasses.replace(NORMS_ONLY, activations=True), {}),
    "norms, attention": (dataclasses.replace(NORMS_ONLY, attention=True), {}),
    "all": (Fusions(), {}),
    "all but attention": (Fusions(attention=False), {}),
    "all but activations": (Fusions(activations=False), {}),
    "all, attended alone": (Fusions(attended="launch"), {}),
    "all, 32 programs": (Fusions(), {"NUM_PROGRAMS": 32}),
    "all, 64 programs": (Fusions(), {"NUM_PROGRAMS": 64}),
    "all, 256 programs": (Fusions(), {"NUM_PROGRAMS": 256}),
    "all, half the bytes": (Fusions(), {"PROGRAM_BYTES": 64 << 10}),
    "all, four times the bytes": (Fusions(), {"PROGRAM_BYTES": 512 << 10}),
    "all, activations by slots": (Fusions(), {"ROW_BYTES": 0}),
    "all, 128 columns": (Fusions(), {"ROW_COLUMNS": 128}),
    "all, attended beside": (Fusions(attended="stream"), {}),
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
    return slots


def with_places(inputs: StepInputs, num_adapters: int) -> StepInputs:
    places_T = torch.arange(len(inputs.ids_T), device="cuda") % num_adapters + 1
    return dataclasses.replace(inputs, adapters_T=places_T)


@contextlib.contextmanager
def constants(changed: dict[str, int]) -> Iterator[None]:
    """Other constants of the kernels for a while."""
    with contextlib.ExitStack() as stack:
        for name, value in changed.items():
            module = lora_norm if hasattr(lora_norm, name) else lora_activation
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, value)
        yield


def measure(name: str, network: LoraNetwork, inputs: StepInputs, alone_ms: float) -> str:
    """The times of a step with one adapter and with eight, and what they add to `alone_ms`."""
    found = []
    for num_adapters in (1, NUM_ADAPTERS):
        took = replay_ms(network.run, with_places(inputs, num_adapters))
        found.append(f"{num_adapters} adapters {took:.3f} ms ({took / alone_ms - 1:+.1%})")
    return f"  {name:25} {', '.join(found)}"


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", default="Llama-3.2-1B,Llama-2-7B", help="default: %(default)s")
    parser.add_argument("--quantization", default="none", help="of the weights: none, int8, fp8, int4 (default none)")
    parser.add_argument("--ranks", default="8,16,64", help="of the adapters (default %(default)s)")
    parser.add_argument("--streams", default="1,8,32", help="sequences of a step (default %(default)s)")
    parser.add_argument("--variants", nargs="*", choices=VARIANTS, metavar="NAME", help=f"all, or of {[*VARIANTS]}")
    parser.add_argument("--profile", action="store_true")
    asked = parser.parse_args()
    chosen = ["all"] if asked.variants is None else asked.variants or [*VARIANTS]
    for name in asked.presets.split(","):
        model = gpu.random_network(preset(name), "cuda", torch.bfloat16)
        if asked.quantization != "none":
            quantize(model, asked.quantization)
            use_fast_layers(model, torch.bfloat16)
        numbers = [*map(int, asked.streams.split(","))]
        num_blocks = 1 + max(numbers) * -(-CONTEXT // BLOCK_SIZE)
        cache = KVCache(model.arch, num_blocks, BLOCK_SIZE, device="cuda", dtype=torch.bfloat16)
        for tensor in (*cache.keys, *cache.values):
            tensor.normal_()
        network = CudaNetwork(model, cache)
        steps = {number: step_inputs(number) for number in numbers}
        alone = {number: replay_ms(network.run, inputs) for number, inputs in steps.items()}
        for rank in map(int, asked.ranks.split(",")):
            slots = make_slots(model, rank)
            if (reason := find_error(slots)) is not None:
                print(f"the kernels are wrong: {reason}")
            for number, inputs in steps.items():
                heading = f"{name} {asked.quantization}, {number} streams, rank {rank}"
                print(f"{heading}: {alone[number]:.3f} ms without adapters", flush=True)
                given = with_places(inputs, NUM_ADAPTERS)
                expected = LoraNetwork(model, cache, slots, fusions=NO_FUSIONS).run(given).clone()
                for variant in chosen:
                    fusions, changed = VARIANTS[variant]
                    adapted = LoraNetwork(model, cache, slots, fusions=fusions)
                    try:
                        with constants(changed):
                            off = difference(adapted.run(given), expected)
                            line = measure(variant, adapted, inputs, alone[number])
                            print(f"{line}, logits differ {off:.4f}", flush=True)
                            if asked.profile and rank == int(asked.ranks.split(",")[0]):
                                print_profile(adapted.run, given, KERNELS_OF_A_LAYER)
                    except Exception as error:
                        print(f"  {variant:25} failed: {error}", flush=True)
            del slots


if __name__ == "__main__":
    main()
