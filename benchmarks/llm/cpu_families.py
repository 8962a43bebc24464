"""Measures steps of networks beyond Llama's parts on a CPU: the C++ kernels beside Inductor and plain PyTorch.

    python benchmarks/llm/cpu_families.py [--shapes lfm2-350m,granite-4-h-1b] [--kinds float32,int8] [--rounds 5]

Networks have random weights that bfloat16 represents, and some have fewer layers and a smaller vocabulary than their
models. With integer weights, plain PyTorch calls the kernels for each layer. One thread; the subjects take turns, and
the result is the median of the CPU time of a step, so that other load on the machine counts little. Inductor compiles
each shape for a minute or more. The result is a dated JSON file.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "serving"))

import machine  # noqa: E402
import results  # noqa: E402
import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from flambeau.llm.backends import inductor  # noqa: E402
from flambeau.llm.backends.cpu.attention import choose_attention  # noqa: E402
from flambeau.llm.backends.cpu.bindings import kernels  # noqa: E402
from flambeau.llm.backends.cpu.network import CpuNetwork, can_compute  # noqa: E402
from flambeau.llm.backends.cpu.packed_linear import INT8_GROUP, ROUTER, pack_quantized  # noqa: E402
from flambeau.llm.backends.eager import EagerBackend  # noqa: E402
from flambeau.llm.executor.inputs import StepInputs  # noqa: E402
from flambeau.llm.executor.kv_cache import KVCache  # noqa: E402
from flambeau.llm.models.architecture import Architecture  # noqa: E402
from flambeau.llm.models.families.compression_shape import CompressionShape  # noqa: E402
from flambeau.llm.models.families.gate_limits import GateLimits  # noqa: E402
from flambeau.llm.models.families.hyper_shape import HyperShape  # noqa: E402
from flambeau.llm.models.families.recurrence import Recurrence  # noqa: E402
from flambeau.llm.models.transformer import Transformer  # noqa: E402

BLOCK_SIZE, CONTEXT, PROMPT, MAX_BLOCKS, PROPOSED = 16, 100, 256, 80, 4
LFM2_ATTENTION = frozenset({2, 5, 8, 10, 12, 14})
SHAPES: dict[str, dict[str, Any]] = {
    "lfm2-350m": {
        "vocab_size": 65536,
        "hidden_size": 1024,
        "num_layers": 16,
        "num_heads": 16,
        "num_kv_heads": 8,
        "head_size": 64,
        "intermediate_size": 4608,
        "qk_norm": True,
        "recurrence": Recurrence(
            kind="short_conv",
            layers=frozenset(range(16)) - LFM2_ATTENTION,
            inner_size=1024,
            conv_width=3,
            conv_bias=False,
        ),
    },
    "granite-4-h-1b": {  # 6 of 40 layers
        "vocab_size": 32768,
        "hidden_size": 1536,
        "num_layers": 6,
        "num_heads": 12,
        "num_kv_heads": 4,
        "head_size": 128,
        "intermediate_size": 4096,
        "residual_scale": 0.22,
        "unrotated_layers": frozenset(range(6)),
        "recurrence": Recurrence(
            kind="mamba2",
            layers=frozenset(range(5)),
            inner_size=3072,
            num_heads=48,
            head_size=64,
            state_size=128,
        ),
    },
    "mamba-370m": {  # 8 of 48 layers
        "vocab_size": 32768,
        "hidden_size": 1024,
        "num_layers": 8,
        "num_heads": 1,
        "num_kv_heads": 1,
        "head_size": 64,
        "intermediate_size": 0,
        "has_mlp": False,
        "recurrence": Recurrence(
            kind="mamba", layers=frozenset(range(8)), inner_size=2048, state_size=16, time_step_rank=64
        ),
    },
    "qwen-3.5-0.8b": {  # 4 of 24 layers
        "vocab_size": 32768,
        "hidden_size": 1024,
        "num_layers": 4,
        "num_heads": 8,
        "num_kv_heads": 2,
        "head_size": 256,
        "rotary_size": 64,
        "intermediate_size": 3584,
        "qk_norm": True,
        "gates_attention": True,
        "recurrence": Recurrence(
            kind="delta_net",
            layers=frozenset(range(3)),
            inner_size=2048,
            num_heads=16,
            head_size=128,
            state_size=128,
            num_groups=16,
            conv_bias=False,
            is_grouped=False,
        ),
    },
    "deepseek-v2-lite": {  # 2 of 27 layers, 16 of 64 experts
        "vocab_size": 16384,
        "hidden_size": 2048,
        "num_layers": 2,
        "num_heads": 16,
        "num_kv_heads": 1,
        "head_size": 576,
        "latent_size": 512,
        "rotary_size": 64,
        "unrotated_size": 128,
        "value_size": 128,
        "paired_rope": True,
        "intermediate_size": 10944,
        "num_experts": 16,
        "num_experts_per_token": 6,
        "expert_size": 1408,
        "shared_expert_size": 2816,
        "router": "grouped_softmax",
        "normalizes_experts": False,
        "dense_layers": frozenset({0}),
    },
    "ettin-150m": {  # 6 of 22 layers
        "vocab_size": 50368,
        "hidden_size": 768,
        "num_layers": 6,
        "num_heads": 12,
        "num_kv_heads": 12,
        "head_size": 64,
        "intermediate_size": 1152,
        "norm": "layer",
        "embedding_norm": True,
        "has_first_norm": False,
        "head_layer": "gelu",
        "tied_bias": True,
        "windows": tuple(64 if i % 3 else None for i in range(6)),
        "local_rope_theta": 10000.0,
        "rope_theta": 160000.0,
        "activation": "gelu",
    },
    "recurrent-gemma-2b": {  # 3 of 26 layers
        "vocab_size": 32768,
        "hidden_size": 2560,
        "num_layers": 3,
        "num_heads": 10,
        "num_kv_heads": 1,
        "head_size": 256,
        "intermediate_size": 7680,
        "output_bias": True,
        "mlp_bias": True,
        "norm_offset": 1.0,
        "rotary_size": 128,
        "activation": "gelu_tanh",
        "windows": (2048,) * 3,
        "logit_softcap": 30.0,
        "recurrence": Recurrence(
            kind="gated",
            layers=frozenset({0, 1}),
            inner_size=2560,
            num_heads=10,
            head_size=256,
            projection_bias=True,
        ),
    },
    "zamba-2-1.2b": {  # 3 of 38 layers, one of them with the block
        "vocab_size": 32000,
        "hidden_size": 2048,
        "num_layers": 3,
        "num_heads": 32,
        "num_kv_heads": 32,
        "head_size": 128,
        "attention_scale": 64**-0.5,
        "intermediate_size": 8192,
        "has_mlp": False,
        "activation": "gelu",
        "block_layers": (2,),
        "num_blocks": 1,
        "adapter_rank": 128,
        "adapts_attention": True,
        "recurrence": Recurrence(
            kind="mamba2", layers=frozenset(range(3)), inner_size=4096, num_heads=64, head_size=64, state_size=128
        ),
    },
    "rwkv-4-430m": {  # 4 of 24 layers
        "vocab_size": 32768,
        "hidden_size": 1024,
        "num_layers": 4,
        "num_heads": 1,
        "num_kv_heads": 1,
        "head_size": 2,
        "intermediate_size": 4096,
        "norm": "layer",
        "norm_bias": True,
        "embedding_norm": True,
        "has_gate": False,
        "recurrence": Recurrence(kind="rwkv", layers=frozenset(range(8)), inner_size=1024, state_size=1024),
    },
    "deepseek-v4": {  # 2 of 61 layers, narrower, 8 of 256 experts; no kernels compute it
        "vocab_size": 16384,
        "hidden_size": 2048,
        "num_layers": 2,
        "num_heads": 16,
        "num_kv_heads": 1,
        "head_size": 512,
        "rotary_size": 64,
        "query_latent_size": 768,
        "intermediate_size": 2048,
        "num_experts": 8,
        "num_experts_per_token": 6,
        "expert_size": 1024,
        "shared_expert_size": 1024,
        "router": "biased_sqrt_softplus",
        "routed_scale": 1.5,
        "gate_limits": GateLimits(kind="gates", experts=(10.0,), others=(10.0,)),
        "windows": (128,) * 2,
        "local_rope_theta": 10000.0,
        "hyper": HyperShape(num_streams=4, epsilon=1e-6, num_rounds=20),
        "compression": CompressionShape(
            rates=(4, 128),
            overlapping_layers=frozenset({0}),
            num_index_heads=16,
            index_size=128,
            num_chosen=512,
            num_output_groups=4,
            output_rank=512,
        ),
        "recurrence": Recurrence(
            kind="compressor",
            layers=frozenset({0, 1}),
            inner_size=512,
            state_size=128,
            is_beside_attention=True,
        ),
    },
}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default=",".join(SHAPES), help="networks (default %(default)s)")
    parser.add_argument("--kinds", default="float32,int8,int4", help="weights (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=results.REPOSITORY / "benchmarks" / "results")
    return parser.parse_args()


def make_model(shape: str, kind: str) -> Transformer:
    torch.manual_seed(0)
    arch = Architecture(max_length=2048, tied_embeddings=True, **SHAPES[shape])
    model = Transformer(arch).eval().requires_grad_(False)
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.normal_(std=0.02)
        weight.copy_(weight.bfloat16())
    for name, layer in [*model.named_modules()]:
        if kind != "float32" and type(layer) is nn.Linear and not name.endswith(ROUTER):
            model.set_submodule(name, pack_quantized(layer.weight, kind, INT8_GROUP if kind == "int8" else 64))
    return model


def make_step(context: int, num_sequences: int, num_tokens: int, *, has_states: bool) -> StepInputs:
    """So many tokens of each sequence, after those that it has."""
    num_blocks = -(-(context + num_tokens) // BLOCK_SIZE)
    tables = torch.arange(num_sequences * num_blocks).view(num_sequences, num_blocks) + 1
    positions = (torch.arange(num_tokens) + context).repeat(num_sequences)
    rows = torch.arange(num_sequences).repeat_interleave(num_tokens)
    return StepInputs(
        torch.randint(1000, (len(positions),)),
        positions,
        tables[rows, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE,
        torch.arange(num_sequences + 1) * num_tokens,
        torch.full((num_sequences,), context + num_tokens),
        tables,
        query_len=1 if num_tokens == 1 else 0,
        state_slots_S=torch.arange(num_sequences) + 1 if has_states else None,
    )


Run = Callable[[], Tensor]


def subjects(model: Transformer, kind: str) -> dict[str, dict[str, Run]]:
    """What computes each job, by the name of the subject."""
    arch = model.arch
    has_states, last = arch.recurrence is not None, torch.tensor([PROMPT - 1])
    steps = {f"decode {n}": make_step(CONTEXT, n, 1, has_states=has_states) for n in (1, 8)}
    prompt = make_step(0, 1, PROMPT, has_states=has_states)
    slots = {"num_slots": 8, "num_spare": PROPOSED} if has_states else {}
    caches = [KVCache(arch, 1 + MAX_BLOCKS, BLOCK_SIZE, **slots) for _ in range(2)]
    plain = EagerBackend(model, caches[0], choose_attention)
    jobs: dict[str, dict[str, Run]] = {name: {} for name in (*steps, f"prompt of {PROMPT}")}
    for name, step in steps.items():
        jobs[name]["plain"] = lambda step=step: plain.decode(step)
        if kind == "float32":
            count = min(2, len(step.ids_T))
            example = inductor.dummy_inputs(count, 1, 2, torch.device("cpu"), has_states=has_states)
            compiled = inductor.compile_step(model, caches[0], 1, choose_attention, example)
            jobs[name]["Inductor"] = lambda step=step, compiled=compiled: compiled(step)
    jobs[f"prompt of {PROMPT}"]["plain"] = lambda: plain.prefill(prompt, last)
    if arch.compression is not None:
        return jobs
    assert can_compute(model, caches[1]), arch.extras
    network = CpuNetwork(model, caches[1])
    for name, step in steps.items():
        jobs[name]["kernels"] = lambda step=step: network.run(step)
    jobs[f"prompt of {PROMPT}"]["kernels"] = lambda: network.run(prompt, last)
    verified = make_step(CONTEXT, 1, 1 + PROPOSED, has_states=has_states)
    verified.query_len = 1 + PROPOSED
    jobs[f"{PROPOSED} proposed tokens"] = {"kernels": lambda: network.run(verified)}
    if has_states:  # after each token, and only after the last one
        with_states = replace(verified, state_ends_T=torch.tensor([1, *range(9, 9 + PROPOSED)]))
        found = jobs[f"{PROPOSED} proposed tokens"]
        found |= {"plain, their states": lambda: plain.decode(with_states)}
        found |= {"kernels, their states": lambda: network.run(with_states)}
    return jobs


def measure(runs: dict[str, Run], rounds: int) -> dict[str, float]:
    """The median CPU time of each, in ms; the first round does not count."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds + 1):
        for name, run in runs.items():
            started = time.process_time()
            run()
            times[name].append(1000 * (time.process_time() - started))
    return {name: round(statistics.median(found[1:]), 2) for name, found in times.items()}


def main() -> None:
    asked, began = arguments(), time.monotonic()
    torch.set_num_threads(1)
    if not kernels.load():
        sys.exit("the CPU kernels cannot be built here")
    before = machine.Usage.now({})
    figures: dict[str, dict[str, float]] = {}
    with torch.inference_mode():
        for shape in asked.shapes.split(","):
            for kind in asked.kinds.split(","):
                for job, runs in subjects(make_model(shape, kind), kind).items():
                    name = f"{shape}, {kind}, {job}"
                    figures[name] = measure(runs, asked.rounds)
                    print(f"{name:40} {figures[name]}", file=sys.stderr, flush=True)
    noise = machine.cores_between(before, machine.Usage.now({}))
    date = datetime.now(UTC)
    result: dict[str, Any] = {
        "date": date.isoformat(timespec="seconds"),
        "command": " ".join(["python", "benchmarks/llm/cpu_families.py", *sys.argv[1:]]),
        "duration_s": round(time.monotonic() - began),
        "machine": machine.describe(),
        "versions": results.versions(Path(sys.executable), Path("none")),
        "threads": 1,
        "shapes": {name: repr(shape) for name, shape in SHAPES.items()},
        "other_cores": noise["other_cores"],
        "noisy": noise["noisy"],
        "cpu_ms": figures,
    }
    asked.out.mkdir(parents=True, exist_ok=True)
    file = asked.out / f"{date:%Y-%m-%d-%H%M}-llm-cpu-families.json"
    file.write_text(json.dumps(result, indent=2) + "\n")
    print(file)


if __name__ == "__main__":
    main()
