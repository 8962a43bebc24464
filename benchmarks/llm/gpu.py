"""Measures a network of random weights on a GPU beside the ceiling that memory sets: the whole table in one run.

    python benchmarks/llm/gpu.py [--preset Llama-2-7B] [--quantization none,int8,fp8,int4] [--compare EARLIER.json]

For each kind of weights: 1, 8, 32 and 128 streams of short prompts, greedy and sampled (temperature 0.8, top-k 200),
and 1 and 32 streams with two longer contexts. For the first kind also: 256 requests of 100 to 1,024 tokens in and out,
long prompts that arrive among 32 streams, and the rate of prompts. Streams through HTTP, in bfloat16, come last. The
ceiling of a figure is what reading the weights and the cached keys and values once for each step would take at the
speed of a plain reduction over a large tensor in the same run; of experts, only those are read that the routers choose.
The engine is the whole one: scheduler, paged cache, sampler; only HTTP has a tokenizer. With --check, the compiled path
must first give the eager path's tokens, in float32 at a small size. The result is a dated JSON file, which is written
after each figure. What fails is named there, and the rest goes on. Takes about six minutes on an H200.
"""

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "serving")]

import machine  # noqa: E402
import results  # noqa: E402
import torch  # noqa: E402
from cuda_device import need_device  # noqa: E402
from kept_results import KeptResults  # noqa: E402

from flambeau.llm import EngineConfig  # noqa: E402
from flambeau.llm.backends.eager import EagerBackend  # noqa: E402
from flambeau.llm.device_backends import make_backend  # noqa: E402
from flambeau.llm.engine import Engine  # noqa: E402
from flambeau.llm.executor.inputs import StepInputs  # noqa: E402
from flambeau.llm.executor.kv_cache import KVCache, block_bytes  # noqa: E402
from flambeau.llm.models.architecture import Architecture  # noqa: E402
from flambeau.llm.models.meta_device import on_meta_device  # noqa: E402
from flambeau.llm.models.moe import SparseMLP  # noqa: E402
from flambeau.llm.models.presets import preset  # noqa: E402
from flambeau.llm.models.transformer import Transformer  # noqa: E402
from flambeau.llm.quantize.packed_layers import use_fast_layers  # noqa: E402
from flambeau.llm.quantize.quantizer import quantize  # noqa: E402
from flambeau.llm.sampling_params import SamplingParams  # noqa: E402

Figures = dict[str, Any]

READ_BYTES = 16 << 30
SETTINGS = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.8, "top_k": 200, "seed": 1},
    "top-p": {"temperature": 0.8, "top_p": 0.9, "seed": 1},
    "min-p": {"temperature": 0.8, "min_p": 0.05, "seed": 1},
}
SHORT = 6  # tokens of a prompt
LONG_PROMPTS = 3
MIXED = 256  # requests
MIXED_LENGTHS = (100, 1024)


@dataclass(frozen=True, slots=True)
class Case:
    """Streams that run at the same time."""

    streams: int
    prompt: int  # tokens of each prompt
    settings: str
    tokens: int  # new ones of each stream, after the last has its first

    @property
    def name(self) -> str:
        return f"{self.streams} streams of {self.prompt}, {self.settings}"


def cases(asked: argparse.Namespace) -> list[Case]:
    numbers, contexts = numbers_of(asked.streams), numbers_of(asked.contexts)
    short = [Case(number, SHORT, name, asked.tokens) for number in numbers for name in asked.settings.split(",")]
    long = [Case(number, context, "greedy", asked.tokens // 2) for context in contexts for number in (1, 32)]
    return short + [case for case in long if case.streams <= max(numbers)]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="Llama-2-7B", help="default: %(default)s")
    parser.add_argument("--layers", type=int, help="fewer layers than the preset has, for a trial")
    parser.add_argument("--quantization", default="none,int8,fp8,int4", help="default: %(default)s")
    parser.add_argument("--streams", default="1,8,32,128", help="default: %(default)s")
    parser.add_argument("--contexts", default="1000,3500", help="of longer prompts (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=200, help="new tokens of each stream (default %(default)s)")
    parser.add_argument("--settings", default="greedy,sampled", help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=2, help="of the short prompts (default %(default)s)")
    parser.add_argument("--extras", default="mixed,long,prompts,http", help="for the first kind (default %(default)s)")
    parser.add_argument("--check", action="store_true", help="compare tokens first, which takes a minute")
    parser.add_argument("--compare", type=Path, help="print the ratios to the figures of an earlier result")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=results.REPOSITORY / "benchmarks" / "results")
    return parser.parse_args()


def command_line(given: Sequence[str]) -> str:
    """The arguments without the folder of this machine."""
    return " ".join(word for i, word in enumerate(given) if "--out" not in given[max(0, i - 1) : i + 1])


def numbers_of(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


# ---- networks and engines ----


def random_network(arch: Architecture, device: str, dtype: torch.dtype) -> Transformer:
    """Weights that nobody trained: small, so that numbers stay numbers through all layers."""
    with on_meta_device(dtype):
        model = Transformer(arch).eval().requires_grad_(False)
    model.to_empty(device=device)
    generator = torch.Generator(device).manual_seed(0)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=0.02, generator=generator)
        else:
            parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)
    return model


def new_engine(
    model: Transformer,
    num_seqs: int,
    length: int,
    *,
    compiled: bool = True,
    num_blocks: int | None = None,
    cached: torch.dtype | None = None,
) -> Engine:
    """The whole engine around a network; keys and values are of type `cached`, else of the network's."""
    weight = model.model.embed_tokens.weight
    config = EngineConfig(max_num_seqs=num_seqs, max_model_len=length, prefix_cache=False, compile=compiled)
    blocks = num_blocks or num_seqs * -(-length // config.block_size)
    places = {
        "device": weight.device,
        "dtype": cached or weight.dtype,
        "num_slots": num_seqs if has_states(model) else 0,
    }
    cache = KVCache(model.arch, blocks + 1, config.block_size, **places)
    forward, states = make_backend(model, cache, config), cache.states if has_states(model) else None
    places = {"num_blocks": cache.num_blocks, "device": str(weight.device), "state_cache": states}
    return Engine(model.arch, forward, config=config, **places)


def has_states(model: Transformer) -> bool:
    return model.arch.recurrence is not None


def same_tokens(arch: Architecture, device: str) -> bool:
    """Whether the compiled path gives the eager path's tokens, greedy and sampled."""
    small = replace(arch, num_layers=2, windows=arch.windows[:2])
    model = random_network(small, device, torch.float32)
    prompts = [[7 * i + j for j in range(3 + i)] for i in range(8)]
    kinds = [SamplingParams(max_tokens=32, **settings) for settings in SETTINGS.values()]
    found = []
    for compiled in (False, True):
        engine = new_engine(model, 8, 64, compiled=compiled)
        engine.generate(prompts, kinds[0])  # asks for what is to be compiled
        engine.wait_until_compiled()
        found.append([each.token_ids for params in kinds for each in engine.generate(prompts, params)])
        engine.close()
    return found[0] == found[1]


# ---- ceilings ----


def bandwidth(device: str) -> float:
    """Bytes per second that a plain reduction reads."""
    numbers = torch.ones(READ_BYTES // 4 if device != "cpu" else 1 << 26, device=device)
    return numbers.nbytes / min(seconds_of(numbers.sum, device) for _ in range(8))


def matmul_rate(device: str) -> float:
    """Operations per second of a large product in bfloat16."""
    size = 8192 if device != "cpu" else 256
    a, b = (torch.randn(size, size, device=device).to(torch.bfloat16) for _ in range(2))
    return 2 * size**3 / min(seconds_of(lambda: a @ b, device) for _ in range(8))


def seconds_of(compute: Callable[[], object], device: str) -> float:
    synchronize(device)
    began = time.perf_counter()
    compute()
    synchronize(device)
    return time.perf_counter() - began


def synchronize(device: str) -> None:
    """Wait until the device has done what it was told."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def weight_bytes(model: Transformer, experts_share: float = 1.0) -> float:
    """What a decode step reads of the network: all but the embeddings, of which it reads one row each.

    Of the experts it reads those that a row has chosen.
    """
    state = model.state_dict()
    skipped = 0 if model.lm_head is None else state["model.embed_tokens.weight"].nbytes
    experts = sum(tensor.nbytes for name, tensor in state.items() if ".experts." in name)
    return sum(tensor.nbytes for tensor in state.values()) - skipped - experts * (1 - experts_share)


@torch.inference_mode()
def chosen_share(engine: Engine, case: Case, model: Transformer) -> float:
    """The part of the experts that a step of these streams reads: those chosen for the last tokens of the prompts."""
    layers = [module for module in model.modules() if isinstance(module, SparseMLP)]
    if not layers:
        return 1.0
    weight = model.model.embed_tokens.weight
    rows = [prompt[-SHORT:] for prompt in prompts_of(engine, case)]
    places = {"device": weight.device, "dtype": weight.dtype, "num_slots": len(rows) if has_states(model) else 0}
    cache = KVCache(model.arch, 1 + len(rows), 16, **places)
    positions = torch.arange(SHORT).repeat(len(rows))
    blocks = 1 + torch.arange(len(rows))
    starts = SHORT * torch.arange(len(rows) + 1)
    inputs = StepInputs(
        torch.tensor(rows).flatten(),
        positions,
        16 * blocks.repeat_interleave(SHORT) + positions,
        starts,
        torch.full((len(rows),), SHORT),
        blocks.unsqueeze(1),
        state_slots_S=1 + torch.arange(len(rows)) if has_states(model) else None,
    )
    shares: list[float] = []
    for layer in layers:
        layer.choose = noting(layer, starts[1:] - 1, shares)  # type: ignore[method-assign]
    EagerBackend(model, cache).prefill(inputs, starts[1:] - 1)
    for layer in layers:
        del layer.choose
    return statistics.mean(shares)


def noting(layer: SparseMLP, rows: torch.Tensor, shares: list[float]) -> Callable[[torch.Tensor], Any]:
    """The layer's choice, which also notes the part of the experts that it has chosen for some rows."""
    choose = layer.choose

    def choose_and_note(x: torch.Tensor) -> Any:
        weights, chosen = choose(x)
        shares.append(len(chosen.cpu()[rows].unique()) / layer.gate.out_features)
        return weights, chosen

    return choose_and_note


def ceiling(case: Case, model: Transformer, read: float, experts_share: float) -> float:
    """Tokens per second if a step reads the weights and the keys and values of all streams once."""
    context = case.prompt + case.tokens / 2
    cached = case.streams * context * block_bytes(model.arch, 1, model.model.embed_tokens.weight.dtype)
    return case.streams * read / (weight_bytes(model, experts_share) + cached)


# ---- figures ----


def prompts_of(engine: Engine, case: Case) -> list[list[int]]:
    rng = random.Random(case.streams)
    return [[rng.randrange(engine.arch.vocab_size) for _ in range(case.prompt)] for _ in range(case.streams)]


def measure(engine: Engine, case: Case) -> Figures:
    """The rate of steps in which all streams of a case get tokens."""
    # Streams that begin first get tokens while the other prompts are computed.
    waiting = case.streams * case.prompt // (engine.config.max_step_tokens // 2)
    params = SamplingParams(max_tokens=case.tokens + waiting, ignore_eos=True, **SETTINGS[case.settings])
    began, first, num_tokens, since, until = time.perf_counter(), {}, 0, 0.0, 0.0
    for i, prompt in enumerate(prompts_of(engine, case)):
        engine.add(f"bench-{i}", prompt, params)
    while engine.has_work:
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            first.setdefault(output.request_id, now)
        if since and len(outputs) == case.streams:
            num_tokens, until = num_tokens + sum(len(output.token_ids) for output in outputs), now
        elif not since and len(first) == case.streams:
            since = now
    return {
        "tokens_per_s": num_tokens / (until - since) if num_tokens else 0.0,
        "first_token_ms": 1000 * (statistics.median(first.values()) - began),
    }


def run_mixed(engine: Engine) -> Figures:
    """Requests of many lengths, all at once."""
    rng = random.Random(0)
    for i in range(MIXED):
        prompt = [rng.randrange(engine.arch.vocab_size) for _ in range(rng.randint(*MIXED_LENGTHS))]
        params = SamplingParams(max_tokens=rng.randint(*MIXED_LENGTHS), ignore_eos=True, temperature=0.0)
        engine.add(f"mixed-{i}", prompt, params)
    began, num_tokens = time.perf_counter(), 0
    while engine.has_work:
        num_tokens += sum(len(output.token_ids) for output in engine.step())
    seconds = time.perf_counter() - began
    return {"requests": MIXED, "output_tokens": num_tokens, "output_tokens_per_s": num_tokens / seconds}


def run_long_prompts(engine: Engine, length: int) -> Figures:
    """What the streams that run notice of long prompts that arrive one after another."""
    rng, case = random.Random(1), Case(32, SHORT, "greedy", 400)
    params = SamplingParams(max_tokens=case.tokens, ignore_eos=True, temperature=0.0)
    for i, prompt in enumerate(prompts_of(engine, case)):
        engine.add(f"bench-{i}", prompt, params)
    gaps: list[float] = []
    last = 0.0
    for number in range(case.tokens):
        if number in range(50, 50 + 100 * LONG_PROMPTS, 100):
            prompt = [rng.randrange(engine.arch.vocab_size) for _ in range(length)]
            engine.add(f"long-{number}", prompt, replace(params, max_tokens=4))
        engine.step()
        now = time.perf_counter()
        if number > 10:
            gaps.append(1000 * (now - last))
        last = now
    while engine.has_work:
        engine.step()
    return {
        "prompt_tokens": length,
        "gap_p50_ms": statistics.median(gaps),
        "gap_p99_ms": statistics.quantiles(gaps, n=100)[98],
        "gap_max_ms": max(gaps),
    }


def run_prompts(engine: Engine, length: int, operations: float, model: Transformer) -> Figures:
    """How fast prompts are computed, beside a large product of matrices."""
    case = Case(8, length, "greedy", 1)
    for i, prompt in enumerate(prompts_of(engine, case)):
        engine.add(f"bench-{i}", prompt, SamplingParams(max_tokens=1, temperature=0.0))
    began = time.perf_counter()
    while engine.has_work:
        engine.step()
    rate = case.streams * length / (time.perf_counter() - began)
    of_a_token = 2 * sum(p.numel() for p in model.parameters() if p.dim() > 1)
    return {"prompt_tokens_per_s": rate, "of_the_matmul_rate": rate * of_a_token / operations}


def progress(*words: object) -> None:
    print(*words, file=sys.stderr, flush=True)


# ---- the run ----


def run_kind(asked: argparse.Namespace, arch: Architecture, kind: str, read: float, kept: KeptResults) -> Transformer:
    """All cases with one kind of weights; returns the network."""
    began = time.monotonic()
    model = random_network(arch, asked.device, torch.bfloat16 if asked.device != "cpu" else torch.float32)
    if kind != "none":
        quantize(model, kind)
        use_fast_layers(model, torch.bfloat16)
    result: Figures = {"weights_gb": weight_bytes(model) / 1e9, "figures": {}}
    kept.figures["kinds"][kind] = result
    with kept.part(f"{kind} weights"):
        run_cases(asked, model, kind, read, result, kept)
    result["duration_s"] = time.monotonic() - began
    kept.save()
    return model


def run_cases(
    asked: argparse.Namespace, model: Transformer, kind: str, read: float, result: Figures, kept: KeptResults
) -> None:
    """Figures of all cases, which are kept after each round."""
    wanted = cases(asked)
    lengths = [case.prompt + case.tokens + case.streams * case.prompt // 200 + 32 for case in wanted]
    blocks = max(case.streams * -(-length // 16) for case, length in zip(wanted, lengths, strict=True))
    longest = min(max(lengths), model.arch.max_length)
    engine = new_engine(model, max(case.streams for case in wanted), longest, num_blocks=blocks)
    started = time.monotonic()
    for case in wanted:
        if case.prompt == SHORT:
            for _ in range(2):  # asks for what is to be compiled, then captures it
                measure(engine, replace(case, tokens=20))
                engine.wait_until_compiled()
    result["first_round_with_compilation_s"] = time.monotonic() - started
    progress(kind, f"compiled and captured in {result['first_round_with_compilation_s']:.0f} s")
    shares = {case: chosen_share(engine, case, model) for case in wanted}
    found: dict[Case, list[Figures]] = {case: [] for case in wanted}
    for number in range(asked.rounds):
        for case in wanted:
            if number == 0 or case.prompt == SHORT:
                found[case].append(measure(engine, case))
                limit = ceiling(case, model, read, shares[case])
                result["figures"][case.name] = figures_of(case, found[case], limit, shares[case])
                kept.save()
                progress(kind, case.name, f"{found[case][-1]['tokens_per_s']:,.0f} tokens/s")
    engine.close()


def figures_of(case: Case, rounds: Sequence[Figures], limit: float, experts_share: float) -> Figures:
    """The medians of a case, and what they are compared with."""
    return {
        "streams": case.streams,
        "prompt": case.prompt,
        "settings": case.settings,
        "experts_read": experts_share,
        "ceiling_tokens_per_s": limit,
        **{name: statistics.median(each[name] for each in rounds) for name in rounds[0]},
        "rounds_tokens_per_s": [each["tokens_per_s"] for each in rounds],
    }


def mixed_engine(model: Transformer, device: str, cached: torch.dtype | None = None) -> Engine:
    """An engine for many requests of all lengths, with the graphs that they will use."""
    free = torch.cuda.mem_get_info()[0] if device != "cpu" else 8 << 30
    each = block_bytes(model.arch, 16, cached or model.model.embed_tokens.weight.dtype)
    sequence = -(-min(2 * MIXED_LENGTHS[1] + 16, model.arch.max_length) // 16)
    blocks = min(int(0.85 * free) // each, MIXED * sequence)
    engine = new_engine(model, MIXED, model.arch.max_length, num_blocks=blocks, cached=cached)
    for number in (32, 48, 64, 96, 128, 192, 256):
        for _ in range(2):  # asks for what is to be compiled, then captures it
            measure(engine, Case(number, SHORT, "greedy", 4))
            engine.wait_until_compiled()
    return engine


def run_extras(asked: argparse.Namespace, model: Transformer, kept: KeptResults) -> None:
    """What is measured for one kind of weights only."""
    extras = {name for name in asked.extras.split(",") if name}
    if {"mixed", "long", "prompts"} & extras:
        with kept.part("extras"):
            run_long_and_mixed(asked, model, extras, kept)
    if "mixed" in extras and asked.device != "cpu":
        gc.collect()
        torch.cuda.empty_cache()
        with kept.part("extras with an fp8 cache"):
            run_fp8_cache(asked, model, kept)


def run_long_and_mixed(asked: argparse.Namespace, model: Transformer, extras: set[str], kept: KeptResults) -> None:
    found, length = kept.figures["extras"], min(3500, model.arch.max_length - 16)
    engine = mixed_engine(model, asked.device)
    runs: dict[str, tuple[str, Callable[[], Figures]]] = {
        "long": ("long_prompts", lambda: run_long_prompts(engine, length)),
        "prompts": ("prompts", lambda: run_prompts(engine, length, matmul_rate(asked.device), model)),
        "mixed": ("mixed", lambda: run_mixed(engine)),
    }
    for asked_name, (name, run) in runs.items():
        if asked_name in extras:
            found[name] = run()
            kept.save()
            progress(name, found[name])
    engine.close()


def run_fp8_cache(asked: argparse.Namespace, model: Transformer, kept: KeptResults) -> None:
    found = kept.figures["extras"]
    engine = mixed_engine(model, asked.device, torch.float8_e4m3fn)
    found["mixed, fp8 cache"] = run_mixed(engine)
    kept.save()
    for number, length in ((32, SHORT), (128, SHORT), (32, 1000)):
        case = Case(number, length, "greedy", asked.tokens // 2)
        found[f"{case.name}, fp8 cache"] = measure(engine, case)
        kept.save()
    engine.close()
    progress({name: figure for name, figure in found.items() if "fp8 cache" in name})


def run_http(model: Transformer) -> Figures:
    """Streams through a server beside the engine alone, with the same prompts' length and number of new tokens."""
    from http_streams import MODEL_LENGTH, NEW_TOKENS, STREAMS, measure_http  # the server may not be installed

    length = min(MODEL_LENGTH, model.arch.max_length)
    blocks = max(STREAMS) * (-(-(SHORT + NEW_TOKENS) // 16) + 1)
    engine = new_engine(model, max(STREAMS), length, num_blocks=blocks)
    own = {}
    for number in STREAMS:
        measure(engine, Case(number, SHORT, "greedy", 20))
        engine.wait_until_compiled()
        case = Case(number, SHORT, "greedy", NEW_TOKENS)
        own[number] = max(measure(engine, case)["tokens_per_s"] for _ in range(2))
    engine.close()
    del engine
    gc.collect()
    progress(own)
    found = measure_http(model)
    for number, rate in own.items():
        found[f"engine tokens_per_s of {number}"] = rate
        found[f"share of the engine of {number}"] = found[f"tokens_per_s of {number}"] / rate
    return found


def main() -> None:
    asked = arguments()
    need_device(asked.device)
    arch = preset(asked.preset)
    if asked.layers:
        arch = replace(arch, num_layers=asked.layers, windows=arch.windows[: asked.layers])
    is_same = same_tokens(arch, asked.device) if asked.check else None
    read = bandwidth(asked.device)
    given: Figures = {
        "command": f"python benchmarks/llm/gpu.py {command_line(sys.argv[1:])}".strip(),
        "machine": machine.describe(),
        "device": torch.cuda.get_device_name() if asked.device != "cpu" else "cpu",
        "torch": torch.__version__,
        "preset": asked.preset,
        "layers": arch.num_layers,
        "same_tokens": is_same,
        "read_gb_per_s": read / 1e9,
        "kinds": {},
        "extras": {},
    }
    kept = KeptResults(asked.out, "llm-gpu", given)
    progress(f"{given['device']}, torch {torch.__version__}, {given['read_gb_per_s']:,.0f} GB/s; {kept.file}")
    for number, kind in enumerate(asked.quantization.split(",")):
        with kept.part(kind):
            model = run_kind(asked, arch, kind, read, kept)
            if number == 0:
                gc.collect()
                run_extras(asked, model, kept)
        model = None  # type: ignore[assignment]
        gc.collect()
        if asked.device != "cpu":
            torch.cuda.empty_cache()
    if "http" in asked.extras.split(","):
        with kept.part("http"):
            model = random_network(arch, asked.device, torch.bfloat16 if asked.device != "cpu" else torch.float32)
            kept.figures["extras"]["http"] = run_http(model)
    print(table(kept.figures, json.loads(asked.compare.read_text()) if asked.compare else None))
    print(kept.file)
    if kept.has_errors:
        raise SystemExit(f"failed: {', '.join(kept.figures['errors'])}")


def table(result: Figures, earlier: Figures | None) -> str:
    """A line for each figure: tokens/s, share of the ceiling, and the ratio to an earlier result."""
    lines = []
    for kind, found in result["kinds"].items():
        before = {} if earlier is None else earlier["kinds"].get(kind, {"figures": {}})["figures"]
        for name, figure in found["figures"].items():
            rate = figure["tokens_per_s"]
            ratio = f"  {rate / before[name]['tokens_per_s']:5.2f} of the earlier" if name in before else ""
            share = rate / figure["ceiling_tokens_per_s"]
            lines.append(f"{kind:5} {name:32} {rate:9,.1f} tokens/s  {share:4.0%} of the ceiling{ratio}")
    for name, value in flat(result.get("extras", {})):
        others = dict(flat({} if earlier is None else earlier.get("extras", {})))
        ratio = f"  {value / others[name]:5.2f} of the earlier" if others.get(name) else ""
        lines.append(f"{name:45} {value:12,.2f}{ratio}")
    return "\n".join(lines)


def flat(figures: Mapping[str, Any], path: Sequence[str] = ()) -> Iterator[tuple[str, float]]:
    """All numbers of nested figures, with their names."""
    for name, value in figures.items():
        if isinstance(value, Mapping):
            yield from flat(value, (*path, name))
        else:
            yield " ".join((*path, name)), value


if __name__ == "__main__":
    main()
