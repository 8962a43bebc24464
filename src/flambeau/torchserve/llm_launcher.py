"""`python -m ts.llm_launcher`: creates a model folder for a language model and serves it until a signal."""

from __future__ import annotations

import argparse
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from flambeau.archive.pack import Recipe, pack
from flambeau.errors import FlambeauError
from flambeau.serving.workers.host_resources import count_gpus

ENGINES = ("vllm", "trt_llm")  # TorchServe's engines: their flags are accepted, and this server's own engine is used
HANDLER = "gpt_handler"
STOP_S = 60
DTYPE = "bfloat16"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchFlags:
    model_id: str
    engine: str = "vllm"
    model_name: str = "model"
    model_store: Path = Path("model_store")
    disable_token_auth: bool = False
    startup_timeout: int = 1200
    dtype: str = DTYPE
    max_num_seqs: int = 256
    max_model_len: int | None = None
    download_dir: str | None = None
    max_batch_size: int = 4
    kv_cache_fraction: float = 0.1


def to_model_config(flags: LaunchFlags, num_gpus: int) -> dict[str, Any]:
    """The model-config.yaml for these flags on a host with `num_gpus` GPUs, which may be 0."""
    if flags.engine not in ENGINES:
        raise RuntimeError(f"Unsupported LLM Engine: {flags.engine!r} is none of {', '.join(ENGINES)}")
    handler: dict[str, Any] = {
        "model_path": model_path_of(flags.model_id),
        "dtype": flags.dtype if num_gpus or flags.dtype != DTYPE else "auto",  # on a CPU the engine chooses
        "tensor_parallel_size": max(1, num_gpus),
    }
    ranks = {"parallelType": "tp", "parallelLevel": num_gpus} if num_gpus > 1 else {}
    if flags.engine == "vllm":
        handler["max_num_seqs"] = flags.max_num_seqs
        if flags.max_model_len is not None:
            handler["max_model_len"] = flags.max_model_len
        if flags.download_dir is not None:
            handler["download_dir"] = str(Path(flags.download_dir).resolve())
    else:
        handler["max_num_seqs"] = flags.max_batch_size
        handler["kv_cache_fraction"] = flags.kv_cache_fraction
    return {
        "minWorkers": 1,
        "maxWorkers": 1,
        "batchSize": 1,
        "maxBatchDelay": 100,
        "responseTimeout": 1200,
        "startupTimeout": flags.startup_timeout,
        "deviceType": "gpu" if num_gpus else "cpu",
        "asyncCommunication": True,
        **ranks,
        "handler": handler,
    }


def model_path_of(model_id: str) -> str:
    """A folder as an absolute path, since the server may run in another folder; a hub name unchanged."""
    path = Path(model_id).expanduser()
    return str(path.resolve()) if path.is_dir() else model_id


@contextmanager
def model_folder(flags: LaunchFlags, num_gpus: int) -> Iterator[Path]:
    """The model's folder in the store; one that did not exist is created, and removed at the end."""
    flags.model_store.mkdir(parents=True, exist_ok=True)
    folder = flags.model_store / flags.model_name
    if folder.exists():
        yield folder
        return
    with tempfile.TemporaryDirectory() as temporary:
        config = Path(temporary) / "model-config.yaml"
        config.write_text(yaml.safe_dump(to_model_config(flags, num_gpus), sort_keys=False))
        recipe = Recipe(model_name=flags.model_name, handler=HANDLER, version="1.0", config_file=config)
        pack(recipe, flags.model_store, format="no-archive")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def parse(arguments: Sequence[str]) -> LaunchFlags:
    parser = argparse.ArgumentParser(prog="python -m ts.llm_launcher", description="Serve a language model.")
    add = parser.add_argument
    add("--model_name", default="model", help="name of the model, and of its folder in the store")
    add("--model_store", default="model_store", help="folder of models, created if missing")
    add(
        "--model_id",
        default="meta-llama/Meta-Llama-3.1-8B-Instruct",
        help="name on the hub, or a folder",
    )
    add("--disable_token_auth", action="store_true", help="require no key")
    add(
        "--vllm_engine.max_num_seqs",
        dest="max_num_seqs",
        type=int,
        default=256,
        help="concurrent sequences",
    )
    add("--vllm_engine.max_model_len", dest="max_model_len", type=int, help="maximum length of a sequence in tokens")
    add("--vllm_engine.download_dir", dest="download_dir", help="folder for downloaded weights")
    add("--startup_timeout", type=int, default=1200, help="seconds to load the model")
    add("--engine", default="vllm", help="the engine these flags are for: vllm or trt_llm")
    add("--dtype", default=DTYPE, help="data type of the weights")
    add(
        "--trt_llm_engine.max_batch_size",
        dest="max_batch_size",
        type=int,
        default=4,
        help="concurrent sequences",
    )
    add(
        "--trt_llm_engine.kv_cache_free_gpu_memory_fraction",
        dest="kv_cache_fraction",
        type=float,
        default=0.1,
        help="share of the free GPU memory for the KV cache",
    )
    given = vars(parser.parse_args(arguments))
    return LaunchFlags(**{**given, "model_store": Path(given["model_store"])})


def main(arguments: Sequence[str]) -> int:
    """Serve the model until a signal; return the exit status of the server."""
    flags = parse(arguments)
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell starts background jobs with SIGINT ignored
        signal.signal(number, signal.default_int_handler)
    try:
        with model_folder(flags, count_gpus()):
            return _serve(flags)
    except KeyboardInterrupt:
        return 0
    except FlambeauError as error:
        print(error, file=sys.stderr)
        return 1


def _serve(flags: LaunchFlags) -> int:
    command = [sys.executable, "-m", "flambeau.torchserve.command"]
    subprocess.run([*command, "--stop", "--foreground"], check=False)  # as in TorchServe: one server at a time
    words = ["--start", "--foreground", "--ncs", "--model-store", str(flags.model_store), "--models", flags.model_name]
    if flags.disable_token_auth:
        words.append("--disable-token-auth")
    with subprocess.Popen([*command, *words]) as server:
        try:
            return server.wait()
        finally:
            server.terminate()
            try:
                server.wait(STOP_S)
            except subprocess.TimeoutExpired:
                server.kill()
