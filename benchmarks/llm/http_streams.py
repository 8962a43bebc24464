"""Streams of a network through a server and HTTP, for gpu.py: the network is written to a folder and served."""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
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
WARM_UP_S = 10
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
        "pre_tokenizer": {"type": "Whitespace"}, "post_processor": None, "decoder": None,
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
    command += ["--max-model-len", 2048, "--startup-timeout", STARTS_S]
    began = time.monotonic()
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen([*map(str, command)], stdout=log, stderr=subprocess.STDOUT, cwd=folder)
    try:
        found: dict[str, Any] = {"start_to_first_token_s": first_token_s(server, url, began, folder / "log")}
        for number in STREAMS:
            deadline = time.monotonic() + WARM_UP_S
            rates = [ask(url, number)]
            # Steps are captured while requests run: until the rate does not rise any more.
            while time.monotonic() < deadline and (len(rates) < 3 or rates[-1] > 1.02 * max(rates[:-1])):
                rates.append(ask(url, number))
            found[f"tokens_per_s of {number}"] = statistics.median(sorted(rates)[-2:])
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


def ask(url: str, number: int) -> float:
    """Tokens per second of streams that begin together, after the last has begun; read by several processes."""
    shares = [share for share in (number // CLIENTS + (i < number % CLIENTS) for i in range(CLIENTS)) if share]
    command = [sys.executable, __file__, url]
    clients = [
        subprocess.Popen([*command, str(share), str(1000 * i)], stdout=subprocess.PIPE, text=True)
        for i, share in enumerate(shares)
    ]
    timings = [timing for client in clients for timing in json.loads(client.communicate()[0])]
    first, ended = max(timing[0] for timing in timings), max(timing[1] for timing in timings)
    # Those that began before the last have some of their tokens already.
    tokens = sum((ended_at - first) / (ended_at - began) * (count - 1) for began, ended_at, count in timings)
    return tokens / (ended - first)


def read_streams(url: str, number: int, salt: int) -> list[tuple[float, float, int]]:
    """First and last times, on a clock that all processes share, and numbers of tokens."""
    params, shift = (
        BenchParams(streams=(number,), prompt_tokens=6, new_tokens=NEW_TOKENS),
        time.time() - time.perf_counter(),
    )
    with ThreadPoolExecutor(number) as threads:
        found = threads.map(lambda i: read_stream(url, NAME, params, salt + i), range(number))
        return [(each.first + shift, each.ended + shift, each.num_tokens) for each in found]


if __name__ == "__main__":
    print(json.dumps(read_streams(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))))
