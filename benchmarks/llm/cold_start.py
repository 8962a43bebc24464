"""Measures a new process until its first token and until full speed, phase by phase.

    python benchmarks/llm/cold_start.py FOLDER [--kinds bfloat16,int4] [--device cpu] [--rounds 3] [--drop]
    python benchmarks/llm/cold_start.py FOLDER --make Llama-3-8B --device cuda

FOLDER is a checkpoint; with --make, one with random weights of a preset is made there first, unless there is one. Each
round starts a process, which reports on the clock and in CPU seconds how long each phase took. Compiled kernels are
cached from the first round on, which is not counted. --drop removes the weights from the system's page cache before
each round.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PROMPT = list(range(100, 132))
NEW_TOKENS = 64
WINDOW = 8  # steps whose median tells the speed
DTYPES = ("float32", "bfloat16", "float16")


# ---- in a new process ----


def age_s() -> float:
    """The seconds since this process was started."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")


class Timeline:
    """Seconds and CPU seconds of each phase."""

    def __init__(self) -> None:
        self._began = time.perf_counter() - age_s()
        self._last = (self._began, 0.0)
        self.phases: dict[str, tuple[float, float]] = {}

    @property
    def total_s(self) -> float:
        return time.perf_counter() - self._began

    def end(self, name: str) -> None:
        now = (time.perf_counter(), time.process_time())
        self.phases[name] = (now[0] - self._last[0], now[1] - self._last[1])
        self._last = now


def be_subject(folder: Path, kind: str, device: str) -> dict[str, Any]:
    """Load the checkpoint and generate twice."""
    timeline = Timeline()
    timeline.end("start Python")
    from flambeau.llm import Engine, EngineConfig, SamplingParams

    timeline.end("import torch and the engine")
    import torch

    from flambeau.llm.loader import load_engine
    from flambeau.llm.network_loader import load_network

    timeline.end("import the loader")
    if device != "cpu":
        torch.zeros(1, device=device)
        timeline.end("start the device")
    options = {"dtype": kind} if kind in DTYPES else {"quantization": kind}
    config = EngineConfig(device=device, max_num_seqs=8, max_model_len=1024, **options)  # type: ignore[arg-type]
    if (folder / "tokenizer.json").is_file():
        engine = load_engine(folder, config)
    else:
        loaded = load_network(folder, config, torch.device(device), None)
        engine = Engine(loaded.arch, loaded.backend, num_blocks=loaded.num_blocks, config=config, device=device)
    timeline.end("load")
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    engine.add("first", PROMPT, params)
    while not engine.step():
        pass
    timeline.end("first token")
    first_token_s, first_token_cpu_s = timeline.total_s, time.process_time()
    gaps, at = steps(engine, timeline)
    engine.wait_until_compiled()
    for name in ("second", "third"):  # the second captures what was compiled since
        engine.add(name, PROMPT, params)
        more, places = steps(engine, timeline)
        gaps, at = gaps + more, at + places
    fastest = statistics.median(gaps[-NEW_TOKENS // 2 :])
    windows = [(at[i + WINDOW - 1], statistics.median(gaps[i : i + WINDOW])) for i in range(len(gaps) - WINDOW)]
    slow = [place for place, gap in windows if gap > 1.5 * fastest]
    return {
        "phases": timeline.phases,
        "first_token_s": first_token_s,
        "first_token_cpu_s": first_token_cpu_s,
        "full_speed_s": max(slow, default=first_token_s),
        "step_ms": 1000 * fastest,
        "decode": engine.info.decode,
    }


def steps(engine: Any, timeline: Timeline) -> tuple[list[float], list[float]]:
    """Run to the end; how long each step took, and when it was done."""
    gaps, at, last = [], [], timeline.total_s
    while engine.has_work:
        engine.step()
        now = timeline.total_s
        gaps.append(now - last)
        at.append(now)
        last = now
    return gaps, at


# ---- checkpoints ----


def shapes_of(name: str) -> dict[str, tuple[int, ...]]:
    """The tensors of a Hugging Face checkpoint with this preset's shapes."""
    from flambeau.llm.models.presets import preset

    arch = preset(name)
    hidden, kv = arch.hidden_size, arch.num_kv_heads * arch.head_size
    layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (arch.num_heads * arch.head_size, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, arch.num_heads * arch.head_size),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (arch.intermediate_size, hidden),
        "mlp.up_proj": (arch.intermediate_size, hidden),
        "mlp.down_proj": (hidden, arch.intermediate_size),
    }
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (arch.vocab_size, hidden)}
    for i in range(arch.num_layers):
        found |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    found["model.norm.weight"] = (hidden,)
    return found if arch.tied_embeddings else found | {"lm_head.weight": (arch.vocab_size, hidden)}


def make_checkpoint(folder: Path, name: str) -> None:
    """Random bfloat16 weights. The numbers of one block are repeated: making as many would take longer than a run."""
    import torch

    if not folder.name.endswith(name):
        sys.exit(f"the folder has no config.json, so its name must end with the preset's: {name}")
    if (folder / "model.safetensors").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    shapes, entries, end = shapes_of(name), {}, 0
    for tensor, shape in shapes.items():
        begin, end = end, end + 2 * torch.Size(shape).numel()
        entries[tensor] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    head = json.dumps(entries).encode()
    head += b" " * (-len(head) % 64)
    block = (torch.randn(1 << 25) * 0.02).bfloat16().view(torch.uint8).numpy()
    ones = torch.ones(1 << 16).bfloat16().view(torch.uint8).numpy()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        for shape in shapes.values():
            size, numbers = 2 * torch.Size(shape).numel(), block if len(shape) > 1 else ones
            for start in range(0, size, len(numbers)):
                file.write(memoryview(numbers)[: min(len(numbers), size - start)])
        file.flush()
        os.fsync(file.fileno())


def drop_from_page_cache(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


# ---- the run ----


def run_subject(folder: Path, kind: str, device: str) -> dict[str, Any]:
    command = [sys.executable, __file__, str(folder), "--subject", "--kinds", kind, "--device", device]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def report(kind: str, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians of the rounds."""
    numbers = ("first_token_s", "first_token_cpu_s", "full_speed_s", "step_ms")
    return {
        "kind": kind,
        **{name: round(statistics.median(each[name] for each in rounds), 3) for name in numbers},
        "best_first_token_s": round(min(each["first_token_s"] for each in rounds), 3),
        "decode": rounds[-1]["decode"],
        "phases": {
            name: [round(statistics.median(each["phases"][name][i] for each in rounds), 3) for i in range(2)]
            for name in rounds[0]["phases"]
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--make", metavar="PRESET", help="make a random checkpoint")
    parser.add_argument("--kinds", default="bfloat16", help="types or quantizations (default %(default)s)")
    parser.add_argument("--device", default="cpu", help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--drop", action="store_true", help="read the weights from the disk in each round")
    parser.add_argument("--subject", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.subject:
        print(json.dumps(be_subject(asked.folder, asked.kinds, asked.device)), flush=True)
        os._exit(0)
    if asked.make:
        make_checkpoint(asked.folder, asked.make)
    for kind in asked.kinds.split(","):
        run_subject(asked.folder, kind, asked.device)
        rounds = []
        for _ in range(asked.rounds):
            if asked.drop:
                drop_from_page_cache(asked.folder)
            rounds.append(run_subject(asked.folder, kind, asked.device))
        print(json.dumps(report(kind, rounds), indent=1), flush=True)


if __name__ == "__main__":
    main()
