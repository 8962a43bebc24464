"""Checks and times the kernels for one sequence beside the persistent kernel and the Triton kernels of the engine.

    python benchmarks/llm/one_row_step.py [--preset Llama-2-7B] [--kinds none int8 fp8 int4] [--lengths 200] [--profile]

All compute the same step from the same weights and KV cache. Printed are the times of graph replays, the limit that
memory bandwidth sets, and the relative difference of the logits. With `--profile`, the kernels of one layer follow,
with the microseconds at which they start and end; they overlap.
"""

import argparse
import dataclasses
import itertools
import sys
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import gpu  # noqa: E402
import torch  # noqa: E402
from cuda_device import need_device  # noqa: E402
from persistent_step import BLOCK_SIZE, KINDS, inputs_of, replay_ms  # noqa: E402

from flambeau.llm.backends.cuda import one_row_step, persistent_step  # noqa: E402
from flambeau.llm.backends.cuda.network import CudaNetwork  # noqa: E402
from flambeau.llm.executor.inputs import StepInputs  # noqa: E402
from flambeau.llm.executor.kv_cache import KVCache  # noqa: E402
from flambeau.llm.models.presets import preset  # noqa: E402
from flambeau.llm.quantize.packed_layers import use_fast_layers  # noqa: E402
from flambeau.llm.quantize.quantizer import quantize  # noqa: E402

Run = Callable[[StepInputs], torch.Tensor]


def print_profile(run: Run, inputs: StepInputs, num_kernels: int) -> None:
    """The kernels of a layer in the middle of a captured step."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(inputs)
    graph.replay()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
    events = sorted((e for e in profile.events() if e.device_type.name == "CUDA"), key=lambda e: e.time_range.start)
    middle = len(events) // 2
    begin = events[middle].time_range.start
    for event in itertools.islice(events, middle, middle + num_kernels):
        span = event.time_range
        print(f"  {span.start - begin:8.2f} {span.end - begin:8.2f} {span.elapsed_us():7.2f} {event.name[:50]}")


def set_shape(shape: str) -> None:
    """Use another division of the products than the best one."""
    if shape:
        warps, chunks, rehearses = map(int, shape.split("."))
        one_row_step.REHEARSES = bool(rehearses)
        for kind in one_row_step.NUM_WARPS:
            one_row_step.NUM_WARPS[kind], one_row_step.MAX_CHUNKS[kind] = warps, chunks


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="Llama-2-7B", help="default: %(default)s")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS), help="weights (default: all)")
    parser.add_argument("--lengths", nargs="*", type=int, default=[200], help="tokens in the KV cache (default 200)")
    parser.add_argument("--shapes", nargs="*", default=[""], help="warps.chunks.rehearses: at least, at most, 0 or 1")
    parser.add_argument("--layers", type=int, help="fewer than the network has")
    parser.add_argument("--persistent", action="store_true", help="time the persistent kernel, too")
    parser.add_argument("--profile", action="store_true")
    asked = parser.parse_args()
    need_device()
    arch, read = preset(asked.preset), gpu.bandwidth("cuda")
    arch = dataclasses.replace(arch, num_layers=asked.layers or arch.num_layers)
    for kind in asked.kinds:
        model = gpu.random_network(arch, "cuda", torch.bfloat16)
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
        if kind != "none":
            quantize(model, kind)
        use_fast_layers(model, torch.bfloat16)
        for length in asked.lengths:
            inputs = inputs_of(length)
            num_blocks = int(inputs.block_tables_SB.max()) + 2
            cache = KVCache(arch, num_blocks, BLOCK_SIZE, device="cuda", dtype=torch.bfloat16)
            for tensor in (*cache.keys, *cache.values):
                tensor.normal_()
            network = CudaNetwork(model, cache)
            steps: dict[str, Run] = {"network": network.run}
            if asked.persistent and persistent_step.is_faster(model, cache):
                steps["persistent"] = persistent_step.PersistentStep(model, cache).run
            for shape in asked.shapes:
                set_shape(shape)
                steps[f"one row {shape}"] = one_row_step.OneRowStep(model, cache).run
            expected = network.run(inputs).clone()
            cached = cache.keys[0].clone()
            limit_ms = gpu.weight_bytes(model) / read * 1e3
            print(f"{asked.preset} {kind}, {length} tokens: limit {limit_ms:.3f} ms")
            for name, run in steps.items():
                off = difference(run(inputs), expected)
                off_keys = difference(cache.keys[0], cached)
                print(f"  {name}: {replay_ms(run, inputs):.3f} ms, logits differ {off:.4f}, keys {off_keys:.5f}")
            if asked.profile:
                print_profile(steps[f"one row {asked.shapes[0]}"], inputs, 11)
                print_profile(network.run, inputs, 8)
            del cache, network, steps
        del model


if __name__ == "__main__":
    main()
