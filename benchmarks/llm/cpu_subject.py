"""One program with one model in a process of its own: reads jobs as JSON lines, writes the seconds each took.

    python cpu_subject.py flambeau FOLDER KIND THREADS
    python cpu_subject.py llama.cpp FILE KIND THREADS
    python cpu_subject.py openvino FOLDER KIND THREADS

A job is {"streams": …, "prompt": …, "tokens": …}: so many sequences, greedy, with prompts of so many random tokens, or
of the tokens of its "text". The reply has the seconds until the first tokens, those of all later ones, and the tokens
of the first sequence. The kind "file" means weights as they are in a GGUF file.
A job {"memory": true} gives the bytes of the weights, of the KV cache, and of what the process has resident.
A job {"rows": …, "skip": …, "reference": …} has lists of tokens instead, how many of each are its prompt, and a folder
of logits; see `compare_rows`.
"""

import ctypes
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

Prompts = list[list[int]]
Reply = dict[str, Any]
Run = Callable[[Prompts, int], Reply]
Score = Callable[[list[int]], np.ndarray]  # the logits [T, V] after each token of a sequence
Sizes = Callable[[], tuple[int, int]]  # the bytes of the weights and of the KV cache
Program = tuple[int, Run, Score, Sizes]  # the first is the size of the vocabulary
MAX_STREAMS, CONTEXT = 32, 640  # tokens of a sequence
MAX_REFERENCE_BYTES = 4 << 30


class Clock:
    """Seconds since the last lap: on the clock, and of the processors, which neighbors on the machine change least."""

    def __init__(self) -> None:
        self._wall, self._cpu = time.perf_counter(), time.process_time()

    def lap(self, name: str) -> dict[str, float]:
        wall, cpu = time.perf_counter(), time.process_time()
        lap = {f"{name}_s": wall - self._wall, f"{name}_cpu_s": cpu - self._cpu}
        self._wall, self._cpu = wall, cpu
        return lap


def flambeau(path: str, kind: str, threads: int) -> Program:
    import torch

    from flambeau.llm.backends.cpu.packed_linear import PackedLinear
    from flambeau.llm.config import EngineConfig
    from flambeau.llm.engine import Engine
    from flambeau.llm.executor.inputs import StepInputs
    from flambeau.llm.network_loader import load_network
    from flambeau.llm.sampling_params import SamplingParams

    torch.set_num_threads(threads)
    options = {"quantization": kind} if kind in ("int8", "int4") else {} if kind == "file" else {"dtype": kind}
    config = EngineConfig(
        device="cpu",
        max_num_seqs=MAX_STREAMS,
        max_model_len=CONTEXT,
        prefix_cache=False,
        kv_cache_bytes=2 << 30,
        **options,
    )
    loaded = load_network(Path(path), config, torch.device("cpu"), None)  # the checkpoint has no tokenizer
    engine = Engine(loaded.arch, loaded.backend, num_blocks=loaded.num_blocks, config=config)
    engine.wait_until_compiled()

    def run(prompts: Prompts, num_tokens: int) -> Reply:
        params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        texts: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
        clock = Clock()
        for i, prompt in enumerate(prompts):
            engine.add(str(i), prompt, params)
        first: dict[str, float] = {}
        while engine.has_work:
            for output in engine.step():
                texts[output.request_id].extend(output.token_ids)
            if not first and all(texts.values()):
                first = clock.lap("first")
        return {**first, **clock.lap("rest"), "ids": texts["0"]}

    def score(ids: list[int]) -> np.ndarray:
        places, num_blocks = torch.arange(len(ids)), -(-len(ids) // config.block_size)
        inputs = StepInputs(
            torch.tensor(ids),
            places,
            config.block_size + places,
            torch.tensor([0, len(ids)]),
            torch.tensor([len(ids)]),
            1 + torch.arange(num_blocks).view(1, -1),
        )
        return loaded.backend.prefill(inputs, places).float().numpy()

    def sizes() -> tuple[int, int]:
        panels = {
            layer.panels.data_ptr(): layer.panels.nbytes for layer in gc.get_objects() if type(layer) is PackedLinear
        }
        cache = loaded.backend.cache
        return sum(panels.values()), sum(each.nbytes for each in (*cache.keys, *cache.values))

    return engine.arch.vocab_size, run, score, sizes


def llama_cpp(path: str, kind: str, threads: int) -> Program:
    from llama_cpp import llama_cpp as api

    log = api.llama_log_callback(lambda *_: None)
    api.llama_log_set(log, None)
    api.llama_backend_init()
    model = api.llama_model_load_from_file(path.encode(), api.llama_model_default_params())
    params = api.llama_context_default_params()
    params.n_ctx, params.n_seq_max = MAX_STREAMS * CONTEXT, MAX_STREAMS
    params.n_batch = params.n_ubatch = 512
    params.n_threads = params.n_threads_batch = threads
    context = api.llama_init_from_model(model, params)
    vocab_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
    batch = api.llama_batch_init(512, 0, 1)

    def logits_of(rows: list[tuple[int, int, int, bool]]) -> Iterator[np.ndarray]:
        """Compute (token, position, sequence, needs logits); the logits are valid until the next ones."""
        for start in range(0, len(rows), 512):
            portion = rows[start : start + 512]
            batch.n_tokens = len(portion)
            for i, (token, position, sequence, needs_logits) in enumerate(portion):
                batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, position, 1
                batch.seq_id[i][0], batch.logits[i] = sequence, needs_logits
            if api.llama_decode(context, batch):
                raise RuntimeError("llama_decode failed")
            for i, row in enumerate(portion):
                if row[3]:
                    logits = ctypes.cast(
                        api.llama_get_logits_ith(context, i), ctypes.POINTER(ctypes.c_float * vocab_size)
                    )
                    yield np.frombuffer(logits.contents, dtype=np.float32)

    def decode(rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """The most likely tokens."""
        return [int(logits.argmax()) for logits in logits_of(rows)]

    def run(prompts: Prompts, num_tokens: int) -> Reply:
        api.llama_memory_clear(api.llama_get_memory(context), True)
        clock = Clock()
        rows = [
            (token, place, sequence, place == len(prompt) - 1)
            for sequence, prompt in enumerate(prompts)
            for place, token in enumerate(prompt)
        ]
        tokens = decode(rows)
        first, ids = clock.lap("first"), [tokens[0]]
        for step in range(num_tokens - 1):
            tokens = decode([(t, len(prompts[i]) + step, i, True) for i, t in enumerate(tokens)])
            ids.append(tokens[0])
        return {**first, **clock.lap("rest"), "ids": ids}

    def score(ids: list[int]) -> np.ndarray:
        api.llama_memory_clear(api.llama_get_memory(context), True)
        return np.stack([each.copy() for each in logits_of([(t, place, 0, True) for place, t in enumerate(ids)])])

    def sizes() -> tuple[int, int]:
        heads = api.llama_model_n_embd(model) // api.llama_model_n_head(model) * api.llama_model_n_head_kv(model)
        return api.llama_model_size(model), params.n_ctx * api.llama_model_n_layer(model) * heads * 2 * 2  # float16

    return vocab_size, run, score, sizes


def open_vino(path: str, kind: str, threads: int) -> Program:
    from openvino_network import OpenVinoNetwork

    network = OpenVinoNetwork(Path(path), kind, threads)

    def run(prompts: Prompts, num_tokens: int) -> Reply:
        network.reset()
        clock = Clock()
        tokens = network.logits(np.array(prompts)).argmax(axis=1)
        first, ids = clock.lap("first"), [int(tokens[0])]
        for _ in range(num_tokens - 1):
            tokens = network.logits(tokens[:, None]).argmax(axis=1)
            ids.append(int(tokens[0]))
        return {**first, **clock.lap("rest"), "ids": ids}

    def score(ids: list[int]) -> np.ndarray:
        raise NotImplementedError("it gives the logits of the last token only")

    return network.vocab_size, run, score, lambda: (network.weight_bytes, 0)


PROGRAMS = {"flambeau": flambeau, "llama.cpp": llama_cpp, "openvino": open_vino}


def resident_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmRSS:"))


def compare_rows(rows: Prompts, num_skipped: int, score: Score, reference: Path) -> Reply:
    """The perplexity of the rows after their prompts, and how far the distributions are from the reference.

    The first call writes the reference, up to a limit of its size. The distance is the mean Kullback-Leibler
    divergence: unlike the perplexity, it is not a matter of luck.
    """
    is_first = not reference.exists()
    reference.mkdir(exist_ok=True)
    chosen, divergences, written = [], [], 0
    for number, ids in enumerate(rows):
        log_p = score(ids)[num_skipped - 1 : -1].astype(np.float64)
        log_p -= log_p.max(axis=1, keepdims=True)
        log_p -= np.log(np.exp(log_p).sum(axis=1, keepdims=True))
        chosen.append(log_p[np.arange(len(log_p)), ids[num_skipped:]])
        path = reference / f"{number}.npy"
        if is_first and written + log_p.nbytes <= MAX_REFERENCE_BYTES:
            np.save(path, log_p)
            written += log_p.nbytes
        if path.exists():
            expected = np.load(path)
            divergences.append((np.exp(expected) * (expected - log_p)).sum(axis=1))
    losses = [-float(each.mean()) for each in chosen]
    divergence = float(np.concatenate(divergences).mean())
    return {"perplexity": float(np.exp(-np.concatenate(chosen).mean())), "divergence": divergence, "losses": losses}


def main(program: str, path: str, kind: str, threads: int) -> None:
    vocab_size, run, score, sizes = PROGRAMS[program](path, kind, threads)
    print(json.dumps({"vocab_size": vocab_size}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        if "memory" in job:
            weights, cache = sizes()
            print(
                json.dumps({"weights_bytes": weights, "cache_bytes": cache, "resident_bytes": resident_bytes()}),
                flush=True,
            )
            continue
        if "rows" in job:
            print(json.dumps(compare_rows(job["rows"], job["skip"], score, Path(job["reference"]))), flush=True)
            continue
        draw, shape = np.random.default_rng(job.get("seed", 0)), (job["streams"], job["prompt"])
        prompts = draw.integers(0, vocab_size, shape).tolist()
        if text := job.get("text"):
            starts = draw.integers(0, len(text) - job["prompt"], job["streams"])
            prompts = [text[start : start + job["prompt"]] for start in starts]
        print(json.dumps(run(prompts, job["tokens"])), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]))
