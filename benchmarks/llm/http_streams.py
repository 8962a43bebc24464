"""Streams of a network through a server and HTTP, for gpu.py: the network is written to a folder and served.

A rate counts the tokens that arrive while all streams run, as gpu.py does for the engine alone. The same number of new
tokens is compared: keys and values of longer texts take longer to read.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "serving")]

from server import find_ports  # noqa: E402

from flambeau.cli.llm_bench import BenchParams, read_stream  # noqa: E402

if TYPE_CHECKING:  # processes that read streams start without torch
    from flambeau.llm.models.transformer import Transformer

NAME = "bench"
STREAMS = (1, 32, 128)
NEW_TOKENS = 400
STARTS_S = 240
WARM_UP_S = 15
MIN_ROUNDS = 3
MODEL_LENGTH = 2048
CLIENTS = 8  # processes: one would be busy with events


def write_checkpoint(model: Transformer, folder: Path) -> None:
    """A Hugging Face folder with the network's weights and a tokenizer of as many words as it has ids."""
    from safetensors.torch import save_file

    arch = model.arch
    tensors = {}
    sizes = [arch.num_heads * arch.head_size, *[arch.num_kv_heads * arch.head_size] * 2]
    for name, tensor in model.state_dict().items():
        if name.endswith("qkv_proj.weight"):
            names = [name.replace("qkv_proj", each) for each in ("q_proj", "k_proj", "v_proj")]
            tensors |= {each: part.contiguous() for each, part in zip(names, tensor.split(sizes), strict=True)}
        elif name.endswith("gate_up_proj.weight"):
            names = [name.replace("gate_up_proj", each) for each in ("gate_proj", "up_proj")]
            tensors |= {each: part.contiguous() for each, part in zip(names, tensor.chunk(2), strict=True)}
        elif not name.startswith("rotation"):
            tensors[name] = tensor
    save_file(tensors, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": arch.vocab_size,
        "hidden_size": arch.hidden_size, "intermediate_size": arch.intermediate_size,
        "num_hidden_layers": arch.num_layers, "num_attention_heads": arch.num_heads,
        "num_key_value_heads": arch.num_kv_heads, "head_dim": arch.head_size,
        "max_position_embeddings": arch.max_length, "rms_norm_eps": arch.norm_epsilon, "rope_theta": arch.rope_theta,
        "tie_word_embeddings": model.lm_head is None, "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, arch.vocab_size)}
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def measure_http(model: Transformer) -> dict[str, Any]:
    """Tokens/s of several numbers of greedy streams, and the time from the server's start to its first token."""
    import torch

    parent = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="flambeau-bench-", dir=parent))
    try:
        write_checkpoint(model, folder)
        model.to("meta")  # the server needs the memory
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return serve_and_ask(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def serve_and_ask(folder: Path) -> dict[str, Any]:
    port = find_ports()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "flambeau.cli.main", "llm", "serve", folder, "--name", NAME, "--port", port]
    command += ["--management-port", port + 1, "--metrics-port", port + 2, "--max-num-seqs", max(STREAMS)]
    command += ["--max-model-len", MODEL_LENGTH, "--startup-timeout", STARTS_S]
    began = time.monotonic()
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen([*map(str, command)], stdout=log, stderr=subprocess.STDOUT, cwd=folder)
    try:
        found: dict[str, Any] = {"start_to_first_token_s": first_token_s(server, url, began, folder / "log")}
        for number in STREAMS:
            best = ask_until_warm(port, server.pid, number)
            found[f"tokens_per_s of {number}"] = best.tokens_per_s
            found[f"cpu_us_per_token of {number}"] = best.cpu_us
    finally:
        server.terminate()
        server.wait()
    return found


def first_token_s(server: subprocess.Popen[bytes], url: str, began: float, log: Path) -> float:
    """Seconds from the server's start until a first stream has begun."""
    while True:
        try:
            timing = read_stream(url, NAME, BenchParams(streams=(1,), prompt_tokens=6, new_tokens=2), 0)
        except Exception as error:
            if server.poll() is not None or time.monotonic() > began + STARTS_S:
                raise RuntimeError(
                    f"the server does not answer ({error}); its log ends: {log.read_text()[-2000:]}"
                ) from None
            time.sleep(0.1)
        else:
            return time.monotonic() - began - (timing.ended - timing.first)


# ---- rates ----


@dataclass(frozen=True, slots=True)
class Rate:
    """What one round has measured."""

    tokens_per_s: float  # while all streams run
    cpu_us: Mapping[str, float]  # by thread or process: CPU time for each token of the round, of all its streams


def ask_until_warm(port: int, server: int, number: int) -> Rate:
    """The median of the two best rounds. Steps are captured while requests run: until the rate rises no more."""
    deadline = time.monotonic() + WARM_UP_S
    rates = [ask(port, server, number) for _ in range(MIN_ROUNDS)]
    while time.monotonic() < deadline and has_risen(rates):
        rates.append(ask(port, server, number))
    best = sorted(rates, key=lambda rate: rate.tokens_per_s)[-2:]
    return Rate(statistics.median(rate.tokens_per_s for rate in best), best[-1].cpu_us)


def has_risen(rates: Sequence[Rate]) -> bool:
    return rates[-1].tokens_per_s > 1.02 * max(rate.tokens_per_s for rate in rates[:-1])


def ask(port: int, server: int, number: int, *, new_tokens: int = NEW_TOKENS, **options: Any) -> Rate:
    """Streams that begin together, read by several processes; `options` are fields of their requests."""
    shares = [share for share in (number // CLIENTS + (i < number % CLIENTS) for i in range(CLIENTS)) if share]
    options = {"model": NAME, **options}
    asked = [(port, share, 1000 * i, new_tokens, json.dumps(options)) for i, share in enumerate(shares)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    script = str(HERE / "stream_client.py")
    clients = [subprocess.Popen([sys.executable, script, *map(str, each)], **pipes) for each in asked]
    for client in clients:
        client.stdout.readline()  # it is ready
    before = thread_seconds(server)
    for client in clients:
        client.stdin.write(b"begin\n")
        client.stdin.flush()
    found = [json.loads(client.communicate()[0]) for client in clients]
    spent = thread_seconds(server)
    spent.subtract(before)
    spent["clients"] = sum(client["cpu_s"] for client in found)
    streams = [stream for client in found for stream in client["streams"]]
    num_tokens = sum(count for count, _ in streams)
    return Rate(rate_of(streams), {name: round(1e6 * seconds / num_tokens, 1) for name, seconds in spent.items()})


def rate_of(streams: Sequence[tuple[int, Sequence[float]]]) -> float:
    """Tokens per second from the moment when the last stream begins until the first one ends."""
    begin, end = max(arrivals[0] for _, arrivals in streams), min(arrivals[-1] for _, arrivals in streams)
    if begin >= end:
        raise RuntimeError("the streams did not run at the same time; ask for more tokens")
    # An event has a token; the last two of a stream have none.
    tokens = sum(count / len(arrivals) * sum(begin < at <= end for at in arrivals) for count, arrivals in streams)
    return tokens / (end - begin)


# ---- threads ----


def thread_seconds(server: int) -> Counter[str]:
    """CPU time of the server, of the thread of its worker that runs the engine, and of the worker's others."""
    found: Counter[str] = Counter()
    for pid in [server, *descendants(server)]:
        is_worker = b"flambeau.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
        for thread in Path(f"/proc/{pid}/task").iterdir():
            if is_worker:
                name = "engine thread" if thread.name == str(pid) else "worker's other threads"
            else:
                name = "server" if pid == server else "server's other processes"
            found[name] += sum(map(int, stat_of(thread)[11:13])) / os.sysconf("SC_CLK_TCK")
    return found


def descendants(pid: int) -> list[int]:
    """All processes below one."""
    parents = {int(path.name): int(stat_of(path)[1]) for path in Path("/proc").glob("[0-9]*")}
    found = [pid]
    for each in found:
        found += [child for child, parent in parents.items() if parent == each]
    return found[1:]


def stat_of(folder: Path) -> list[str]:
    """The fields after the name: state, parent …; zeros if it has just ended."""
    try:
        return (folder / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["0"] * 50
