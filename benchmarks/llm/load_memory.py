"""Measures the memory that loading a language model takes, for every kind of checkpoint.

    python benchmarks/llm/load_memory.py [--kinds "fp8 blocks;GPTQ int4"] [--networks dense,experts] [--device cuda]

For each kind a checkpoint with random weights is made, in shards of 64 MB, and loaded by a new process with
`Engine.from_pretrained`, which then generates a few tokens. Figures are of the process's own (anonymous) memory beyond
what it has after its imports; the KV cache is small. Weights that stay mapped from their files are not counted: they
belong to the system's page cache. The peak is sampled every millisecond from outside, until the tokens are there.
The bound is 1.1 times the files plus one shard. The result is a dated JSON file.

With --device cuda, networks are larger, shards have 512 MB, and what is compared with the files is the memory that
PyTorch has allocated on the device; the anonymous memory of the process must stay below one shard. Several are loaded
at a time.
"""

import argparse
import importlib
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "serving"))

FACTOR = 1.1
LARGE_SHARD_BYTES = 512 << 20
SAMPLE_S = 0.001
RESET_PEAK = "5"  # of /proc/PID/clear_refs
PROMPT = [*range(40, 56)]
NEW_TOKENS = 4


# ---- in a new process ----


def be_subject(folder: str, options: dict[str, Any]) -> None:
    """Load the checkpoint when a line arrives, and generate."""
    import torch

    from flambeau.llm import Engine, SamplingParams
    from flambeau.llm.backends.cpu.bindings import kernels

    device = torch.device(options.pop("device"))
    if device.type == "cpu":
        kernels.load()
    torch.randn(256, 256, device=device) @ torch.randn(256, 256, device=device)
    if device.type == "cuda":
        importlib.import_module("flambeau.llm.backends.cuda.network")
        torch.empty(1).pin_memory()
    print("ready", flush=True)
    sys.stdin.readline()
    began, began_cpu = time.monotonic(), time.process_time()
    engine = Engine.from_pretrained(
        folder, num_blocks=16, max_num_seqs=2, max_model_len=128, device=str(device), **options
    )
    loaded_s, loaded_cpu_s = time.monotonic() - began, time.process_time() - began_cpu
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    for name in ("first", "second"):
        engine.add(name, PROMPT, params)
        tokens = 0
        while engine.has_work:
            tokens += sum(len(output.token_ids) for output in engine.step())
        assert tokens == NEW_TOKENS, tokens
        if device.type == "cpu":
            engine.wait_until_compiled()
    found: dict[str, Any] = {
        "loaded_s": round(loaded_s, 2),
        "loaded_cpu_s": round(loaded_cpu_s, 2),
        "decode": engine.info.decode,
    }
    if device.type == "cuda":
        cache: Any = engine._backend.cache  # type: ignore[attr-defined]
        cached = sum(each.nbytes for each in (*cache.keys, *cache.values))
        found |= {"device_peak_bytes": torch.cuda.max_memory_allocated() - cached}
        found |= {"device_bytes": torch.cuda.memory_allocated() - cached}
    print(json.dumps(found), flush=True)
    sys.stdin.readline()


# ---- the run ----


class Memory:
    """Memory of a process, in bytes."""

    def __init__(self, pid: int) -> None:
        self._folder = Path("/proc") / str(pid)

    def read(self, field: str) -> int:
        for line in (self._folder / "status").read_text().splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) << 10
        raise LookupError(field)

    def reset_peak(self) -> None:
        (self._folder / "clear_refs").write_text(RESET_PEAK)


class Peak:
    """The most anonymous memory that a process had while this ran."""

    def __init__(self, memory: Memory) -> None:
        self._memory, self._ends = memory, threading.Event()
        self.num_bytes = 0
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self) -> "Peak":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._ends.wait(SAMPLE_S):
            self.num_bytes = max(self.num_bytes, self._memory.read("RssAnon"))


def measure(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Load a checkpoint in a new process."""
    command = [sys.executable, __file__, "--subject", str(folder), json.dumps(options)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line == "ready\n", line
        memory = Memory(process.pid)
        before, before_all = memory.read("RssAnon"), memory.read("VmRSS")
        memory.reset_peak()
        with Peak(memory) as peak:
            process.stdin.write("go\n")
            found = json.loads(process.stdout.readline())
        settled, highest = memory.read("RssAnon"), memory.read("VmHWM")
        process.stdin.write("end\n")
    sizes = [file.stat().st_size for suffix in ("*.safetensors", "*.bin") for file in folder.glob(suffix)]
    return {
        "file_bytes": sum(sizes),
        "shard_bytes": max(sizes),
        "peak_bytes": max(peak.num_bytes, settled) - before,
        "settled_bytes": settled - before,
        "highest_rss_bytes": highest - before_all,
        **found,
    }


def row(network: str, kind: str, found: dict[str, Any], allowed_shard_bytes: int) -> dict[str, Any]:
    limit = FACTOR * found["file_bytes"] + allowed_shard_bytes
    if "device_bytes" in found:
        return {
            "network": network,
            "kind": kind,
            **found,
            "peak_per_file": round(found["device_peak_bytes"] / found["file_bytes"], 3),
            "settled_per_file": round(found["device_bytes"] / found["file_bytes"], 3),
            "is_within": found["device_peak_bytes"] <= FACTOR * found["file_bytes"]
            and found["peak_bytes"] <= allowed_shard_bytes,
        }
    return {
        "network": network,
        "kind": kind,
        **found,
        "peak_per_file": round(found["peak_bytes"] / found["file_bytes"], 2),
        "settled_per_file": round(found["settled_bytes"] / found["file_bytes"], 2),
        "is_within": found["peak_bytes"] <= limit and found["settled_bytes"] <= FACTOR * found["file_bytes"],
    }


HEAD = "network  kind                            file MB  peak MB  settled   peak  settled  CPU s  runs on"


def line_of(row: dict[str, Any]) -> str:
    of_device = ("file_bytes", "device_peak_bytes", "device_bytes")
    of_host = ("file_bytes", "peak_bytes", "settled_bytes")
    is_device = "device_bytes" in row
    sizes = " ".join(f"{row[name] / 1e6:8.0f}" for name in (of_device if is_device else of_host))
    ratios = f"{row['peak_per_file']:5.2f}x {row['settled_per_file']:7.2f}x {row['loaded_cpu_s']:6.1f}"
    return (
        f"{row['network']:8} {row['kind']:30} {sizes} {ratios}  "
        + (f"host {row['peak_bytes'] / 1e6:.0f} MB, {row['loaded_s']} s" if is_device else row["decode"])
        + ("" if row["is_within"] else "  OVER")
    )


def arguments() -> argparse.Namespace:
    import results

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default="", help="separated by semicolons (default: all)")
    parser.add_argument("--networks", default="", help="separated by commas (default: all of a kind)")
    parser.add_argument(
        "--folder", type=Path, help="for checkpoints, which are removed again (default: a temporary one)"
    )
    parser.add_argument("--device", default="cpu", help="default: %(default)s")
    parser.add_argument("--jobs", type=int, default=1, help="loaded at a time (default %(default)s)")
    parser.add_argument("--out", type=Path, default=results.REPOSITORY / "benchmarks" / "results")
    return parser.parse_args()


def main() -> None:
    import machine
    import packed_files
    import results

    asked, began = arguments(), time.monotonic()
    networks = packed_files.NETWORKS
    if asked.device != "cpu":
        networks, packed_files.SHARD_BYTES = packed_files.LARGE, LARGE_SHARD_BYTES
    kinds = asked.kinds.split(";") if asked.kinds else [*packed_files.KINDS]
    print(HEAD, flush=True)
    asked_networks = asked.networks.split(",") if asked.networks else [*networks]
    pairs = [
        (name, network)
        for name in kinds
        for network in packed_files.KINDS[name].networks
        if network in asked_networks and network in networks
    ]

    def measured(pair: tuple[str, str]) -> dict[str, Any]:
        name, network = pair
        kind = packed_files.KINDS[name]
        with tempfile.TemporaryDirectory(dir=asked.folder) as scratch:
            folder = Path(scratch) / "checkpoint"
            packed_files.write_checkpoint(folder, kind, networks[network])
            options = {**kind.engine, "device": asked.device}
            found = row(network, name, measure(folder, options), packed_files.SHARD_BYTES)
            shutil.rmtree(folder)
        print(line_of(found), flush=True)
        return found

    with ThreadPoolExecutor(asked.jobs) as pool:
        rows = [*pool.map(measured, pairs)]
    date = datetime.now(UTC)
    result = {
        "date": date.isoformat(timespec="seconds"),
        "command": " ".join(["python", "benchmarks/llm/load_memory.py", *sys.argv[1:]]),
        "duration_s": round(time.monotonic() - began),
        "machine": machine.describe(),
        "versions": results.versions(Path(sys.executable), Path("none")),
        "rows": rows,
    }
    asked.out.mkdir(parents=True, exist_ok=True)
    file = asked.out / f"{date:%Y-%m-%d-%H%M}-llm-load-memory.json"
    file.write_text(json.dumps(result, indent=2) + "\n")
    print(file)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--subject"]:
        be_subject(sys.argv[2], json.loads(sys.argv[3]))
    else:
        main()
