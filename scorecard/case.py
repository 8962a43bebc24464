"""Case: one attack or fault. Stage: where it runs, and what it has measured."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from scorecard import HANDLERS
from support.command import Command
from support.configured import ConfiguredServer
from support.running import HANDLERS as TEST_HANDLERS
from support.running import RunningServer

Group = Literal["faults", "clients", "access", "load", "fuzzing"]
State = Literal["kept", "broken", "not run"]
Value = float | int | str


BUSY = 20


class NotHere(Exception):
    """The case needs something that this machine does not have."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How much a case does: `of(full, quick)` chooses a number."""

    is_quick: bool = False
    chaos_s: float = 60
    fuzz_s: float = 15
    seed: int = 0

    def of(self, full: int, quick: int) -> int:
        return quick if self.is_quick else full


@dataclass(frozen=True, slots=True)
class Check:
    """One measured value; without a `bound` it is information."""

    name: str
    value: Value
    unit: str = ""
    bound: str = ""
    holds: bool = True


class Stage:
    """A folder, the servers that a case starts in it, and the checks that it makes."""

    def __init__(self, folder: Path, scale: Scale) -> None:
        self.folder, self.scale = folder, scale
        self.checks: list[Check] = []
        self._servers: list[RunningServer] = []
        self._commands: list[Command] = []
        self._numbers = itertools.count()

    # ---- measuring ----

    def note(self, name: str, value: Value, unit: str = "") -> None:
        """Record a value that has no bound."""
        self.checks.append(Check(name, _rounded(value), unit))

    def at_most(self, name: str, value: float, limit: float, unit: str = "") -> None:
        if self.scale.is_quick and unit in ("s", "ms"):
            limit *= BUSY  # `make test` must pass on a busy machine; the full run judges times
        self.checks.append(Check(name, _rounded(value), unit, f"≤ {limit:g}", value <= limit))

    def within(self, name: str, seconds: float | None, limit_s: float) -> None:
        """Something happened in time; None: it did not happen at all."""
        if seconds is None:
            self.checks.append(Check(name, "never", "", f"≤ {limit_s:g} s", False))
        else:
            self.at_most(name, seconds, limit_s, "s")

    def at_least(self, name: str, value: float, limit: float, unit: str = "") -> None:
        self.checks.append(Check(name, _rounded(value), unit, f"≥ {limit:g}", value >= limit))

    def equal(self, name: str, value: Value, expected: Value) -> None:
        self.checks.append(Check(name, _rounded(value), "", f"= {expected}", value == expected))

    def none(self, name: str, found: list[Any]) -> None:
        """There must be none of these; the first ones are shown."""
        shown = "0" if not found else f"{len(found)}: " + "; ".join(_brief(one) for one in found[:3])
        self.checks.append(Check(name, shown, "", "= 0", not found))

    # ---- servers ----

    def new_folder(self, name: str) -> Path:
        folder = self.folder / f"{name}-{next(self._numbers)}"
        folder.mkdir()
        return folder

    def serve(self, *arguments: str | Path, env: dict[str, str] | None = None) -> RunningServer:
        """A ready `flambeau serve`; handlers of the scorecard and of tests/support are named by their files."""
        words = [str(handler_file(word)) for word in arguments]
        server = RunningServer(self.new_folder("server") / "log", *words, env=env)
        self._servers.append(server)
        return server.wait_ready()

    def configured(self, *models: str | Path, env: dict[str, str] | None = None, **settings: Any) -> ConfiguredServer:
        """A ready server with settings of ServerConfig."""
        server = ConfiguredServer(self.new_folder("server"), *map(handler_file, models), env=env, **settings)
        self._servers.append(server)
        return server.wait_ready()

    def command(self) -> Command:
        """A `torchserve` command in a folder of its own."""
        command = Command(self.new_folder("command"))
        self._commands.append(command)
        return command

    def forget(self, server: RunningServer) -> None:
        """The case has ended this server itself."""
        self._servers.remove(server)

    def close(self) -> None:
        """Stop the servers; each must still run, exit with status 0 and have logged no error of its own."""
        statuses = [_stop(server) for server in self._servers]
        if statuses:
            self.none("servers that crashed or exited badly", [status for status in statuses if status != 0])
            self.none("tracebacks of the server", [line for s in self._servers for line in server_tracebacks(s.log)])
        for command in self._commands:
            command.stop_all()
        self._servers, self._commands = [], []


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A row of the scorecard. `run` measures; it does not judge what it was not asked to."""

    name: str
    group: Group
    promise: str
    run: Callable[[Stage], None]
    is_quick: bool = False  # also part of `make test`
    limit_s: float = 90


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a case has measured."""

    name: str
    group: Group
    promise: str
    state: State
    seconds: float
    checks: list[Check] = field(default_factory=list)
    trouble: str = ""  # why it did not run to its end

    @property
    def is_kept(self) -> bool:
        return self.state == "kept"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> Outcome:
        return cls(**{**document, "checks": [Check(**check) for check in document["checks"]]})


def server_tracebacks(log: str) -> list[str]:
    """The last line of each traceback that the server itself has logged, not one of its workers."""
    found = []
    lines = log.splitlines()
    for number, line in enumerate(lines):
        if line.startswith("Traceback (most recent call last)"):
            following = itertools.takewhile(lambda one: one.startswith((" ", "\t")), lines[number + 1 :])
            last = number + 1 + len([*following])
            found.append(lines[last] if last < len(lines) else line)
    return found


def handler_file(word: str | Path) -> str | Path:
    """The file of a handler that is named alone; other words stay as they are."""
    named = [folder / word for folder in (HANDLERS, TEST_HANDLERS) if str(word).endswith(".py")]
    return next((file for file in named if file.is_file()), word)


def _stop(server: RunningServer) -> int | str:
    try:
        return server.stop(timeout=45)
    except AssertionError:
        return "did not stop within 45 s"


def _rounded(value: Value) -> Value:
    if not isinstance(value, float):
        return value
    return round(value, 1) if abs(value) >= 10 else round(value, 3)


def _brief(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 120 else text[:117] + "…"
