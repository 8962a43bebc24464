"""Measures networks of several families on a GPU, with random weights of published sizes, beside the memory's ceiling.

    python benchmarks/llm/gpu_families.py [--families gpt-oss-20b,Phi-4] [--streams 1,32] [--kernels]

The engine is the whole one, as in `gpu.py`, which says what the ceiling is. Of families that do not fit into memory,
some layers are measured; their embeddings and vocabulary are whole. Kernels are compiled by several processes
beforehand. With --kernels, graph replays of one step follow, and how much later each kernel of the middle layer ends
than the one before it; kernels overlap. With --inductor, the same step by Inductor's kernels; with --prompt, a prompt
of so many tokens by the kernels and in plain PyTorch. Networks with recurrent layers:

    python benchmarks/llm/gpu_families.py --families recurrent --no-engine --layers 8 --prompt 2048 [--inductor]

The result is a dated JSON file.
"""

import argparse
import gc
import json
import multiprocessing
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "serving")]

import gpu  # noqa: E402
import machine  # noqa: E402
import results  # noqa: E402
import torch  # noqa: E402
from cuda_device import need_device  # noqa: E402
from recurrent_configs import RECURRENT_CONFIGS  # noqa: E402

from flambeau.llm.backends import inductor  # noqa: E402
from flambeau.llm.backends.cuda.backend import triton_attention  # noqa: E402
from flambeau.llm.backends.cuda.network import CudaNetwork  # noqa: E402
from flambeau.llm.backends.eager import EagerBackend  # noqa: E402
from flambeau.llm.executor.background_compiler import summary  # noqa: E402
from flambeau.llm.executor.inputs import StepInputs  # noqa: E402
from flambeau.llm.executor.kv_cache import KVCache, block_bytes  # noqa: E402
from flambeau.llm.executor.state_cache import state_bytes  # noqa: E402
from flambeau.llm.models.architecture import Architecture  # noqa: E402
from flambeau.llm.models.hugging_face import from_hugging_face  # noqa: E402
from flambeau.llm.models.presets import PRESETS, preset  # noqa: E402
from flambeau.llm.quantize.packed_layers import use_fast_layers  # noqa: E402
from flambeau.llm.quantize.quantizer import quantize  # noqa: E402

Figures = dict[str, Any]

CONTEXT = 200  # tokens of a step that is replayed
BLOCK_SIZE = 16
DEEPSEEK_ROPE = {
    "rope_type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
GPT_OSS: Mapping[str, Any] = {
    "model_type": "gpt_oss",
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "attention_bias": True,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000,
    "rope_scaling": GPT_OSS_ROPE,
    "swiglu_limit": 7.0,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}
CONFIGS: Mapping[str, Mapping[str, Any]] = {  # as published, without what changes no shape
    **RECURRENT_CONFIGS,
    "gpt-oss-20b": {**GPT_OSS, "num_hidden_layers": 24, "num_local_experts": 32},
    "gpt-oss-120b": {**GPT_OSS, "num_hidden_layers": 36, "num_local_experts": 128},
    "DeepSeek-V2-Lite": {
        "model_type": "deepseek_v2",
        "vocab_size": 102400,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "kv_lora_rank": 512,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 1,
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "rope_scaling": DEEPSEEK_ROPE,
        "max_position_embeddings": 163840,
        "tie_word_embeddings": False,
    },
    "Gemma-2-9B": {
        "model_type": "gemma2",
        "vocab_size": 256000,
        "hidden_size": 3584,
        "intermediate_size": 14336,
        "num_hidden_layers": 42,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "sliding_window": 4096,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 8192,
    },
    "Gemma-3-12B": {
        "model_type": "gemma3_text",
        "vocab_size": 262208,
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "query_pre_attn_scalar": 256,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
        "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "max_position_embeddings": 131072,
    },
    "Phi-3-mini": {
        "model_type": "phi3",
        "vocab_size": 32064,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "sliding_window": 2047,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    },
    "Phi-4": {
        "model_type": "phi3",
        "vocab_size": 100352,
        "hidden_size": 5120,
        "intermediate_size": 17920,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 10,
        "rms_norm_eps": 1e-5,
        "rope_theta": 250000,
        "max_position_embeddings": 16384,
        "original_max_position_embeddings": 16384,
        "tie_word_embeddings": False,
    },
    "GLM-4-9B": {
        "model_type": "glm4",
        "vocab_size": 151552,
        "hidden_size": 4096,
        "intermediate_size": 13696,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
    },
    "GLM-4.5-Air": {
        "model_type": "glm4_moe",
        "vocab_size": 151552,
        "hidden_size": 4096,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
        "use_qk_norm": False,
        "n_routed_experts": 128,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    },
}
LAYERS = {  # of networks that are too large
    "gpt-oss-120b": 12,
    "GLM-4.5-Air": 12,
    "Mixtral-8x7B": 16,
    "Qwen3-Next-80B-A3B": 16,
    "Jamba": 16,
}
FAMILIES = tuple(name for name in CONFIGS if name not in RECURRENT_CONFIGS)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(FAMILIES), help="or presets (default %(default)s)")
    parser.add_argument("--quantization", default="none", help="default: %(default)s")
    parser.add_argument("--streams", default="1,32", help="default: %(default)s")
    parser.add_argument("--settings", default="greedy,sampled", help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=150, help="new tokens of each stream (default %(default)s)")
    parser.add_argument("--layers", type=int, help="of each network, for a trial")
    parser.add_argument("--no-engine", action="store_true", help="only graph replays")
    parser.add_argument("--kernels", action="store_true", help="print the kernels of a layer of graph replays, too")
    parser.add_argument("--inductor", action="store_true", help="measure Inductor's steps beside graph replays")
    parser.add_argument("--prompt", type=int, default=0, help="tokens of a prompt beside graph replays")
    parser.add_argument("--processes", type=int, default=12, help="that compile, or 0 (default %(default)s)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=results.REPOSITORY / "benchmarks" / "results")
    return parser.parse_args()


def architecture(family: str) -> Architecture:
    """The whole network of a family."""
    config = CONFIGS.get(family)
    return preset(family) if config is None else from_hugging_face({**config, "torch_dtype": "bfloat16"})


def with_layers(arch: Architecture, num_layers: int) -> Architecture:
    """The first layers of a network."""
    cut = {
        name: value[:num_layers]
        for name in Architecture.__dataclass_fields__
        if isinstance(value := getattr(arch, name), tuple) and len(value) == arch.num_layers
    }
    names = ("unrotated_layers", "dense_layers", "feed_forward_layers")
    sets = {name: frozenset(i for i in getattr(arch, name) if i < num_layers) for name in names}
    recurrence = arch.recurrence
    if recurrence is not None:
        recurrence = replace(recurrence, layers=frozenset(i for i in recurrence.layers if i < num_layers))
    return replace(arch, num_layers=num_layers, recurrence=recurrence, **cut, **sets)


def few_layers(arch: Architecture) -> Architecture:
    """Enough layers to have one of each kind."""
    has_kinds = len(set(arch.windows)) > 1 or arch.recurrence is not None
    return with_layers(arch, min(arch.num_layers, 8 if has_kinds else 2))


def make_model(arch: Architecture, kind: str, device: str) -> Any:
    model = gpu.random_network(arch, device, torch.bfloat16)
    for name, parameter in model.named_parameters():
        if name.endswith("gate.weight") and parameter.dim() == 2:
            parameter.normal_(std=0.1)  # scores that differ: experts of random networks are chosen evenly
    if kind != "none":
        quantize(model, kind)
    use_fast_layers(model, torch.bfloat16)
    return model


def cases(asked: argparse.Namespace) -> list[gpu.Case]:
    numbers = gpu.numbers_of(asked.streams)
    return [gpu.Case(number, gpu.SHORT, name, asked.tokens) for number in numbers for name in asked.settings.split(",")]


def make_engine(model: Any, wanted: list[gpu.Case]) -> Any:
    """An engine whose graphs are captured."""
    length = gpu.SHORT + max(case.tokens for case in wanted) + 32
    engine = gpu.new_engine(model, max(case.streams for case in wanted), length)
    for case in [*wanted, *wanted]:  # what has been compiled is captured by the next steps
        gpu.measure(engine, replace(case, tokens=8))
        engine.wait_until_compiled()
    return engine


def compile_family(task: tuple[str, str, argparse.Namespace]) -> str:
    """Compile what a family needs, which is kept in the compiler's cache."""
    family, kind, asked = task
    try:
        began = time.monotonic()
        arch = few_layers(architecture(family))
        with torch.inference_mode():
            model = make_model(arch, kind, asked.device)
            if asked.no_engine:
                for number in gpu.numbers_of(asked.streams):
                    network, inputs, cache = network_and_inputs(model, number)
                    network.run(inputs)
                    if asked.inductor:
                        inductor_step(model, cache, inputs)
                if asked.prompt:
                    network, inputs, _ = network_and_inputs(model, 1, asked.prompt)
                    network.prefill(inputs, inputs.query_starts[1:] - 1)
            else:
                make_engine(model, cases(asked)).close()
        torch.cuda.synchronize()
        return f"{family} {kind}: compiled in {time.monotonic() - began:.0f} s"
    except Exception as error:
        return f"{family} {kind}: not compiled: {summary(error)}"


def step_inputs(num_sequences: int, num_tokens: int = 0, *, has_states: bool = False) -> StepInputs:
    """A step of sequences with CONTEXT tokens, whose blocks lie anywhere; or of new ones with `num_tokens`."""
    length = num_tokens or CONTEXT
    each, new = -(-length // BLOCK_SIZE), num_tokens or 1
    tables_SB = (torch.randperm(num_sequences * each, device="cuda") + 1).view(num_sequences, each)
    positions_Q = torch.arange(length - new, length, device="cuda")
    slots_SQ = tables_SB[:, positions_Q // BLOCK_SIZE] * BLOCK_SIZE + positions_Q % BLOCK_SIZE
    starts = torch.arange(num_sequences + 1, device="cuda") * new
    ids_T = torch.randint(0, 30000, (num_sequences * new,), device="cuda")
    return StepInputs(
        ids_T,
        positions_Q.repeat(num_sequences),
        slots_SQ.flatten(),
        starts,
        torch.full((num_sequences,), length, device="cuda"),
        tables_SB,
        query_len=0 if num_tokens else 1,
        state_slots_S=torch.arange(1, num_sequences + 1, device="cuda") if has_states else None,
    )


def network_and_inputs(model: Any, num_sequences: int, num_tokens: int = 0) -> tuple[Any, StepInputs, KVCache]:
    has_states = model.arch.recurrence is not None
    inputs = step_inputs(num_sequences, num_tokens, has_states=has_states)
    blocks, slots = inputs.block_tables_SB.numel() + 1, num_sequences if has_states else 0
    cache = KVCache(model.arch, blocks, BLOCK_SIZE, device="cuda", dtype=torch.bfloat16, num_slots=slots)
    for tensor in (*cache.keys, *cache.values):
        tensor.normal_()
    return CudaNetwork(model, cache), inputs, cache


def inductor_step(model: Any, cache: KVCache, inputs: StepInputs) -> Any:
    """A compiled step: what a network without kernels gets."""
    return inductor.compile_step(model, cache, 1, triton_attention, inputs)


def captured(run: Any) -> Any:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def replay_ms(graph: Any, replays: int = 20) -> float:
    times = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / replays)
    return sorted(times)[2]


def layer_kernels(graph: Any, num_layers: int) -> list[tuple[str, float, float]]:
    """The kernels of the layer in the middle: name, duration, and how much later each ends than the one before it."""
    graph.replay()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
    events = sorted((e for e in profile.events() if e.device_type.name == "CUDA"), key=lambda e: e.time_range.end)
    events = events[len(events) // 3 : 2 * len(events) // 3]  # one replay
    each = max(1, len(events) // num_layers)
    middle = len(events) // 2
    found = []
    for i in range(middle, min(middle + each + 2, len(events))):
        later = events[i].time_range.end - events[i - 1].time_range.end
        found.append((events[i].name, events[i].time_range.elapsed_us(), later))
    return found


def bytes_read(model: Any, num_sequences: int) -> float:
    """What a step reads, if each row chooses its experts evenly."""
    arch, share = model.arch, 1.0
    if arch.num_experts:
        share -= (1 - arch.num_experts_per_token / arch.num_experts) ** num_sequences
    cached = CONTEXT * block_bytes(arch, 1, torch.bfloat16) + 2 * state_bytes(arch)  # states are written, too
    return gpu.weight_bytes(model, share) + num_sequences * cached


@torch.inference_mode()
def measure_kernels(model: Any, asked: argparse.Namespace, read: float) -> Figures:
    found: Figures = {}
    for number in gpu.numbers_of(asked.streams):
        network, inputs, cache = network_and_inputs(model, number)
        graph = captured(lambda network=network, inputs=inputs: network.run(inputs))
        taken = replay_ms(graph)
        kernels = layer_kernels(graph, model.arch.num_layers)
        limit = 1e3 * bytes_read(model, number) / read
        found[str(number)] = {"ms": taken, "limit_ms": limit, "kernels": kernels}
        print(f"  {number} rows: a step {taken:.3f} ms, {limit / taken:.0%} of the limit", flush=True)
        for name, duration, later in kernels:
            print(f"    {duration:8.2f} us, ends {later:7.2f} later  {name[:70]}")
        if asked.inductor:
            step = inductor_step(model, cache, inputs)
            found[str(number)]["inductor_ms"] = replay_ms(captured(lambda step=step, inputs=inputs: step(inputs)))
            print(f"  {number} rows: a step by Inductor {found[str(number)]['inductor_ms']:.3f} ms", flush=True)
        del network, graph, cache
    if asked.prompt:
        found["prompt"] = measure_prompt(model, asked.prompt)
    return found


def measure_prompt(model: Any, num_tokens: int) -> Figures:
    """The times of a prompt by the kernels and in plain PyTorch."""
    network, inputs, cache = network_and_inputs(model, 1, num_tokens)
    rows = inputs.query_starts[1:] - 1
    times = {}
    for name, computing in (("kernels", network), ("plain", EagerBackend(model, cache))):
        runs = [gpu.seconds_of(lambda each=computing: each.prefill(inputs, rows), "cuda") for _ in range(4)]
        seconds = min(runs[1:])
        times[f"{name}_ms"] = 1e3 * seconds
        print(f"  a prompt of {num_tokens} tokens, {name}: {1e3 * seconds:.2f} ms", flush=True)
    return {"tokens": num_tokens, **times}


def measure_family(family: str, kind: str, asked: argparse.Namespace, read: float) -> Figures:
    whole = architecture(family)
    arch = with_layers(whole, asked.layers or LAYERS.get(family, whole.num_layers))
    model = make_model(arch, kind, asked.device)
    found: Figures = {
        "layers": arch.num_layers,
        "of_layers": whole.num_layers,
        "weights_gb": gpu.weight_bytes(model) / 1e9,
        "figures": {},
    }
    if not asked.no_engine:
        wanted = cases(asked)
        engine = make_engine(model, wanted)
        for case in wanted:
            figure = gpu.measure(engine, case)
            share = gpu.chosen_share(engine, case, model)
            limit = gpu.ceiling(case, model, read, share)
            found["figures"][case.name] = {**figure, "experts_read": share, "ceiling_tokens_per_s": limit}
            rate = figure["tokens_per_s"]
            print(f"{family} {kind} {case.name}: {rate:,.1f} tokens/s, {rate / limit:.0%} of the ceiling", flush=True)
        engine.close()
    if asked.kernels or asked.no_engine:
        print(f"{family} {kind}, {arch.num_layers} layers, {found['weights_gb']:.1f} GB")
        found["steps"] = measure_kernels(model, asked, read)
    return found


def main() -> None:
    asked, began = arguments(), time.monotonic()
    names = asked.families.replace("recurrent", ",".join(RECURRENT_CONFIGS))
    families, kinds = names.split(","), asked.quantization.split(",")
    unknown = {*families} - {*CONFIGS, *PRESETS}
    if unknown:
        raise SystemExit(f"unknown: {', '.join(unknown)}")
    need_device(asked.device)
    if asked.processes:
        with multiprocessing.get_context("spawn").Pool(asked.processes) as pool:
            for line in pool.imap_unordered(compile_family, [(f, kind, asked) for f in families for kind in kinds]):
                gpu.progress(line)
    date = datetime.now(UTC)
    read = gpu.bandwidth(asked.device)
    result: Figures = {
        "date": date.isoformat(timespec="seconds"),
        "command": f"python benchmarks/llm/gpu_families.py {gpu.command_line(sys.argv[1:])}".strip(),
        "machine": machine.describe(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "read_gb_per_s": read / 1e9,
        "families": {},
    }
    asked.out.mkdir(parents=True, exist_ok=True)
    file = asked.out / f"{date:%Y-%m-%d-%H%M}-llm-gpu-families.json"
    for family in families:
        for kind in kinds:
            try:
                result["families"][f"{family} {kind}"] = measure_family(family, kind, asked, read)
            except Exception as error:
                gpu.progress(f"{family} {kind}: failed: {summary(error)}")
                result["families"][f"{family} {kind}"] = {"error": summary(error)}
            gc.collect()
            torch.cuda.empty_cache()
            result["duration_s"] = round(time.monotonic() - began)
            file.write_text(json.dumps(result, indent=1) + "\n")
    print(file)


if __name__ == "__main__":
    main()
