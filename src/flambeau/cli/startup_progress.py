"""Progress of a server's start: a spinner on a terminal, log lines elsewhere."""

from __future__ import annotations

import ast
import json
import logging
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from flambeau.archive.pretrained import TRANSFORMERS, choose_handler, configured_task, example_of
from flambeau.config.server import Address
from flambeau.errors import ConfigError
from flambeau.serving.model import Model

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

logger = logging.getLogger(__name__)

TEXT_EXAMPLE = '{"prompt": "Once upon a time", "max_new_tokens": 100, "stream": true}'
EXAMPLES = {"text_classifier": '"What a fine day"', "sentence_embedder": '["a cat", "a dog"]'}
PICTURES = ("image_classifier", "image_segmenter", "object_detector", "dali_image_classifier")
TENSORS = ("base_handler", "onnx")
MAX_SOURCE_BYTES = 1 << 20
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
    def for_terminal(cls) -> StartupProgress:
        """With a spinner if stderr is a terminal."""
        if not sys.stderr.isatty():
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
                color = "red" if outcome.failed else "green"
                self._console.print(f"[{color}]●[/] {name} [dim]{time.monotonic() - began:.1f} s[/]")
            self._update()

    def announce(self, address: Address, models: Sequence[Model]) -> None:
        """Print a curl command for each model."""
        for model in models:
            url = f"{address}/predictions/{model.name}"
            body = curl_arguments(model)
            if self._console is None:
                logger.info("try: curl %s %s", url, body)
            else:
                self._console.print(f"\n  [bold]{model.name}[/] is ready. Try:\n")
                self._console.print(f"  curl {url} {body}\n", soft_wrap=True, highlight=False, markup=False)

    def note(self, model: str, words: str) -> None:
        """Show the current step of a model that takes long to load."""
        if self._status is not None:
            from rich.markup import escape

            self._status.update(escape(f"{model}: {words[:100]}"))

    def _update(self) -> None:
        if self._status is not None:
            self._status.update(f"loading {', '.join(self._loading)}" if self._loading else "starting")


def curl_arguments(model: Model) -> str:
    """The options of a curl command that sends a request of the kind that the handler expects."""
    is_generator = "generate" in model.abilities
    example = model.config.options.get("example")
    if example is None:
        example = EXAMPLES.get(model.handler, TEXT_EXAMPLE if is_generator else None)
    if example is None and (found := example_in(model.source.folder, model.handler)) is not None:
        example = json.dumps(found)
    if example is not None:
        body = f"{JSON} -d {shlex.quote(example if isinstance(example, str) else json.dumps(example))}"
        return f"-N {body}" if is_generator else body  # -N: show text as it arrives
    if model.handler == TRANSFORMERS:
        return pretrained_arguments(model)
    if model.handler in PICTURES:
        return "-T PICTURE.jpg"
    return f"{JSON} -d @NUMBERS.json" if model.handler in TENSORS else "-H 'content-type: TYPE' -T FILE"


def pretrained_arguments(model: Model) -> str:
    """The options for the task of a Hugging Face model."""
    section = model.config.options.get("handler")
    path = section.get("model_path") if isinstance(section, Mapping) else None
    folder = model.source.folder / str(path or "")
    try:
        task = choose_handler(folder, configured_task(model.config.options)).task
        example = example_of(folder, task)
    except ConfigError:
        return "-H 'content-type: TYPE' -T FILE"
    if example is not None:
        return f"{JSON} -d {shlex.quote(json.dumps(example))}"
    return "-T PICTURE.jpg" if task in ("image-classification", "object-detection") else "-T SOUND.wav"


def example_in(folder: Path, handler: str) -> object:
    """The `example` of a handler's class or module, if it is a literal. The file is parsed, never run."""
    name = handler.partition(":")[0]
    file = folder / (name if name.endswith(".py") else f"{name}.py")
    try:
        with file.open("rb") as source:
            tree = ast.parse(source.read(MAX_SOURCE_BYTES))
    except (OSError, ValueError, SyntaxError, RecursionError, MemoryError):
        return None
    blocks = [tree.body, *(node.body for node in tree.body if isinstance(node, ast.ClassDef))]
    for statement in (statement for block in blocks for statement in block):
        if isinstance(statement, ast.Assign) and [ast.unparse(target) for target in statement.targets] == ["example"]:
            try:
                found: object = ast.literal_eval(statement.value)
                json.dumps(found)
            except (ValueError, TypeError):
                return None
            return found
    return None
