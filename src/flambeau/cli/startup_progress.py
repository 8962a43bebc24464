"""Progress of a server's start: a spinner on a terminal, log lines elsewhere."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self

from flambeau.config.server import Address
from flambeau.serving.model import Model

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status

logger = logging.getLogger(__name__)

TEXT_EXAMPLE = '{"prompt": "Once upon a time", "max_new_tokens": 100, "stream": true}'


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
            example = model.config.options.get("example") or (TEXT_EXAMPLE if "generate" in model.abilities else None)
            body = f"-H 'content-type: application/json' -d '{example}'" if example else "-T FILE"
            if "generate" in model.abilities:  # -N: show text as it arrives
                body = f"-N {body}"
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
