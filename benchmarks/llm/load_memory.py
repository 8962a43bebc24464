"""Measures the memory that loading a language model takes, for every kind of checkpoint.

    python benchmarks/llm/load_memory.py [--kinds "fp8 blocks;GPTQ int4"] [--networks dense,experts] [--device cuda]
    python benchmarks/llm/load_memory.py --ranks 2 …

For each kind a checkpoint with random weights is made, in shards of 64 MB, and loaded by a new process with
`Engine.from_pretrained`, which then generates a few tokens. Figures are of the process's own (anonymous) memory beyond
what it has after its imports; the KV cache is small. Weights that stay mapped from their files are not counted: they
belong to the system's page cache. The peak is sampled every millisecond from outside, until the tokens are there.
The bound is 1.1 times the files plus one shard. The result is a dated JSON file.

With --device cuda, networks are larger, shards have 512 MB, and what is compared with the files is the memory that
PyTorch has allocated on the device; the anonymous memory of the process must stay below one shard. Several are loaded
at a time.

With --ranks, that many processes load a part of the network each, on a CPU. Each has a row, and its memory is compared
with the files divided by their number; embeddings and the last layer are on every rank.
"""

import argparse
import importlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
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
    settings = {"num_blocks": 16, "max_num_seqs": 2, "max_model_len": 128, "device": str(device), **options}
    if os.environ.get("RANK", "0") != "0":
        follow_rank(folder, settings)
        return
    engine = Engine.from_pretrained(folder, **settings)
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
    engine.close()


def follow_rank(folder: str, settings: dict[str, Any]) -> None:
    """Load the part of another rank, and compute with rank 0 until it ends."""
    from flambeau.llm.loader import load_follower

    began, began_cpu = time.monotonic(), time.process_time()
    follow = load_follower(Path(folder), **settings)
    loaded_s, loaded_cpu_s = time.monotonic() - began, time.process_time() - began_cpu
    print(
        json.dumps({"loaded_s": round(loaded_s, 2), "loaded_cpu_s": round(loaded_cpu_s, 2), "decode": ""}), flush=True
    )
    follow()


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


class Subject:
    """A process that loads a checkpoint, or a rank's part of it."""

    def __init__(self, folder: Path, options: dict[str, Any], environment: dict[str, str]) -> None:
        command = [sys.executable, __file__, "--subject", str(folder), json.dumps(options)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            env={**os.environ, **environment},
        )
        assert (line := self.read()) == "ready\n", line
        self.memory = Memory(self._process.pid)
        self.before, self.before_all = self.memory.read("RssAnon"), self.memory.read("VmRSS")
        self.memory.reset_peak()
        self.peak = Peak(self.memory)

    def read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def write(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line)

    def found(self, sizes: list[int], given: dict[str, Any]) -> dict[str, Any]:
        """The figures, when all tokens are there; `given` is what the process has said."""
        settled, highest = self.memory.read("RssAnon"), self.memory.read("VmHWM")
        return {
            "file_bytes": sum(sizes),
            "shard_bytes": max(sizes),
            "peak_bytes": max(self.peak.num_bytes, settled) - self.before,
            "settled_bytes": settled - self.before,
            "highest_rss_bytes": highest - self.before_all,
            **given,
        }

    def wait(self) -> None:
        assert self._process.wait(timeout=60) == 0


def measure(folder: Path, options: dict[str, Any], num_ranks: int = 1) -> list[dict[str, Any]]:
    """Load a checkpoint in a new process, or in several, and generate."""
    sizes = [file.stat().st_size for suffix in ("*.safetensors", "*.bin", "*.gguf") for file in folder.glob(suffix)]
    environment = {}
    if num_ranks > 1:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = str(probe.getsockname()[1])
        environment = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        options = {**options, "tensor_parallel_size": num_ranks}
    subjects = [Subject(folder, options, {**environment, "RANK": str(rank)}) for rank in range(num_ranks)]
    with ExitStack() as sampled:
        for subject in subjects:
            sampled.enter_context(subject.peak)
            subject.write("go\n")
        given = [json.loads(subject.read()) for subject in subjects]
    rows = [subject.found(sizes, one) for subject, one in zip(subjects, given, strict=True)]
    for subject in subjects:
        subject.write("end\n")
    for subject in subjects:
        subject.wait()
    if num_ranks > 1:
        return [{**one, "rank": rank, "num_ranks": num_ranks} for rank, one in enumerate(rows)]
    return rows


def row(network: str, kind: str, found: dict[str, Any], allowed_shard_bytes: int) -> dict[str, Any]:
    part_bytes = found["file_bytes"] / found.get("num_ranks", 1)
    limit = FACTOR * part_bytes + allowed_shard_bytes
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
        "peak_per_file": round(found["peak_bytes"] / part_bytes, 2),
        "settled_per_file": round(found["settled_bytes"] / part_bytes, 2),
        "is_within": found["peak_bytes"] <= limit and found["settled_bytes"] <= FACTOR * part_bytes,
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
        + (f" rank {row['rank']} of {row['num_ranks']}" if "rank" in row else "")
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
    parser.add_argument("--ranks", type=int, default=1, help="processes with a part each (default %(default)s)")
    parser.add_argument("--plain", action="store_true", help="without compiled code and kernels")
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

    def measured(pair: tuple[str, str]) -> list[dict[str, Any]]:
        name, network = pair
        kind = packed_files.KINDS[name]
        with tempfile.TemporaryDirectory(dir=asked.folder) as scratch:
            folder = Path(scratch) / "checkpoint"
            packed_files.write_checkpoint(folder, kind, networks[network])
            options = {**kind.engine, "device": asked.device, "compile": not asked.plain}
            all_found = measure(folder, options, asked.ranks)
            rows = [row(network, name, found, packed_files.SHARD_BYTES) for found in all_found]
            shutil.rmtree(folder)
        for one in rows:
            print(line_of(one), flush=True)
        return rows

    with ThreadPoolExecutor(asked.jobs) as pool:
        rows = [row for found in pool.map(measured, pairs) for row in found]
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
