"""Measures the first token of a long prompt: computed, restored from host memory, and restored from disk.

    python benchmarks/llm/kv_restore.py [--tokens 2000] [--rounds 5] [--device cuda --dtype bfloat16 --layers 16]

The network has random weights and the layers of Llama 3.2 1B, by default fewer of them. In each round a new prompt is
computed, leaves the KV cache for another prompt, and comes back. A ratio is the median of those of the rounds. Files
are read from the system's page cache. The result is a dated JSON file.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "serving"))

import machine  # noqa: E402
import results  # noqa: E402
import torch  # noqa: E402

from flambeau.llm.config import EngineConfig  # noqa: E402
from flambeau.llm.device_backends import make_backend  # noqa: E402
from flambeau.llm.engine import Engine  # noqa: E402
from flambeau.llm.executor.kv_cache import KVCache  # noqa: E402
from flambeau.llm.kv_store.block_store import open_store  # noqa: E402
from flambeau.llm.models.architecture import Architecture  # noqa: E402
from flambeau.llm.models.transformer import Transformer  # noqa: E402
from flambeau.llm.network_loader import DTYPES  # noqa: E402
from flambeau.llm.sampling_params import SamplingParams  # noqa: E402

ARCH = Architecture(
    vocab_size=2000,
    max_length=8192,
    hidden_size=2048,
    num_layers=4,
    num_heads=32,
    num_kv_heads=8,
    head_size=64,
    intermediate_size=8192,
)
FIRST_TOKEN = SamplingParams(temperature=0.0, max_tokens=1)
SAVED_S = 120


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2000, help="of the prompt (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="(default %(default)s)")
    parser.add_argument("--layers", type=int, default=4, help="of the network (default %(default)s)")
    parser.add_argument("--device", default="cpu", help="(default %(default)s)")
    parser.add_argument("--dtype", default="float32", help="(default %(default)s)")
    parser.add_argument("--out", type=Path, default=results.REPOSITORY / "benchmarks" / "results")
    return parser.parse_args()


def make_engine(asked: argparse.Namespace, **options: Any) -> Engine:
    """An engine whose cache holds one prompt, but not two."""
    config = EngineConfig(device=asked.device, max_num_seqs=4, num_blocks=3 * asked.tokens // 2 // 16, **options)
    torch.manual_seed(0)
    device, dtype = torch.device(asked.device), DTYPES[asked.dtype]
    with device:
        model = Transformer(replace(ARCH, num_layers=asked.layers)).eval().requires_grad_(False).to(dtype)
    num_blocks = (config.num_blocks or 0) + 1
    cache = KVCache(model.arch, num_blocks, config.block_size, device=device, dtype=dtype)
    store = open_store(config, cache, model, "")
    backend = make_backend(model, cache, config)
    return Engine(model.arch, backend, num_blocks=num_blocks, config=config, device=asked.device, store=store)


def first_token(engine: Engine, prompt: list[int]) -> tuple[float, list[int], int]:
    """Seconds to the first token, the token, and how many tokens of the prompt were not computed."""
    began = time.perf_counter()
    (completion,) = engine.generate([prompt], FIRST_TOKEN)
    taken = time.perf_counter() - began
    assert completion.counts is not None
    return taken, completion.token_ids, completion.counts.num_cached


def wait_saved(engine: Engine, number: int) -> None:
    deadline = time.monotonic() + SAVED_S
    while engine.state.num_blocks_saved < number:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{engine.state.num_blocks_saved} blocks were saved, not {number}")
        time.sleep(0.02)


def measure(asked: argparse.Namespace, where: str, folder: str) -> dict[str, Any]:
    """Compute each prompt once, and restore it after another has taken its blocks."""
    options: dict[str, Any] = {"kv_host_memory_mb": 2048} if where == "host memory" else {"kv_disk_folder": folder}
    engine = make_engine(asked, **options)
    rng = random.Random(1)
    prompts = [[rng.randrange(ARCH.vocab_size) for _ in range(asked.tokens)] for _ in range(asked.rounds + 2)]
    first_token(engine, prompts[0])
    wait_saved(engine, asked.tokens // 16)
    engine.wait_until_compiled()
    computed, restored, num_cached = [], [], []
    last = prompts[0]
    for i, prompt in enumerate(prompts[1:], 1):
        taken, tokens, _ = first_token(engine, prompt)
        wait_saved(engine, (i + 1) * (asked.tokens // 16))
        first_token(engine, last)  # takes the blocks of the prompt
        again, same, number = first_token(engine, prompt)
        assert tokens == same, "a restored prompt has another first token"
        computed.append(taken)
        restored.append(again)
        num_cached.append(number)
        last = prompt
    engine.close()
    ratios = [new / old for new, old in zip(restored[1:], computed[1:], strict=True)]  # the first round warms up
    return {
        "computed_ms": round(1000 * statistics.median(computed[1:]), 1),
        "restored_ms": round(1000 * statistics.median(restored[1:]), 1),
        "ratio": round(statistics.median(ratios), 4),
        "ratios": [round(ratio, 4) for ratio in ratios],
        "cached_tokens": num_cached[1:],
    }


def main() -> None:
    asked, began = arguments(), time.monotonic()
    before = machine.Usage.now({})
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        for where in ("host memory", "disk"):
            figures[where] = measure(asked, where, folder)
            print(f"{where:12} {figures[where]}", file=sys.stderr)
    noise = machine.cores_between(before, machine.Usage.now({}))
    date = datetime.now(UTC)
    result: dict[str, Any] = {
        "date": date.isoformat(timespec="seconds"),
        "command": " ".join(["python", "benchmarks/llm/kv_restore.py", *sys.argv[1:]]),
        "duration_s": round(time.monotonic() - began),
        "machine": machine.describe(),
        "versions": results.versions(Path(sys.executable), Path("none")),
        "tokens": asked.tokens,
        "layers": asked.layers,
        "other_cores": noise["other_cores"],
        "noisy": noise["noisy"],
        "figures": figures,
    }
    asked.out.mkdir(parents=True, exist_ok=True)
    file = asked.out / f"{date:%Y-%m-%d-%H%M}-llm-kv-restore.json"
    file.write_text(json.dumps(result, indent=2) + "\n")
    print(file)


if __name__ == "__main__":
    main()
