"""Follows a Markdown page as a reader would: writes its files, runs its commands, compares what it shows."""

from __future__ import annotations

import os
import re
import shlex
import tomllib
from dataclasses import dataclass
from pathlib import Path

from flambeau.testing.server import ModelServer
from support.running import path
from support.snippets import ROOT, run

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"# ([\w./-]+\.(?:py|yaml|yml|toml|ini))\n")
SERVES = re.compile(r"(?:\w+=\S+ )*flambeau (?:llm )?serve\b")
COMMAND_S = 300.0  # a busy machine is no failure
# Where others test at the same time, a second thread of a small network costs more than it computes.
VARIABLES = {"PYTHONPATH": path(), "OMP_NUM_THREADS": "1"}
PORTS = {8080: "port", 8081: "management_port", 8082: "metrics_port"}


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block; `shown` is the output that the page shows after it."""

    language: str
    text: str
    shown: str | None = None


def read_blocks(text: str) -> list[Block]:
    blocks: list[Block] = []
    for language, code in BLOCK.findall(text):
        if language in ("text", "json") and blocks and blocks[-1].language == "sh" and blocks[-1].shown is None:
            blocks[-1] = Block("sh", blocks[-1].text, code)
        else:
            blocks.append(Block(language, code))
    return blocks


def matches(shown: str, printed: str) -> bool:
    """Whether an output is the one shown; `…` stands for anything, and spaces at the ends of lines do not count."""
    parts = [re.escape(part) for part in trimmed(shown).split("…")]
    return re.fullmatch(".*".join(parts), trimmed(printed), re.DOTALL) is not None


def check_extras(line: str) -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for names in re.findall(r"flambeau\[([\w,]+)\]", line):
        assert {*names.split(",")} <= {*known}, line


def trimmed(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip().splitlines())


class PageServer(ModelServer):
    """A server with the command line of a page, on free ports."""

    start_timeout_s = 200.0

    def __init__(self, log: Path, line: str, folder: Path) -> None:
        words = shlex.split(line, comments=True)
        command = words.index("flambeau") + 1
        env = dict(word.split("=", 1) for word in words[: command - 1])
        self.subcommand = ("serve",) if words[command] == "serve" else ("llm", "serve")
        before = Path.cwd()
        os.chdir(folder)
        try:
            super().__init__(log, *words[command + len(self.subcommand) :], env={**VARIABLES, **env})
        finally:
            os.chdir(before)


class Reader:
    """Follows pages in a folder; stops its server at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.server: PageServer | None = None
        self.commands = 0
        self.comparisons = 0

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()

    def follow(self, page: Path) -> None:
        for block in read_blocks(page.read_text(encoding="utf-8")):
            if block.language in ("python", "yaml") and (named := FILE.match(block.text)):
                self._write(named[1], block.text[named.end() :])
            elif block.language == "sh":
                self._run(block)

    def _write(self, name: str, text: str) -> None:
        file = self.folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        if file.is_file():  # the page shows a file of the example
            assert text == file.read_text(), f"{name} differs from the file of the example"
        file.write_text(self._with_ports(text))

    def _run(self, block: Block) -> None:
        printed, commands = "", ""
        for line in block.text.splitlines(keepends=True):
            if line.startswith("pip install "):  # the tests have it already
                check_extras(line)
            elif SERVES.match(line):
                printed += self._shell(commands)
                commands = ""
                self._start(line)
            else:
                commands += line
        printed += self._shell(commands)
        if block.shown is not None:
            self.comparisons += 1
            assert matches(block.shown, printed), f"{block.text}\nprinted:\n{printed}\nthe page shows:\n{block.shown}"

    def _shell(self, commands: str) -> str:
        if not commands.strip():
            return ""
        self.commands += 1
        result = run(self._with_ports(commands), self.folder, COMMAND_S, **VARIABLES, **self._urls())
        assert result.returncode == 0, f"{commands}\n{result.stdout}{result.stderr}"
        return result.stdout

    def _start(self, line: str) -> None:
        self._stop()
        server = self.server = PageServer(self.folder / f"server-{self.commands}.log", line, self.folder)
        server.until(lambda: "Model server started." in server.log)

    def _stop(self) -> None:
        if self.server is not None:
            self.server.stop()
            self.server = None

    def _with_ports(self, text: str) -> str:
        if self.server is not None:
            for documented, name in PORTS.items():
                text = re.sub(rf"(127\.0\.0\.1|localhost):{documented}", rf"\1:{getattr(self.server, name)}", text)
        return text

    def _urls(self) -> dict[str, str]:
        if self.server is None:
            return {}
        return {"FLAMBEAU_URL": self.server.url, "FLAMBEAU_MANAGEMENT_URL": self.server.management_url}
