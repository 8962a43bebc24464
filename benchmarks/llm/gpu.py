"""Measures a network of random weights on a GPU beside the ceiling that memory sets, in one run.

    python benchmarks/llm/gpu.py [--preset Llama-2-7B] [--streams 1,32] [--quantization none,int8,fp8,int4]

Each number of streams is measured with greedy requests and with sampled ones (temperature 0.8, top-k 200), by turns.
The ceiling is what reading the weights once for each token would take at the speed of a plain reduction over a large
tensor on the same device. The engine is the whole one: scheduler, paged cache, sampler; without a tokenizer. First the
compiled path must give the eager path's tokens, in float32 arithmetic at a small size, then it is measured. The result
is a dated JSON file.
"""

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "serving"))

import machine  # noqa: E402
import results  # noqa: E402
import torch  # noqa: E402

from flambeau.llm import EngineConfig  # noqa: E402
from flambeau.llm.bench import measure_once  # noqa: E402
from flambeau.llm.engine import Engine  # noqa: E402
from flambeau.llm.executor.kv_cache import KVCache  # noqa: E402
from flambeau.llm.loader import make_backend  # noqa: E402
from flambeau.llm.models.architecture import Architecture  # noqa: E402
from flambeau.llm.models.presets import preset  # noqa: E402
from flambeau.llm.models.transformer import Transformer  # noqa: E402
from flambeau.llm.quantize.packed_layers import use_fast_layers  # noqa: E402
from flambeau.llm.quantize.quantizer import quantize  # noqa: E402
from flambeau.llm.sampling_params import SamplingParams  # noqa: E402

Round = dict[str, Any]

GPT_FAST = {"1": 216, "32": 5421}  # tokens/s of Llama-2-7B in bfloat16 on an H200, measured before with the same shapes
READ_BYTES = 16 << 30
SETTINGS = {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 0.8, "top_k": 200, "seed": 1}}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="Llama-2-7B", help="default: %(default)s")
    parser.add_argument("--layers", type=int, help="fewer layers than the preset has, for a trial")
    parser.add_argument("--streams", default="1,32", help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=200, help="new tokens of each stream (default %(default)s)")
    parser.add_argument("--prompt", type=int, default=6, help="tokens of each prompt (default %(default)s)")
    parser.add_argument("--settings", default="greedy,sampled", help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--quantization", default="none", help="some of none, int8, fp8, int4 (default %(default)s)")
    parser.add_argument("--no-check", action="store_true", help="do not compare tokens first, which takes a minute")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=results.REPOSITORY / "benchmarks" / "results")
    return parser.parse_args()


def random_network(arch: Architecture, device: str, dtype: torch.dtype) -> Transformer:
    """Weights that nobody trained: small, so that numbers stay numbers through all layers."""
    with torch.device(device):
        model = Transformer(arch).to(dtype).eval().requires_grad_(False)
    generator = torch.Generator(device).manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=0.02, generator=generator)
    return model


def new_engine(model: Transformer, num_seqs: int, length: int, *, compiled: bool) -> Engine:
    """The whole engine around a network."""
    weight = model.model.embed_tokens.weight
    config = EngineConfig(max_num_seqs=num_seqs, max_model_len=length, prefix_cache=False, compile=compiled)
    per_sequence = -(-length // config.block_size)
    cache = KVCache(
        model.arch, num_seqs * per_sequence + 1, config.block_size, device=weight.device, dtype=weight.dtype
    )
    forward = make_backend(model, cache, config)
    return Engine(model.arch, forward, num_blocks=cache.num_blocks, config=config, device=str(weight.device))


def measure(engine: Engine, streams: list[int], settings: list[str], lengths: tuple[int, int]) -> Iterator[Round]:
    """One round: every number of streams with every kind of settings."""
    rng, (prompt, new) = random.Random(0), lengths
    for number in streams:
        prompts = [[rng.randrange(engine.arch.vocab_size) for _ in range(prompt)] for _ in range(number)]
        for name in settings:
            params = SamplingParams(max_tokens=new, ignore_eos=True, **SETTINGS[name])
            yield {"settings": name, **asdict(measure_once(engine, prompts, params))}


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


def bandwidth(device: str) -> float:
    """Bytes per second that a plain reduction reads."""
    numbers = torch.ones(READ_BYTES // 4 if device != "cpu" else 1 << 26, device=device)
    seconds = []
    for _ in range(8):
        synchronize(device)
        began = time.perf_counter()
        numbers.sum()
        synchronize(device)
        seconds.append(time.perf_counter() - began)
    return numbers.nbytes / min(seconds)


def synchronize(device: str) -> None:
    """Wait until the device has done what it was told."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def weight_bytes(model: Transformer) -> int:
    """What a decode step reads of the network: all but the embeddings, of which it reads one row each."""
    state = model.state_dict()
    skipped = 0 if model.lm_head is None else state["model.embed_tokens.weight"].nbytes
    return sum(tensor.nbytes for tensor in state.values()) - skipped


def medians(rounds: list[Round], settings: str, what: str) -> dict[str, float]:
    """Number of streams → the median of its rounds."""
    mine = [each for each in rounds if each["settings"] == settings]
    return {
        str(number): statistics.median(each[what] for each in mine if each["streams"] == number)
        for number in dict.fromkeys(each["streams"] for each in mine)
    }


def main() -> None:
    asked = arguments()
    arch = preset(asked.preset)
    if asked.layers:
        arch = replace(arch, num_layers=asked.layers, windows=arch.windows[: asked.layers])
    is_same = None if asked.no_check else same_tokens(arch, asked.device)
    print(f"compiled tokens are the eager ones: {is_same}", file=sys.stderr)
    for kind in asked.quantization.split(","):
        run(asked, arch, None if kind == "none" else kind, is_same=is_same)


def run(asked: argparse.Namespace, arch: Architecture, quantization: str | None, *, is_same: bool | None) -> None:
    """Measure one kind of weights and write its result."""
    began = time.monotonic()
    streams = [int(part) for part in asked.streams.split(",")]
    model = random_network(arch, asked.device, torch.bfloat16 if asked.device != "cpu" else torch.float32)
    if quantization:
        quantize(model, quantization)
        use_fast_layers(model, torch.bfloat16)
    read, size = bandwidth(asked.device), weight_bytes(model)
    print(f"{size / 1e9:.2f} GB at {read / 1e9:.0f} GB/s: at most {read / size:.1f} tokens/s", file=sys.stderr)
    engine = new_engine(model, max(streams), asked.prompt + asked.tokens + 16, compiled=True)
    lengths, settings = (asked.prompt, asked.tokens), asked.settings.split(",")
    started = time.monotonic()
    for _ in measure(engine, streams, settings, lengths):
        engine.wait_until_compiled()
    compile_s = time.monotonic() - started
    rounds: list[Round] = []
    for number in range(asked.rounds):
        for figure in measure(engine, streams, settings, lengths):
            rounds.append({"round": number + 1, **figure})
            print(rounds[-1], file=sys.stderr)
    engine.close()
    rates = {name: medians(rounds, name, "tokens_per_s") for name in settings}
    for name, found in rates.items():
        for number, rate in found.items():
            beside = f", gpt-fast {GPT_FAST[number]}" if number in GPT_FAST and asked.preset == "Llama-2-7B" else ""
            share = f", {rate / (read / size):.0%} of the ceiling" if number == "1" else ""
            print(f"{quantization or 'bf16'} {name}, {number} streams: {rate:.1f} tokens/s{share}{beside}")
    date = datetime.now(UTC)
    result = {
        "date": date.isoformat(timespec="seconds"),
        "command": f"python benchmarks/llm/gpu.py {' '.join(sys.argv[1:])}".strip(),
        "duration_s": round(time.monotonic() - began),
        "machine": machine.describe(),
        "device": torch.cuda.get_device_name() if asked.device != "cpu" else "cpu",
        "torch": torch.__version__,
        "preset": asked.preset,
        "quantization": quantization,
        "same_tokens": is_same,
        "weights_gb": size / 1e9,
        "read_gb_per_s": read / 1e9,
        "ceiling_tokens_per_s": read / size,
        "first_round_with_compilation_s": compile_s,
        "medians_tokens_per_s": rates.get("greedy", {}),
        "medians_sampled_tokens_per_s": rates.get("sampled", {}),
        "medians_first_token_ms": medians(rounds, settings[0], "first_token_ms"),
        "rounds": rounds,
    }
    file = asked.out / f"{date:%Y-%m-%d-%H%M}-llm-gpu-{quantization or 'bf16'}.json"
    file.write_text(json.dumps(result, indent=1) + "\n")
    print(file)


if __name__ == "__main__":
    main()
