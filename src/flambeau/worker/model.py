"""LoadedModel: a model's handler, warmed up and ready to run, and the mode its jobs run in."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from flambeau import __version__
from flambeau.archive.manifest import manifest_of
from flambeau.config.model import read_options
from flambeau.errors import HandlerError
from flambeau.metrics.definitions import Definition
from flambeau.wire.messages import Load, Request
from flambeau.worker.context import Context, new_metrics
from flambeau.worker.generation import Generation, generation_of
from flambeau.worker.handler_mistakes import explain_training
from flambeau.worker.inputs import InputReader, types_of
from flambeau.worker.loader import LoadedHandler, ModelTensors, declared_tensors, finish, in_envelope, load_handler

logger = logging.getLogger(__name__)

ModeName = Literal["batches", "pipeline", "async", "continuous", "generation", "follower"]
Pipeline = tuple[Callable[[Any], Any], Callable[[Any, Context], Any]]  # rows → inputs, (inputs, context) → result
USAGE = "warmup: {body: <JSON>} or warmup: {file: <a file of the model>}, optionally with batch_sizes: [1, 8]"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """What the modes need; `pipeline` and `generation` are set in the modes of that name."""

    mode: ModeName
    handler: LoadedHandler
    context: Context
    reader: InputReader
    event_loop: asyncio.AbstractEventLoop
    pipeline: Pipeline | None
    generation: Generation | None
    can_share_memory: bool

    @property
    def abilities(self) -> tuple[str, ...]:
        """What front ends may ask for besides predictions; an envelope expects its own kind of input."""
        if self.handler.envelope:
            return ()
        # Those of some handlers depend on the model that they have loaded.
        return tuple(getattr(self.handler.handler, "abilities", self.handler.abilities))

    @property
    def tensors(self) -> ModelTensors:
        """The inputs and outputs that the handler declares."""
        return ModelTensors() if self.handler.envelope else declared_tensors(self.handler.handler)


def load_model(load: Load, event_loop: asyncio.AbstractEventLoop) -> LoadedModel:
    """Load and warm up the handler; its exceptions pass through."""
    folder = Path(load.folder)
    context = new_context(load)
    handler = loader_for(load)(load.handler, folder, context, event_loop)
    if sentence := explain_training(handler.handler, handler.handle):
        logger.warning("%s", sentence)
    handler = in_envelope(handler, load.envelope, folder)
    pipeline = pipeline_of(handler) if is_pipelined(load, context) else None
    reader = InputReader(decode=load.decode_input, explains=load.explains_bodies)
    generation = generation_of(handler) if load.schedule != "sequences" else None
    warmup = read_warmup(context.model_yaml_config, folder, load.batch_size)
    if warmup and not (generation and load.rank):  # rank 0 drives the other ranks of a generation
        warm_up(handler, context, reader, event_loop, warmup)
    if generation is None:
        handler = as_scheduled(handler, load, event_loop)
    return LoadedModel(
        mode=mode_of(load, handler, pipeline, generation),
        handler=handler,
        context=context,
        reader=reader,
        event_loop=event_loop,
        pipeline=pipeline,
        generation=generation,
        can_share_memory=reader.segments.can_read(load.probe),
    )


def mode_of(load: Load, handler: LoadedHandler, pipeline: Pipeline | None, generation: Generation | None) -> ModeName:
    if generation is not None:
        return "generation" if load.rank == 0 else "follower"
    if load.schedule == "continuous":
        return "continuous"
    if handler.is_concurrent:
        return "async"
    return "batches" if pipeline is None else "pipeline"


def new_context(load: Load) -> Context:
    folder = Path(load.folder)
    manifest = manifest_of(folder)
    options = read_options(folder / manifest.config_file) if manifest and manifest.config_file else {}
    return Context(
        load.model,
        load.folder,
        dict(manifest.raw) if manifest else None,
        load.batch_size,
        load.gpu_id,
        __version__,
        load.limit_max_image_pixels,
        new_metrics(load.model, load.metrics_file, (Definition(n, k, u, tuple(d)) for n, k, u, d in load.metrics)),
        options,
    )


def loader_for(load: Load) -> Callable[..., LoadedHandler]:
    if not load.watch:
        return load_handler
    from flambeau.worker.code_reload import load_watched  # only workers that watch their code load this

    return load_watched


def is_pipelined(load: Load, context: Context) -> bool:
    """Whether the model asks for `pipeline: true`; code that may change at any time is not cut into halves."""
    return bool(context.model_yaml_config.get("pipeline")) and not load.watch and load.schedule == "batches"


def pipeline_of(handler: LoadedHandler) -> Pipeline:
    """The two halves of a handler that can prepare one batch while it computes another."""
    if handler.envelope:
        raise HandlerError(f"pipeline: true does not go with an envelope ({handler.envelope}); leave one of them out")
    if not hasattr(handler.handler, "pipeline"):
        raise HandlerError("pipeline: true needs a handler that builds on BaseHandler, with its stages")
    halves: Pipeline = handler.handler.pipeline()
    return halves


def as_scheduled(handler: LoadedHandler, load: Load, event_loop: asyncio.AbstractEventLoop) -> LoadedHandler:
    """The handler, with each call of an `async def` run to its end where calls must not overlap."""
    if load.schedule == "async" and not handler.is_concurrent:
        logger.warning("asyncCommunication needs an `async def handle`; this one is called for one request at a time")
    if load.schedule in ("batches", "async") or not handler.is_concurrent:
        return handler
    handle = handler.handle

    @functools.wraps(handle)
    def handle_to_the_end(data: Any, context: Context) -> Any:
        result: Any = handle(data, context)
        if inspect.isasyncgen(result):
            return iterate(result, event_loop)
        return event_loop.run_until_complete(result) if inspect.isawaitable(result) else result

    return replace(handler, handle=handle_to_the_end, is_concurrent=False)


def iterate(chunks: AsyncGenerator[Any, Any], event_loop: asyncio.AbstractEventLoop) -> Iterator[Any]:
    """The items of an asynchronous generator, as a plain generator."""
    try:
        while True:
            try:
                yield event_loop.run_until_complete(anext(chunks))
            except StopAsyncIteration:
                return
    finally:
        event_loop.run_until_complete(chunks.aclose())


@dataclass(frozen=True, slots=True)
class Warmup:
    """An example request, and the batch sizes to run it in."""

    body: bytes
    content_type: str
    batch_sizes: Sequence[int]


def read_warmup(options: Mapping[str, Any], folder: Path, batch_size: int) -> Warmup | None:
    """The `warmup` section of a model's configuration; raises HandlerError if it is invalid."""
    section = options.get("warmup")
    if not section:
        return None
    if section is True and "example" in options:
        section = {"body": options["example"]}
    if not isinstance(section, dict) or ("body" in section) == ("file" in section):
        raise HandlerError(f"the warmup section of the model's configuration is invalid; write {USAGE}")
    sizes = section.get("batch_sizes", sorted({1, batch_size}))
    if not isinstance(sizes, list) or not all(type(size) is int and size > 0 for size in sizes):
        raise HandlerError(f"warmup: batch_sizes must be a list of whole numbers from 1 on, not {sizes!r}")
    if "body" in section:
        body = section["body"]
        text = body if isinstance(body, str) and options.get("warmup") is True else json.dumps(body)
        return Warmup(text.encode(), "application/json", sizes)
    import mimetypes

    file = folder / str(section["file"])
    try:
        return Warmup(file.read_bytes(), mimetypes.guess_type(file.name)[0] or "application/octet-stream", sizes)
    except OSError as error:
        raise HandlerError(f"warmup: {section['file']} cannot be read: {error.strerror}") from None


def warm_up(
    handler: LoadedHandler, context: Context, reader: InputReader, loop: asyncio.AbstractEventLoop, warmup: Warmup
) -> None:
    """Run the example in each batch size; raises HandlerError if the handler fails."""
    began = time.perf_counter()
    for size in warmup.batch_sizes:
        headers = [("content-type", warmup.content_type)]
        requests = [Request(-1 - i, f"warm-up-{i}", headers, warmup.body) for i in range(size)]
        rows = [reader.read(request) for request in requests]
        context.begin(requests, [types_of(row) for row in rows])
        try:
            result = handler.handle(rows, context)
            for value in result if isinstance(result, list) else [result]:
                finish(value, loop)
        except Exception as error:
            text = f"the handler failed on its warm-up example: {error}"
            raise HandlerError(text, is_final=False) from error
    context.begin([], [])
    context.take_samples()  # those of the warm-up are not reported
    sizes = ", ".join(map(str, warmup.batch_sizes))
    logger.info("warmed up with batches of %s in %.2f s", sizes, time.perf_counter() - began)
