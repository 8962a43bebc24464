"""`flambeau llm bench`: measures a language model through a server, or the engine in this process."""

from __future__ import annotations

import json
import random
import statistics
import string
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flambeau.cli.api_client import RequestFailed, authorization, send
from flambeau.cli.llm_chat import find_text_model
from flambeau.cli.options import check_checkpoint, checkpoint_folder
from flambeau.cli.output import print_json, print_table, show_progress
from flambeau.errors import ConfigError

ANY_IDS = range(3, 253)  # tokens that vocabularies of all sizes have


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchParams:
    """The load of a benchmark; each number of streams is measured separately."""

    streams: Sequence[int]
    prompt_tokens: int
    new_tokens: int


@dataclass(frozen=True, slots=True)
class StreamTiming:
    """Times of one streamed answer at its reader, in seconds of `perf_counter`."""

    began: float
    first: float
    ended: float
    num_tokens: int


def bench(target: str, model: str | None, params: BenchParams, *, options: dict[str, Any], as_json: bool) -> None:
    """Measure and print a row for each number of streams."""
    try:
        rows = measure_rows(target, model, params, options)
    finally:
        show_progress()
    if as_json:
        print_json(rows)
        return
    head = ["STREAMS", "FIRST TOKEN", "TOKENS/S", *(["ACCEPTED"] if any("accepted" in row for row in rows) else [])]
    print_table(head, [to_row(row)[: len(head)] for row in rows])


def measure_rows(target: str, model: str | None, params: BenchParams, options: dict[str, Any]) -> list[dict[str, Any]]:
    is_server = target.startswith(("http://", "https://"))
    if is_server:
        return bench_server(target, model or find_text_model(target), params)
    show_progress(f"loading and measuring {target}")
    return bench_engine(target, params, options)


def to_row(row: dict[str, Any]) -> list[str]:
    accepted = row.get("accepted")
    share = "" if accepted is None else f"{accepted:.0%}"
    return [str(row["streams"]), f"{row['first_token_ms']:.1f} ms", f"{row['tokens_per_s']:.0f}", share]


def bench_engine(path: str, params: BenchParams, options: dict[str, Any]) -> list[dict[str, Any]]:
    """Measure the engine in this process, after a warm-up round."""
    check_checkpoint(Path(path))
    if "draft" in options:
        check_checkpoint(Path(options["draft"]), "--draft")
    try:
        from flambeau.llm.bench import measure
        from flambeau.llm.engine import Engine
        from flambeau.llm.errors import LLMError
    except ImportError as error:
        raise ConfigError(f"the engine needs {error.name}: pip install 'flambeau[llm]'") from None
    try:
        engine = Engine.from_pretrained(checkpoint_folder(Path(path)), **options)
    except LLMError as error:
        raise ConfigError(str(error)) from error
    try:
        sizes = {"prompt_tokens": params.prompt_tokens, "new_tokens": params.new_tokens}
        for _ in measure(engine, params.streams, prompt_tokens=params.prompt_tokens, new_tokens=8):
            pass
        engine.wait_until_compiled()
        return [asdict(figure) for figure in measure(engine, params.streams, **sizes)]
    except LLMError as error:  # the prompt is too long, for example
        raise ConfigError(str(error)) from error
    finally:
        engine.close()


def bench_server(url: str, model: str, params: BenchParams) -> list[dict[str, Any]]:
    """Measure a server over HTTP, with one thread per stream."""
    rows = []
    ids = ordinary_ids(url, model)
    for number in params.streams:
        show_progress(f"{number} {'stream' if number == 1 else 'streams'} of {params.new_tokens} tokens")
        with ThreadPoolExecutor(number) as threads:
            seen = [*threads.map(lambda i, n=number: read_stream(url, model, params, 1000 * n + i, ids), range(number))]
        seconds = max(stream.ended for stream in seen) - min(stream.first for stream in seen)
        rows.append(
            {
                "streams": number,
                "first_token_ms": 1000 * statistics.median(stream.first - stream.began for stream in seen),
                "tokens_per_s": sum(stream.num_tokens for stream in seen) / seconds,
            }
        )
    return rows


def ordinary_ids(url: str, model: str) -> Sequence[int]:
    """Tokens of a text: special ones may stand for images or sounds, which prompts of ids cannot have."""
    ask = {"model": model, "prompt": string.ascii_letters + string.digits, "add_special_tokens": False}
    headers = {"content-type": "application/json", **authorization("FLAMBEAU_INFERENCE_KEY")}
    try:
        reply = json.load(send(url, "POST", "/tokenize", json.dumps(ask).encode(), headers))
        return reply["tokens"] or ANY_IDS
    except (RequestFailed, ValueError, KeyError, TypeError):  # a server that has no /tokenize
        return ANY_IDS


def read_stream(url: str, model: str, params: BenchParams, salt: int, ids: Sequence[int] = ANY_IDS) -> StreamTiming:
    """Request one text and read it to its end. Prompts of other salts are others, so that no prefix is cached."""
    body = {
        "model": model,
        "prompt": random.Random(salt).choices(ids, k=params.prompt_tokens),
        "max_tokens": params.new_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    headers = {"content-type": "application/json", **authorization("FLAMBEAU_INFERENCE_KEY")}
    began, first, last = time.perf_counter(), 0.0, b""
    response = send(url, "POST", "/v1/completions", json.dumps(body).encode(), headers)
    for line in response:
        if line.startswith(b"data: {"):
            first = first or time.perf_counter()
            last = line
    num_tokens = json.loads(last[len(b"data: ") :])["usage"]["completion_tokens"]
    return StreamTiming(began, first, time.perf_counter(), num_tokens)
