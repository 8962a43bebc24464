"""Measures what a grammar costs: 32 streams with a JSON schema beside 32 plain ones, and the first token of one.

    python benchmarks/llm/grammar.py [--rounds 5] [--tokens 32] [--layers 10] [--paced-ms 5]
    python benchmarks/llm/grammar.py --device cuda --dtype bfloat16 --tokens 200 [--preset Llama-2-7B]

The network has random weights, the shape of SmolLM 135M with fewer layers or that of a preset, and a byte-level
vocabulary trained on this repository's own files, or that of --tokenizer. With --paced-ms, steps compute nothing and
take this long: what is left is the work of the host, which a GPU would have to wait for. The subjects take turns in one
process, and a result is the median of the ratios of each turn, so that other load on the machine counts little. The
ratio of CPU time, of all threads, counts it even less. The result is a dated JSON file.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "serving")]

import machine  # noqa: E402
import results  # noqa: E402
import torch  # noqa: E402
from gpu import random_network  # noqa: E402
from paced_backend import use_paced_backend  # noqa: E402

from flambeau.llm.config import EngineConfig  # noqa: E402
from flambeau.llm.device_backends import make_backend  # noqa: E402
from flambeau.llm.engine import Engine  # noqa: E402
from flambeau.llm.executor.kv_cache import KVCache  # noqa: E402
from flambeau.llm.models.architecture import Architecture  # noqa: E402
from flambeau.llm.models.presets import preset  # noqa: E402
from flambeau.llm.models.transformer import Transformer  # noqa: E402
from flambeau.llm.network_loader import DTYPES  # noqa: E402
from flambeau.llm.sampling_params import SamplingParams  # noqa: E402
from flambeau.llm.text.tokenizer import Tokenizer, load_tokenizer  # noqa: E402

VOCABULARY, NUM_STREAMS, CONTEXT = 32_000, 32, 512
END = "<|end|>"
ARCH = Architecture(
    vocab_size=VOCABULARY,
    max_length=CONTEXT,
    hidden_size=576,
    num_heads=9,
    num_kv_heads=3,
    head_size=64,
    intermediate_size=1536,
    num_layers=10,
    tied_embeddings=True,
)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "pattern": "^[a-z0-9.]+@[a-z]+\\.(com|org)$"},
        "role": {"enum": ["admin", "editor", "reader"]},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 5},
    },
    "required": ["name", "age", "email", "role", "tags"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": PERSON, "minItems": 100}  # no stream ends before the others
STRUCTURE = {"json": SCHEMA}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="(default %(default)s)")
    parser.add_argument("--tokens", type=int, default=32, help="of each stream (default %(default)s)")
    parser.add_argument("--layers", type=int, default=10, help="of the network (default %(default)s)")
    parser.add_argument("--preset", default="", help="a known shape with all its layers, for example Llama-2-7B")
    parser.add_argument("--tokenizer", type=Path, help="a folder; by default, one is trained")
    parser.add_argument("--paced-ms", type=float, help="steps compute nothing and take this long")
    parser.add_argument("--device", default="cpu", help="(default %(default)s)")
    parser.add_argument("--dtype", default="float32", help="(default %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="of torch (default %(default)s)")
    parser.add_argument("--out", type=Path, default=results.REPOSITORY / "benchmarks" / "results")
    return parser.parse_args()


def train_tokenizer(folder: Path) -> Tokenizer:
    from tokenizers import Tokenizer as Trained
    from tokenizers import decoders, models, pre_tokenizers, trainers

    trained = Trained(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, initial_alphabet=alphabet, special_tokens=[END], show_progress=False
    )
    trained.train_from_iterator(own_texts(), trainer)
    trained.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    return load_tokenizer(folder)


def own_texts() -> Iterator[str]:
    for pattern in ("docs/**/*.md", "src/**/*.py", "tests/**/*.py", "benchmarks/**/*.json"):
        for file in sorted(results.REPOSITORY.glob(pattern)):
            yield file.read_text(errors="replace")


def make_engine(asked: argparse.Namespace, tokenizer: Tokenizer) -> Engine:
    num_blocks = 1 + NUM_STREAMS * CONTEXT // 16
    config = EngineConfig(device=asked.device, max_num_seqs=NUM_STREAMS, num_blocks=num_blocks - 1)
    torch.manual_seed(0)
    device, dtype = torch.device(asked.device), DTYPES[asked.dtype]
    if asked.preset:
        arch = preset(asked.preset)
        arch = replace(arch, max_length=CONTEXT, vocab_size=max(arch.vocab_size, tokenizer.vocab_size))
        model = random_network(arch, asked.device, dtype)
    else:
        arch = replace(ARCH, num_layers=asked.layers, vocab_size=tokenizer.vocab_size)
        with device:
            model = Transformer(arch).eval().requires_grad_(False).to(dtype)
    if asked.paced_ms:
        use_paced_backend(asked.paced_ms / 1000)
    cache = KVCache(arch, num_blocks, config.block_size, device=device, dtype=dtype)
    backend = make_backend(model, cache, config)
    return Engine(arch, backend, num_blocks=num_blocks, config=config, device=asked.device, tokenizer=tokenizer)


def run_streams(engine: Engine, prompt: list[int], params: SamplingParams) -> dict[str, float]:
    """Tokens per second of all streams without their prompts, and per second of CPU time."""
    for i in range(NUM_STREAMS):
        engine.add(f"stream-{i}", prompt, replace(params, seed=i))
    number, began, cpu_began = 0, 0.0, 0.0
    while engine.has_work:
        outputs = engine.step()
        if began:
            number += sum(len(output.token_ids) for output in outputs)
        elif len(outputs) == NUM_STREAMS:  # all decode from now on
            began, cpu_began = time.perf_counter(), time.process_time()
    wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_began
    return {"per_s": number / wall_s, "per_cpu_s": number / cpu_s}


def first_token_s(engine: Engine, prompt: list[int], params: SamplingParams) -> dict[str, float]:
    """The time from a request to its first token, and the CPU time."""
    began, cpu_began = time.perf_counter(), time.process_time()
    engine.add("first", prompt, replace(params, max_tokens=1))
    while engine.has_work:
        engine.step()
    return {"first_s": time.perf_counter() - began, "first_cpu_s": time.process_time() - cpu_began}


def compare(engine: Engine, asked: argparse.Namespace, temperature: float) -> dict[str, Any]:
    assert engine.tokenizer is not None
    prompt = [*engine.tokenizer.encode("A list of people as JSON:")]
    plain = SamplingParams(temperature=temperature, max_tokens=asked.tokens, ignore_eos=True)
    subjects = {"plain": plain, "grammar": replace(plain, structured_outputs=STRUCTURE)}
    taken: dict[str, list[dict[str, float]]] = {name: [] for name in subjects}
    for params in subjects.values():
        run_streams(engine, prompt, replace(params, max_tokens=16))  # asks for what is compiled
    engine.wait_until_compiled()
    for i in range(asked.rounds + 1):
        for name, params in subjects.items():
            found = run_streams(engine, prompt, params)
            firsts = [first_token_s(engine, prompt, params) for _ in range(5)]
            found |= {key: statistics.median(first[key] for first in firsts) for key in firsts[0]}
            if i:  # the first round warms up
                taken[name].append(found)
    pairs = [*zip(taken["grammar"], taken["plain"], strict=True)]

    def ratio(key: str) -> float:
        return round(statistics.median(with_it[key] / without[key] for with_it, without in pairs), 3)

    def later_ms(key: str) -> float:
        return round(1000 * statistics.median(with_it[key] - without[key] for with_it, without in pairs), 2)

    return {
        "plain_tokens_per_s": round(statistics.median(found["per_s"] for found in taken["plain"]), 1),
        "grammar_tokens_per_s": round(statistics.median(found["per_s"] for found in taken["grammar"]), 1),
        "ratio": ratio("per_s"),
        "cpu_ratio": ratio("per_cpu_s"),
        "first_token_plain_ms": round(1000 * statistics.median(found["first_s"] for found in taken["plain"]), 2),
        "first_token_later_ms": later_ms("first_s"),
        "first_token_later_cpu_ms": later_ms("first_cpu_s"),
    }


def main() -> None:
    asked, began = arguments(), time.monotonic()
    torch.set_num_threads(asked.threads)
    before = machine.Usage.now({})
    with tempfile.TemporaryDirectory() as folder:
        engine = make_engine(
            asked, load_tokenizer(asked.tokenizer) if asked.tokenizer else train_tokenizer(Path(folder))
        )
    engine.generate(["warm up"], max_tokens=4)
    engine.wait_until_compiled()
    figures = {}
    for name, temperature in (("sampled", 1.0), ("greedy", 0.0)):
        figures[name] = compare(engine, asked, temperature)
        print(f"{name:8} {figures[name]}", file=sys.stderr)
    engine.close()
    noise = machine.cores_between(before, machine.Usage.now({}))
    date = datetime.now(UTC)
    result: dict[str, Any] = {
        "date": date.isoformat(timespec="seconds"),
        "command": " ".join(["python", "benchmarks/llm/grammar.py", *sys.argv[1:]]),
        "duration_s": round(time.monotonic() - began),
        "machine": machine.describe(),
        "versions": results.versions(Path(sys.executable), Path("none")),
        "threads": asked.threads,
        "streams": NUM_STREAMS,
        "preset": asked.preset,
        "layers": engine.arch.num_layers,
        "paced_ms": asked.paced_ms,
        "device": torch.cuda.get_device_name(asked.device) if asked.device.startswith("cuda") else "cpu",
        "vocabulary": engine.arch.vocab_size,
        "schema": SCHEMA,
        "decode": engine.info.decode,
        "other_cores": noise["other_cores"],
        "noisy": noise["noisy"],
        "figures": figures,
    }
    asked.out.mkdir(parents=True, exist_ok=True)
    file = asked.out / f"{date:%Y-%m-%d-%H%M}-llm-grammar.json"
    file.write_text(json.dumps(result, indent=2) + "\n")
    print(file)


if __name__ == "__main__":
    main()
