"""Measures what LoRA adapters cost in a decode step on a GPU: batches without one, with one, and with eight in turn.

    python benchmarks/llm/gpu_adapters.py [--presets Llama-3.2-1B,Llama-2-7B] [--ranks 8,16,64] [--streams 1,8,32]

Networks have random weights in bfloat16, or quantized ones (`--quantization`). The adapters change all projections.
Printed are the times of graph replays of the whole network with 200 tokens in the cache of each stream, in
milliseconds, and how much longer a step is than without adapters. With `--profile`, the kernels of a layer with eight
adapters of the first rank follow, with the microseconds at which they start and end; they overlap.
"""

import argparse
import dataclasses
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import gpu  # noqa: E402
import torch  # noqa: E402
from one_row_step import print_profile  # noqa: E402
from persistent_step import BLOCK_SIZE, replay_ms  # noqa: E402

from flambeau.llm.backends.cuda.lora_network import LoraNetwork, find_error  # noqa: E402
from flambeau.llm.backends.cuda.lora_slots import MIN_RANK, LoraSlots, layer_shapes  # noqa: E402
from flambeau.llm.backends.cuda.network import CudaNetwork  # noqa: E402
from flambeau.llm.executor.inputs import StepInputs  # noqa: E402
from flambeau.llm.executor.kv_cache import KVCache  # noqa: E402
from flambeau.llm.models.presets import preset  # noqa: E402
from flambeau.llm.models.transformer import Transformer  # noqa: E402
from flambeau.llm.quantize.packed_layers import use_fast_layers  # noqa: E402
from flambeau.llm.quantize.quantizer import quantize  # noqa: E402

NUM_ADAPTERS, CONTEXT = 8, 200


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
        layer.b_LOR.normal_(std=0.02)
    return slots


def with_places(inputs: StepInputs, num_adapters: int) -> StepInputs:
    places_T = torch.arange(len(inputs.ids_T), device="cuda") % num_adapters + 1
    return dataclasses.replace(inputs, adapters_T=places_T)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", default="Llama-3.2-1B,Llama-2-7B", help="default: %(default)s")
    parser.add_argument("--quantization", default="none", help="of the weights: none, int8, fp8, int4 (default none)")
    parser.add_argument("--ranks", default="8,16,64", help="of the adapters (default %(default)s)")
    parser.add_argument("--streams", default="1,8,32", help="sequences of a step (default %(default)s)")
    parser.add_argument("--profile", action="store_true")
    asked = parser.parse_args()
    for name in asked.presets.split(","):
        model = gpu.random_network(preset(name), "cuda", torch.bfloat16)
        if asked.quantization != "none":
            quantize(model, asked.quantization)
            use_fast_layers(model, torch.bfloat16)
        numbers = [*map(int, asked.streams.split(","))]
        num_blocks = 1 + max(numbers) * -(-CONTEXT // BLOCK_SIZE)
        cache = KVCache(model.arch, num_blocks, BLOCK_SIZE, device="cuda", dtype=torch.bfloat16)
        network = CudaNetwork(model, cache)
        steps = {number: step_inputs(number) for number in numbers}
        alone = {number: replay_ms(network.run, inputs) for number, inputs in steps.items()}
        for rank in map(int, asked.ranks.split(",")):
            slots = make_slots(model, rank)
            if (reason := find_error(slots)) is not None:
                print(f"the kernels are wrong: {reason}")
            adapted = LoraNetwork(model, cache, slots)
            for number, inputs in steps.items():
                line = f"{name} {asked.quantization}, {number:3} streams, rank {rank:3}: none {alone[number]:.3f} ms"
                for num_adapters in (1, NUM_ADAPTERS):
                    took = replay_ms(adapted.run, with_places(inputs, num_adapters))
                    line += f", {num_adapters} adapters {took:.3f} ms ({took / alone[number] - 1:+.1%})"
                print(line, flush=True)
            if asked.profile and rank == int(asked.ranks.split(",")[0]):
                print_profile(adapted.run, with_places(steps[numbers[-1]], NUM_ADAPTERS), 16)
            del slots, adapted


if __name__ == "__main__":
    main()
