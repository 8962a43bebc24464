"""Measures the kernels of experts on a GPU beside the time that reading the weights takes, for several shapes of tiles.

    python benchmarks/llm/experts.py [--models Mixtral-8x7B,Qwen3-30B-A3B] [--rows 1,8,32] [--kinds bfloat16,fp8]

Layers with weights of their own are run one after another in a CUDA graph, so that nothing stays in the GPU's cache.
The limit is the rate of a plain reduction. Kernels are compiled by several processes beforehand. The first shape of
each list is the one in use. A dated JSON file is written with --out.
"""

import argparse
import json
import multiprocessing
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from cuda_device import need_device
from torch import Tensor

from flambeau.llm.backends.cuda import experts, router
from flambeau.llm.models.architecture import Architecture
from flambeau.llm.models.moe import SparseMLP
from flambeau.llm.models.presets import preset

READ_BYTES = 8 << 30
LAYER_BYTES = 12 << 30  # of all layers of a model
DTYPES = {"bfloat16": torch.bfloat16, "int8": torch.int8, "fp8": torch.float8_e4m3fn, "int4": torch.uint8}
GROUP_SIZE = 64
ONE_ROW = {  # outputs of a program, inputs at a time, warps
    ("gate_up", 4096): [(1, 4096, 8), (1, 2048, 4), (1, 2048, 2), (1, 1024, 1), (2, 1024, 2)],
    ("gate_up", 2048): [(1, 2048, 2), (1, 1024, 1), (2, 1024, 2), (4, 1024, 4), (2, 1024, 1)],
    ("down", 14336): [(1, 2048, 2), (2, 1024, 2), (1, 512, 1), (4, 1024, 4)],
    ("down", 768): [(1, 256, 1), (4, 256, 1), (2, 1024, 2), (2, 512, 1), (4, 256, 2)],
}
TILES = {  # outputs of a program, inputs at a time, warps, stages
    True: [(64, 64, 4, 4), (32, 128, 4, 4), (128, 64, 8, 3), (32, 256, 4, 3), (32, 64, 4, 6)],
    False: [(64, 128, 4, 3), (32, 128, 4, 4), (128, 64, 4, 4), (32, 256, 4, 3), (128, 128, 8, 3)],
}
MANY_TILES = {
    True: [(64, 64, 4, 4), (128, 64, 8, 4), (64, 64, 8, 4)],
    False: [(128, 64, 4, 4), (128, 64, 8, 4), (256, 64, 8, 3)],
}
Layer = tuple[SparseMLP, experts.KernelExperts]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="Mixtral-8x7B,Qwen3-30B-A3B", help="default: %(default)s")
    parser.add_argument("--rows", default="1,8,32", help="default: %(default)s")
    parser.add_argument("--kinds", default="bfloat16", help="of weights (default %(default)s)")
    parser.add_argument("--shapes", action="store_true", help="measure all shapes, not only those in use")
    parser.add_argument("--processes", type=int, default=12, help="that compile (default %(default)s)")
    parser.add_argument("--out", type=Path, help="a folder for the result")
    return parser.parse_args()


def make_layers(arch: Architecture, kind: str, num_layers: int | None = None) -> list[Layer]:
    """Layers of random weights; None: as many as there is room for."""
    count, size, hidden = arch.num_experts, arch.expert_size, arch.hidden_size
    num_layers = num_layers or max(2, LAYER_BYTES // (3 * count * size * hidden * DTYPES[kind].itemsize))
    return [
        (
            router_of(arch),
            experts.KernelExperts(
                gate_up=random_weights((count, 2 * size, hidden), kind),
                down=random_weights((count, hidden, size), kind),
            ),
        )
        for _ in range(num_layers)
    ]


def router_of(arch: Architecture) -> SparseMLP:
    with torch.device("meta"):
        mlp = SparseMLP(replace(arch, expert_size=1)).requires_grad_(False)
    mlp.gate.weight = torch.nn.Parameter(
        torch.randn(arch.num_experts, arch.hidden_size, dtype=torch.bfloat16, device="cuda"), requires_grad=False
    )
    return mlp


def random_weights(shape: tuple[int, ...], kind: str) -> experts.ExpertWeights:
    dtype, device = DTYPES[kind], "cuda"
    if dtype == torch.bfloat16:
        return experts.ExpertWeights(weight=torch.empty(shape, dtype=dtype, device=device).normal_(std=0.02))
    if kind == "int4":
        groups = (*shape[:2], shape[2] // GROUP_SIZE)
        return experts.ExpertWeights(
            weight=torch.randint(0, 255, (*shape[:2], shape[2] // 2), dtype=torch.uint8, device=device),
            scale=torch.full(groups, 0.01, dtype=torch.bfloat16, device=device),
            minimums=torch.full(groups, -0.08, dtype=torch.bfloat16, device=device),
            group_size=GROUP_SIZE,
        )
    scale = torch.full(shape[:2], 0.001, dtype=torch.bfloat16, device=device)
    weight = torch.randint(-127, 127, shape, dtype=torch.int8, device=device)
    return experts.ExpertWeights(weight=weight if dtype == torch.int8 else weight.half().to(dtype), scale=scale)


def choices(arch: Architecture, num_rows: int) -> tuple[Tensor, Tensor]:
    """Different experts for each row, and their weights."""
    scores = torch.rand(num_rows, arch.num_experts, device="cuda")
    weights, chosen = scores.topk(arch.num_experts_per_token, dim=-1)
    return chosen.int().contiguous(), weights.contiguous()


def microseconds(run: Callable[[], object], replays: int = 7) -> float:
    """The median time of a graph of these launches."""
    stream: Any = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        run()
    found = []
    for _ in range(replays):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        found.append(1000 * begin.elapsed_time(end))
    return statistics.median(found[1:])


@dataclass(frozen=True, slots=True)
class Change:
    """Another shape for one of the kernels."""

    function: str  # of experts.py, that gives the shape in use
    shape: tuple[int, ...]
    gates: bool | None = None  # for which of the two products; None: the function is for one

    def __str__(self) -> str:
        return f"{ {None: self.function, True: 'gate_up', False: 'down'}[self.gates] } {self.shape}"

    @contextmanager
    def applied(self) -> Iterator[None]:
        usual = getattr(experts, self.function)

        def shape_of(*given: Any, **options: Any) -> tuple[int, ...]:
            return self.shape if options.get("gates") == self.gates else usual(*given, **options)  # type: ignore[no-any-return]

        setattr(experts, self.function, shape_of)
        try:
            yield
        finally:
            setattr(experts, self.function, usual)


def changes(arch: Architecture, rows: int, every: bool) -> list[Change | None]:
    """What is measured; None: the shapes in use."""
    if not every:
        return [None]
    if rows > 1:
        tiles = TILES if rows <= 64 else MANY_TILES
        return [None, *(Change("tile_shape", shape, gates) for gates in tiles for shape in tiles[gates])]
    parts = ("gate_up", arch.hidden_size), ("down", arch.expert_size)
    return [None, *(Change(f"{part[0]}_shape", shape) for part in parts for shape in ONE_ROW.get(part, []))]


def run_layers(layers: list[Layer], x: Tensor, chosen: Tensor, weights: Tensor, change: Change | None) -> None:
    with nullcontext() if change is None else change.applied():
        for _, layer in layers:
            layer(x, chosen, weights)


def compile_some(task: tuple[str, str, int, bool, int, int]) -> None:
    """Compile a part of the kernels, which are kept in the compiler's cache."""
    model, kind, rows, every, number, count = task
    arch = preset(model)
    layers = make_layers(arch, kind, 1)
    x = torch.randn(rows, arch.hidden_size, dtype=torch.bfloat16, device="cuda")
    for change in changes(arch, rows, every)[number::count]:
        try:
            run_layers(layers, x, *choices(arch, rows), change)
        except Exception as error:
            print("not compiled:", model, rows, change, str(error)[:100])


def bandwidth() -> float:
    numbers = torch.ones(READ_BYTES // 4, device="cuda")
    return numbers.nbytes / microseconds(lambda: numbers.sum()) * 1e6


def measure(model: str, kind: str, rows: int, every: bool, read: float, layers: list[Layer]) -> list[dict[str, Any]]:
    arch = preset(model)
    x = torch.randn(rows, arch.hidden_size, dtype=torch.bfloat16, device="cuda")
    chosen, weights = choices(arch, rows)
    used = len(chosen.unique())
    each = layers[0][1]
    matrices = (*each.gate_up.tensors, *each.down.tensors)
    size = used * sum(tensor[0].nbytes for tensor in matrices if tensor is not None)
    operations = 2 * chosen.numel() * 3 * arch.hidden_size * arch.expert_size
    found = []
    for change in changes(arch, rows, every):
        name = "in use" if change is None else str(change)
        try:
            taken = microseconds(partial(run_layers, layers, x, chosen, weights, change)) / len(layers)
        except Exception as error:
            print(model, kind, rows, name, "failed:", str(error)[:100])
            continue
        share = size / read / (taken * 1e-6)
        found.append({"model": model, "kind": kind, "rows": rows, "shape": name, "us": taken, "of_the_limit": share})
        rate = operations / taken / 1e6
        print(f"{model} {kind} {rows:5} rows  {name:32} {taken:8.1f} µs  {share:4.0%} of reading {rate:7.1f} TFLOP/s")
    if rows <= router.MAX_ROWS:
        gain = torch.ones(arch.hidden_size, dtype=torch.bfloat16, device="cuda")
        counters = torch.zeros(rows, dtype=torch.int32, device="cuda")

        def choose_all() -> None:
            for mlp, _ in layers:
                counters.zero_()
                router.route(x, x, gain, 1e-6, mlp, counters)

        taken = microseconds(choose_all) / len(layers)
        found.append({"model": model, "kind": kind, "rows": rows, "shape": "router and memset", "us": taken})
        print(f"{model} {kind} {rows:5} rows  router and memset {taken:8.1f} µs")
    return found


def main() -> None:
    asked = arguments()
    models, kinds, rows = (text.split(",") for text in (asked.models, asked.kinds, asked.rows))
    need_device()
    tasks = [
        (model, kind, int(number), asked.shapes, part, 4)
        for model in models
        for kind in kinds
        for number in rows
        for part in range(4 if asked.shapes else 1)
    ]
    with multiprocessing.get_context("spawn").Pool(asked.processes) as pool:
        pool.map(compile_some, tasks, chunksize=1)
    read = bandwidth()
    print(f"a reduction reads {read / 1e12:.2f} TB/s")
    found = []
    for model in models:
        for kind in kinds:
            layers = make_layers(preset(model), kind)
            for number in rows:
                found += measure(model, kind, int(number), asked.shapes, read, layers)
            del layers
            torch.cuda.empty_cache()
    if asked.out:
        (asked.out / "experts.json").write_text(json.dumps({"read_gb_per_s": read / 1e9, "found": found}, indent=1))


if __name__ == "__main__":
    main()
