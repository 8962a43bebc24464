"""Measures products with scales of groups (fp8 blocks, MXFP4, nf4, GGUF's types) on a GPU beside other weights.

    python benchmarks/llm/group_scaled.py [--gguf] [--shapes] [--rows 1,32] [--out FOLDER]

With --gguf only Q4_K, Q6_K and Q8_0 beside bfloat16, int8 and int4, in linear layers: less than two minutes.
Linear layers have the shapes of Llama-2-7B, experts those of gpt-oss-20b and Qwen3-30B-A3B. Layers with weights of
their own are run one after another in a CUDA graph, so that nothing stays in the GPU's cache. "of reading" is the time
that a plain reduction takes to read as many bytes, relative to the time measured. With --shapes, other shapes of
programs are measured too. Kernels are compiled by several processes beforehand. With --out, a dated JSON file is
written after each figure.
"""

import argparse
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))

from cuda_device import need_device
from experts import bandwidth, choices, microseconds
from kept_results import KeptResults

from flambeau.llm.backends.cuda import group_scaled, group_scaled_experts
from flambeau.llm.backends.cuda.code_instructions import Codes
from flambeau.llm.backends.cuda.experts import ExpertWeights, KernelExperts
from flambeau.llm.backends.cuda.group_scaled import RowsShape, widened
from flambeau.llm.backends.cuda.group_scaled_experts import GroupScaledExperts, GroupScaledWeights
from flambeau.llm.backends.cuda.linear_choice import kernel_linear
from flambeau.llm.models.presets import preset
from flambeau.llm.quantize.coded import FP4, CodedLinear, CodeLayout, CudaCodedLinear, table_tensor
from flambeau.llm.quantize.cuda_groups import CudaGroupedLinear
from flambeau.llm.quantize.groups import GroupedLinear, GroupLayout
from flambeau.llm.quantize.int4 import Int4Linear
from flambeau.llm.quantize.packed_layers import CudaInt4Linear
from flambeau.llm.quantize.row_scaled import Fp8Linear, Int8Linear

BYTES = 500 << 20  # of all layers that are run one after another
LINEAR = {"qkv": (12288, 4096, False), "gate_up": (22016, 4096, True), "down": (4096, 11008, False)}
EXPERTS = {"gpt-oss-20b": (32, 2880, 2880, 4), "Qwen3-30B-A3B": (128, 2048, 768, 8)}  # number, hidden, own size, chosen
KINDS = ("bfloat16", "fp8", "int4", "fp8 blocks", "MXFP4", "nf4")
LEVELS = {
    "Q4_K": GroupLayout(4, 32, True, 8),
    "Q6_K": GroupLayout(6, 16, False, 8),
    "Q8_0": GroupLayout(8, 32, False, 16),
}
GGUF_KINDS = ("bfloat16", "int8", "int4", *LEVELS)
TABLES = {"MXFP4": FP4, "nf4": tuple((i - 7) / 8 for i in range(16))}
GROUPS = {"MXFP4": 32, "nf4": 64, "fp8 blocks": 128}
ONE_ROW = {
    "fp8 blocks": [(2, 1024, 4), (4, 512, 4), (8, 512, 4), (2, 2048, 4), (1, 1024, 2), (4, 1024, 2)],
    "MXFP4": [(4, 1024, 2), (2, 2048, 4), (8, 512, 2), (4, 2048, 4), (2, 1024, 2), (1, 2048, 2)],
    "nf4": [(4, 1024, 2), (2, 2048, 4), (2, 1024, 2)],
    "Q4_K": [(4, 1024, 2), (2, 2048, 4), (8, 512, 2), (2, 1024, 2), (1, 2048, 2), (4, 1024, 4)],
    "Q6_K": [(4, 1024, 2), (2, 2048, 4), (8, 512, 2), (2, 1024, 2), (1, 2048, 2), (4, 1024, 4)],
    "Q8_0": [(2, 1024, 4), (4, 512, 4), (8, 512, 4), (2, 2048, 4), (4, 1024, 2)],
}
ROWS = {
    "fp8 blocks": [
        RowsShape(32, 128, 4, 4), RowsShape(64, 128, 4, 5), RowsShape(128, 128, 8, 3),
        RowsShape(64, 128, 4, 4, weights_first=True), RowsShape(64, 128, 8, 4),
    ],
    "MXFP4": [
        RowsShape(64, 256, 4, 3), RowsShape(128, 128, 4, 3), RowsShape(64, 128, 4, 4, weights_first=True),
        RowsShape(128, 256, 8, 3), RowsShape(32, 256, 4, 4), RowsShape(128, 128, 4, 4, weights_first=True),
    ],
    "nf4": [RowsShape(128, 128, 4, 3), RowsShape(64, 128, 4, 4, weights_first=True)],
    "Q4_K": [RowsShape(64, 256, 4, 3), RowsShape(128, 128, 4, 3), RowsShape(64, 128, 4, 4, weights_first=True)],
    "Q6_K": [RowsShape(64, 256, 4, 3), RowsShape(128, 128, 4, 3), RowsShape(64, 128, 4, 4, weights_first=True)],
    "Q8_0": [RowsShape(64, 64, 4, 4), RowsShape(128, 128, 8, 3), RowsShape(64, 128, 4, 4, weights_first=True)],
}  # fmt: skip
TILES = {
    "fp8 blocks": [RowsShape(32, 128, 4, 4), RowsShape(64, 128, 4, 4), RowsShape(128, 128, 8, 3)],
    "MXFP4": [
        RowsShape(64, 256, 4, 3), RowsShape(32, 128, 4, 4), RowsShape(32, 256, 4, 3), RowsShape(64, 64, 4, 5),
        RowsShape(128, 128, 8, 3),
    ],
}  # fmt: skip
Run = Callable[[], object]
Changes = dict[Any, dict[str, Any]]  # functions of modules, and what they are to return


def some_bytes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")


def linear_of(kind: str, outputs: int, inputs: int, *, gates: bool) -> Any:
    with torch.device("meta"):
        plain = nn.Linear(inputs, outputs, bias=False, dtype=torch.bfloat16)
        fp8 = Fp8Linear(inputs, outputs, num_groups=inputs // 128 if kind == "fp8 blocks" else None)
        int4 = Int4Linear(inputs, outputs, group_size=64)
        int8 = Int8Linear(inputs, outputs)
        coded = CodedLinear(inputs, outputs, CodeLayout(TABLES.get(kind, FP4), GROUPS.get(kind, 32)))
    layer: nn.Module
    if kind in LEVELS:
        layer = leveled(outputs, inputs, LEVELS[kind])
    elif kind == "int8":
        int8.weight = some_bytes(outputs, inputs).view(torch.int8)
        int8.scale = torch.full(int8.scale.shape, 0.01, dtype=int8.scale.dtype, device="cuda")
        layer = int8
    elif kind in TABLES:
        coded.weight, coded.scales = some_bytes(outputs, inputs // 2), torch.full(coded.scales.shape, 0.01).cuda()
        layer = CudaCodedLinear(coded)
    elif kind.startswith("fp8"):
        fp8.weight = (some_bytes(outputs, inputs) & 0xB7).view(torch.float8_e4m3fn)
        fp8.scale = torch.full(fp8.scale.shape, 0.01, device="cuda")
        layer = fp8
    elif kind == "int4":
        int4.weight = some_bytes(outputs, inputs // 2)
        int4.scales = torch.full(int4.scales.shape, 0.01, dtype=torch.bfloat16, device="cuda")
        int4.minimums = -8 * int4.scales
        layer = CudaInt4Linear(int4)
    else:
        weight = torch.empty(outputs, inputs, dtype=torch.bfloat16, device="cuda").normal_(std=0.02)
        plain.weight = nn.Parameter(weight, requires_grad=False)
        layer = plain
    return kernel_linear(layer, gates=gates)


def leveled(outputs: int, inputs: int, layout: GroupLayout) -> nn.Module:
    """Random levels, as from a GGUF file."""
    with torch.device("cuda"):
        plain = GroupedLinear(inputs, outputs, layout)
        plain.weight.random_(0, 1 << layout.bits)
        for scales in (plain.scales, plain.minimums):
            if scales is not None:
                scales.fill_(1 if scales.dtype == torch.int8 else 0.01)
        if plain.factors is not None:
            plain.factors.fill_(0.01)
    return CudaGroupedLinear(plain)


def experts_of(kind: str, count: int, hidden: int, size: int) -> Any:
    def matrix(rows: int, columns: int) -> Any:
        bias = torch.zeros(count, rows, dtype=torch.bfloat16, device="cuda")
        if kind in TABLES:
            group, layout = GROUPS[kind], CodeLayout(TABLES[kind], GROUPS[kind])
            scales = torch.full((count, rows, columns // group), 0.01, dtype=torch.bfloat16, device="cuda")
            codes = Codes(layout, table_tensor(layout, scales.device))
            weight = some_bytes(count, rows, columns // 2)
            return GroupScaledWeights(weight=weight, scales=scales, codes=codes, group_size=group, bias=bias)
        if kind == "fp8 blocks":
            scales = torch.full((count, rows, columns // 128), 0.01, device="cuda")
            weight = (some_bytes(count, rows, columns) & 0xB7).view(torch.float8_e4m3fn)
            return GroupScaledWeights(weight=weight, scales=scales, group_size=128, bias=bias)
        if kind == "int4":
            scale = torch.full((count, rows, columns // 64), 0.01, dtype=torch.bfloat16, device="cuda")
            weight = some_bytes(count, rows, columns // 2)
            return ExpertWeights(weight=weight, scale=scale, minimums=-8 * scale, group_size=64, bias=bias)
        if kind == "fp8":
            weight = (some_bytes(count, rows, columns) & 0xB7).view(torch.float8_e4m3fn)
            return ExpertWeights(weight=weight, scale=torch.full((count, rows), 0.01, device="cuda"), bias=bias)
        weight = torch.empty(count, rows, columns, dtype=torch.bfloat16, device="cuda").normal_(std=0.02)
        return ExpertWeights(weight=weight, bias=bias)

    make: Any = GroupScaledExperts if kind in GROUPS else KernelExperts
    return make(gate_up=matrix(2 * size, hidden), down=matrix(hidden, size), limit=7.0, alpha=1.702)


@contextmanager
def applied(changes: Changes) -> Iterator[None]:
    usual = {(module, name): getattr(module, name) for module, names in changes.items() for name in names}
    for module, names in changes.items():
        for name, value in names.items():
            setattr(module, name, lambda *_, value=value, **__: value)
    try:
        yield
    finally:
        for (module, name), function in usual.items():
            setattr(module, name, function)


def shapes_for(kind: str, rows: int, every: bool, *, has_experts: bool) -> list[tuple[str, Changes]]:
    """What is measured: the shapes in use, and others."""
    found: list[tuple[str, Changes]] = [("in use", {})]
    if not every or kind not in ONE_ROW:
        return found
    if rows == 1:
        module: Any = group_scaled_experts if has_experts else group_scaled
        return found + [(str(shape), {module: {"one_row_shape": shape}}) for shape in ONE_ROW[kind]]
    if has_experts:
        return found + [(words(s), {group_scaled_experts: {"tile_shape": s}}) for s in TILES.get(kind, [])]
    return found + [(words(s), {group_scaled: {"rows_shape": s}}) for s in ROWS[kind]]


def words(shape: RowsShape) -> str:
    order = ", weights first" if shape.weights_first else ""
    return f"({shape.columns}, {shape.block}, {shape.warps}, {shape.stages}{order})"


def cases(rows: list[int], every: bool, gguf: bool) -> Iterator[tuple[str, str, int, str, Changes]]:
    for name in LINEAR if gguf else (*LINEAR, *EXPERTS):
        for kind in GGUF_KINDS if gguf else KINDS:
            if name in EXPERTS and kind == "nf4":
                continue
            for number in rows:
                for shape, changes in shapes_for(kind, number, every, has_experts=name in EXPERTS):
                    yield name, kind, number, shape, changes


def prepare(name: str, kind: str, count: int | None = None) -> tuple[list[Any], int]:
    """Layers, and the bytes of one; of experts, those of all."""
    if name in LINEAR:
        outputs, inputs, gates = LINEAR[name]
        first = linear_of(kind, outputs, inputs, gates=gates)
        others = getattr(first, "more", None), getattr(first, "factors", None)
        tensors = first.weight, first.scale, first.minimums, *others
        size = sum(each.nbytes for each in tensors if each is not None)
        layers = [first, *(linear_of(kind, outputs, inputs, gates=gates) for _ in range((count or BYTES // size) - 1))]
        return layers, size
    number, hidden, own, _ = EXPERTS[name]
    made = experts_of(kind, number, hidden, own)
    size = sum(each.nbytes for each in (*made.gate_up.tensors, *made.down.tensors) if each is not None)
    return [made, *(experts_of(kind, number, hidden, own) for _ in range((count or 3) - 1))], size


def run_of(name: str, layers: list[Any], rows: int) -> tuple[Run, float]:
    """What runs all layers once, and the share of their bytes that it reads."""
    if name in LINEAR:
        x = torch.randn(rows, LINEAR[name][1], dtype=torch.bfloat16, device="cuda")
        return lambda: [layer(x) for layer in layers], 1.0
    number, hidden, _, chosen_each = EXPERTS[name]
    x = torch.randn(rows, hidden, dtype=torch.bfloat16, device="cuda")
    arch = replace(preset("Mixtral-8x7B"), num_experts=number, num_experts_per_token=chosen_each)
    torch.manual_seed(0)
    all_chosen = [choices(arch, rows) for _ in layers]
    share = sum(len(chosen.unique()) for chosen, _ in all_chosen) / len(layers) / number
    return lambda: [layer(x, *given) for layer, given in zip(layers, all_chosen, strict=True)], share


def compile_some(task: tuple[list[int], bool, bool, int, int]) -> None:
    """Compile a part of the kernels, which are kept in the compiler's cache."""
    rows, every, gguf, number, count = task
    made: dict[tuple[str, str], list[Any]] = {}
    for name, kind, num_rows, shape, changes in [*cases(rows, every, gguf)][number::count]:
        if (name, kind) not in made:
            made = {(name, kind): prepare(name, kind, 1)[0]}
        try:
            with applied(changes):
                run_of(name, made[name, kind], num_rows)[0]()
        except Exception as error:
            print("not compiled:", name, kind, num_rows, shape, str(error)[:100], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,32", help="default: %(default)s")
    parser.add_argument("--gguf", action="store_true", help="measure types of GGUF files instead")
    parser.add_argument("--shapes", action="store_true", help="measure all shapes, not only those in use")
    parser.add_argument("--processes", type=int, default=12, help="that compile (default %(default)s)")
    parser.add_argument("--out", type=Path, help="a folder for the result")
    asked = parser.parse_args()
    need_device()
    rows = [int(each) for each in asked.rows.split(",")]
    tasks = [(rows, asked.shapes, asked.gguf, number, asked.processes) for number in range(asked.processes)]
    with multiprocessing.get_context("spawn").Pool(asked.processes) as pool:
        pool.map(compile_some, tasks, chunksize=1)
    print("compiled", flush=True)
    read, found = bandwidth(), []
    figures = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "read_gb_per_s": read / 1e9}
    name = "llm-group-scaled-gguf" if asked.gguf else "llm-group-scaled"
    kept = KeptResults(asked.out, name, {**figures, "found": found})
    print(f"a reduction reads {read / 1e12:.2f} TB/s", flush=True)
    layers: list[Any] = []
    size, before = 0, ("", "")
    for name, kind, number, shape, changes in cases(rows, asked.shapes, asked.gguf):
        try:
            if (name, kind) != before:
                layers.clear()
                torch.cuda.empty_cache()
                layers, size = prepare(name, kind)
                before = name, kind
            run, share = run_of(name, layers, number)
            with applied(changes):
                taken = microseconds(run, replays=4) / len(layers)
        except Exception as error:
            print(name, kind, number, shape, "failed:", str(error)[:200], flush=True)
            continue
        part = share * size / read / (taken * 1e-6)
        found.append({"layer": name, "kind": kind, "rows": number, "shape": shape, "us": taken, "of_reading": part})
        kept.save()
        print(f"{name:14} {kind:10} {number:3} rows  {shape:36} {taken:8.1f} µs {part:5.0%} of reading", flush=True)
    for kind in LEVELS if asked.gguf else GROUPS:
        with kept.part(f"copies of {kind}"):
            layers, size = prepare("gate_up", kind, 2)
            taken = microseconds(lambda layers=layers: [widened(each, torch.bfloat16) for each in layers]) / 2
            found.append({"layer": "gate_up", "kind": kind, "shape": "copy in 16 bits", "us": taken})
            print(f"gate_up        {kind:10} copy in 16 bits {taken:8.1f} µs", flush=True)
    print(kept.file or "no --out: nothing is kept")


if __name__ == "__main__":
    main()
