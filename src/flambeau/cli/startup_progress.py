"""Progress of a server's start: a spinner on a terminal, log lines elsewhere."""

from __future__ import annotations

import json
import logging
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self
from urllib.parse import quote

from flambeau.archive.pretrained import TRANSFORMERS, choose_handler, configured_task, example_of
from flambeau.config.server import Address
from flambeau.errors import ConfigError
from flambeau.serving.model import Model
from flambeau.wire.example_requests import PICTURE, SOUND, is_json

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

logger = logging.getLogger(__name__)

TEXT_EXAMPLE = '{"prompt": "Once upon a time", "max_new_tokens": 100, "stream": true}'
EXAMPLES = {
    "text_classifier": '"What a fine day"',
    "sentence_embedder": '["a cat", "a dog"]',
}
GUESSES = {"base_handler": "[0.5]", "onnx": "[0.5]"}  # where neither the model nor its handler tells the shape
GUESS = "{}"
INSTANCES = ("json", "kserve", "instances")  # envelopes that take {"instances": […]}
PLAIN = ("", "body")  # envelopes that leave the body as it is
NO_EXAMPLE = "no example of a request is known, so this one may not fit; set `example = …` in the handler"
JSON = "-H 'content-type: application/json'"


@dataclass(slots=True)
class LoadOutcome:
    """Whether a model failed to load; set inside of `StartupProgress.loading`."""

    failed: bool = False


class StartupProgress:
    """Shows which models are loading, and how to call each one that is ready."""

    def __init__(self, console: Console | None) -> None:
        self._console = console
        self._status: Status | None = None
        self._loading: list[str] = []

    @classmethod
    def for_terminal(cls, *, is_plain: bool = False) -> StartupProgress:
        """With a spinner if stderr is a terminal, unless only log lines may be there."""
        if is_plain or not sys.stderr.isatty():
            return cls(None)
        from rich.console import Console

        return cls(Console(stderr=True))

    def __enter__(self) -> Self:
        if self._console is not None:
            self._status = self._console.status("starting")
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._status is not None:
            self._status.stop()

    @contextmanager
    def loading(self, name: str) -> Iterator[LoadOutcome]:
        """Show a model as loading during the block, then its outcome and the time."""
        began, outcome = time.monotonic(), LoadOutcome()
        self._loading.append(name)
        self._update()
        try:
            yield outcome
        finally:
            self._loading.remove(name)
            if self._console is not None:
                mark, words = ("[red]✗[/]", " failed after") if outcome.failed else ("[green]●[/]", "")
                self._console.print(f"{mark} {name}{words} [dim]{time.monotonic() - began:.1f} s[/]")
            self._update()

    def announce(self, address: Address, models: Sequence[Model], authorization: str = "") -> None:
        """Print a curl command for each model; `authorization` is the option with the key."""
        for model in models:
            url = f"{address}/predictions/{quote(model.name, safe='')}"
            command = curl_command(f"{url} {authorization}".rstrip(), model)
            hint = "" if request_body(model) else NO_EXAMPLE
            if self._console is None:
                logger.info("try: %s", command)
                if hint:
                    logger.info("%s: %s", model.name, hint)
            else:
                self._console.print(f"\n  [bold]{model.name}[/] is ready. Try:\n")
                self._console.print(f"  {command}\n", soft_wrap=True, highlight=False, markup=False)
                if hint:
                    self._console.print(f"  ({hint})\n", style="dim", highlight=False, markup=False)

    def note(self, model: str, words: str) -> None:
        """Show the current step of a model that takes long to load."""
        if self._status is not None:
            from rich.markup import escape

            self._status.update(escape(f"{model}: {words[:100]}"))

    def _update(self) -> None:
        if self._status is not None:
            self._status.update(f"loading {', '.join(self._loading)}" if self._loading else "starting")


def curl_command(url: str, model: Model) -> str:
    """A command that sends a request of the kind that the model expects."""
    is_generator = "generate" in model.abilities
    body = request_body(model) or GUESSES.get(model.handler, GUESS)
    if not is_json(body):  # too long for a command line
        program = f"import json; print(json.dumps({body}))"
        return f"python3 -c {shlex.quote(program)} | curl {url} {JSON} -d @-"
    curl = "curl -N" if is_generator else "curl"  # -N: show text as it arrives
    return f"{curl} {url} {JSON} -d {shlex.quote(body)}"


def request_body(model: Model) -> str:
    """A request that the model accepts, or an expression for it; empty if none is known."""
    return pretrained_example(model) if model.handler == TRANSFORMERS else example_body(model)


def pretrained_example(model: Model) -> str:
    """A request for the task of a Hugging Face model."""
    section = model.config.options.get("handler")
    path = section.get("model_path") if isinstance(section, Mapping) else None
    folder = model.source.folder / str(path or "")
    try:
        task = choose_handler(folder, configured_task(model.config.options)).task
        example = example_of(folder, task)
    except ConfigError:
        return ""
    if example is not None:
        return json.dumps(example)
    return json.dumps({"inputs": PICTURE}) if task in ("image-classification", "object-detection") else SOUND


def example_body(model: Model) -> str:
    """A request body by the model's settings, else as its worker reports it, else by its handler; empty if unknown."""
    example = model.config.options.get("example")
    if example is not None:
        return example if isinstance(example, str) else json.dumps(example)
    default = TEXT_EXAMPLE if "generate" in model.abilities else ""
    body = model.example or EXAMPLES.get(model.handler, default)
    if not body or model.envelope in PLAIN:
        return body
    return f'{{"instances": [{body}]}}' if model.envelope in INSTANCES else ""
