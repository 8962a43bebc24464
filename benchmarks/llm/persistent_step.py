"""Checks and times the persistent kernel for one sequence beside the Triton kernels of the engine.

    python benchmarks/llm/persistent_step.py [--preset Llama-2-7B] [--length 200] [--candidate]

Both compute the same step from the same weights and KV cache. Printed are the times of graph replays, the limit that
memory bandwidth sets, and the relative difference of the logits. With `--candidate`, a kernel that is not in the
package yet takes part (candidates/persistent_products.py).
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "candidates")]

import gpu  # noqa: E402
import torch  # noqa: E402

from flambeau.llm.backends.cuda.network import CudaNetwork  # noqa: E402
from flambeau.llm.backends.cuda.persistent_step import PersistentStep  # noqa: E402
from flambeau.llm.executor.inputs import StepInputs  # noqa: E402
from flambeau.llm.executor.kv_cache import KVCache  # noqa: E402
from flambeau.llm.models.presets import preset  # noqa: E402
from flambeau.llm.models.transformer import Transformer  # noqa: E402
from flambeau.llm.quantize.packed_layers import use_fast_layers  # noqa: E402
from flambeau.llm.quantize.quantizer import quantize  # noqa: E402

KINDS = ("none", "int8", "fp8", "int4")
BLOCK_SIZE = 16


def inputs_of(length: int) -> StepInputs:
    """A step of one sequence of this length, whose blocks lie anywhere."""
    table = torch.randperm(-(-length // BLOCK_SIZE) + 1, device="cuda").view(1, -1) + 1
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


def measure_candidate(model: Transformer, cache: KVCache, inputs: StepInputs, expected: torch.Tensor) -> None:
    from persistent_products import CandidateStep

    step = CandidateStep(model, cache)
    found = step.run(inputs).clone()
    difference = ((found - expected).norm() / expected.norm()).item()
    print(f"      candidate {replay_ms(step.run, inputs):.2f} ms, difference {difference:.4f}")


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="Llama-2-7B", help="default: %(default)s")
    parser.add_argument("--length", type=int, default=200, help="tokens in the KV cache (default %(default)s)")
    parser.add_argument("--candidate", action="store_true")
    asked = parser.parse_args()
    arch, read = preset(asked.preset), gpu.bandwidth("cuda")
    for kind in KINDS:
        model = gpu.random_network(arch, "cuda", torch.bfloat16)
        if kind != "none":
            quantize(model, kind)
        use_fast_layers(model, torch.bfloat16)
        inputs = inputs_of(asked.length)
        cache = KVCache(arch, int(inputs.block_tables_SB.max()) + 2, BLOCK_SIZE, device="cuda", dtype=torch.bfloat16)
        for tensor in (*cache.keys, *cache.values):
            tensor.normal_()
        network, step = CudaNetwork(model, cache), PersistentStep(model, cache)
        expected, found = network.run(inputs), step.run(inputs).clone()
        difference = ((found - expected).norm() / expected.norm()).item()
        if asked.candidate and kind != "none":
            measure_candidate(model, cache, inputs, expected)
        times = [replay_ms(each.run, inputs) for each in (step, network)]
        limit_ms = gpu.weight_bytes(model) / read * 1e3
        figures = f"persistent {times[0]:.2f} ms, network {times[1]:.2f} ms, limit {limit_ms:.2f} ms"
        print(f"{kind:5} {figures}, difference {difference:.4f}")
        del model, cache, network, step


if __name__ == "__main__":
    main()
