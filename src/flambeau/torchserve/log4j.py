"""Reads a log4j2 XML file: the file names, sizes and levels of the five logs; the rest has no effect."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from xml.parsers import expat

from flambeau.config.server import ServerConfig
from flambeau.errors import ConfigError
from flambeau.logs.line_formats import ACCESS, MODEL, MODEL_METRICS, SERVER, TS_METRICS
from flambeau.logs.setup import LogSettings, open_logs
from flambeau.logs.writer import Logs
from flambeau.small_files import read_small

logger = logging.getLogger(__name__)

LEVELS = {"all": 0, "trace": 5, "debug": 10, "info": 20, "warn": 30, "error": 40, "fatal": 50, "off": 100}
FILE_APPENDERS = ("file", "rollingfile", "randomaccessfile", "rollingrandomaccessfile")
MAX_CHARACTERS = 1 << 20
_UNITS = {"": 1, "KB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30}
_LOGGERS = {"ACCESS_LOG": ACCESS, "MODEL_LOG": MODEL, "TS_METRICS": TS_METRICS, "MODEL_METRICS": MODEL_METRICS}
_KNOWN = frozenset(
    [
        "configuration",
        "appenders",
        "loggers",
        "console",
        "patternlayout",
        "policies",
        "sizebasedtriggeringpolicy",
        "timebasedtriggeringpolicy",
        "defaultrolloverstrategy",
        "logger",
        "asynclogger",
        "root",
        "asyncroot",
        "appenderref",
        "properties",
        "property",
    ]
)


@dataclass(slots=True)
class Element:
    tag: str
    attributes: dict[str, str]
    children: list[Element] = field(default_factory=list)
    text: str = ""

    def get(self, name: str) -> str | None:
        """An attribute; its name is matched without case."""
        return next((value for key, value in self.attributes.items() if key.lower() == name.lower()), None)

    def walk(self) -> list[Element]:
        """This element and all its descendants."""
        return [self, *(one for child in self.children for one in child.walk())]


def open_log4j_logs(config: ServerConfig, path: Path) -> Logs:
    """Open the logs that a log4j2 file describes; a warning names its parts without effect.

    `${LOG_LOCATION}` and `${METRICS_LOCATION}` in file names are the two log folders of the server.
    """
    try:
        text = read_small(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--log-config {path} cannot be read: {error}") from None
    folder = str(config.log_folder or "logs")
    locations = {"LOG_LOCATION": folder, "METRICS_LOCATION": str(config.metrics_log_folder or folder)}
    settings, ignored = read_log4j(text, {**os.environ, **locations})
    logs = open_logs(config, settings=settings, has_process=True)
    if ignored:
        logger.warning("%s: without effect here: %s", path, ", ".join(ignored))
    return logs


def read_log4j(text: str, variables: Mapping[str, str]) -> tuple[LogSettings, tuple[str, ...]]:
    """The settings of a log4j2 document, and its parts without effect.

    `${env:NAME}` and `${NAME}` come from the document's properties and from `variables`.
    """
    root = parse_xml(text)
    elements = root.walk()
    names = {e.get("name") or "": e.text.strip() for e in elements if e.tag.lower() == "property"}
    names = {**names, **variables}
    appenders = {e.get("name") or "": e for e in elements if e.tag.lower() in FILE_APPENDERS}
    consoles = {e.get("name") or "" for e in elements if e.tag.lower() == "console"}
    files: dict[str, Path] = {}
    levels: dict[str, int] = {}
    has_console = False
    for element in elements:
        channel = channel_of(element)
        if channel is None:
            continue
        level = (element.get("level") or "").lower()
        if level in LEVELS:
            levels[channel] = min(levels.get(channel, LEVELS[level]), LEVELS[level])
        for reference in (child.get("ref") or "" for child in element.walk() if child.tag.lower() == "appenderref"):
            has_console = has_console or reference in consoles
            if reference in appenders:
                name = appenders[reference].get("fileName")
                if name:
                    files[channel] = Path(expand(name, names))
    return LogSettings(files, levels, has_console, max_bytes_of(elements)), ignored_in(elements)


def channel_of(element: Element) -> str | None:
    """The log of a logger element; TorchServe's own packages and the root belong to the server log."""
    tag = element.tag.lower()
    if tag in ("root", "asyncroot"):
        return SERVER
    if tag not in ("logger", "asynclogger"):
        return None
    name = element.get("name") or ""
    return SERVER if name.startswith("org.pytorch.serve") else _LOGGERS.get(name)


def max_bytes_of(elements: list[Element]) -> int | None:
    """The size at which files are rolled, if the document sets one."""
    for element in elements:
        if element.tag.lower() == "sizebasedtriggeringpolicy":
            match = re.fullmatch(r"\s*(\d+)\s*([KMG]B)?\s*", element.get("size") or "", re.IGNORECASE)
            if match:
                return int(match[1]) * _UNITS[(match[2] or "").upper()]
    return None


def ignored_in(elements: list[Element]) -> tuple[str, ...]:
    """The elements, loggers and patterns without effect, each once."""
    found = [e.tag for e in elements if e.tag.lower() not in (*_KNOWN, *FILE_APPENDERS)]
    for element in elements:
        if element.tag.lower() in ("logger", "asynclogger") and channel_of(element) is None:
            found.append(f"Logger {element.get('name')}")
        if element.tag.lower() == "patternlayout":
            found.append("PatternLayout (lines keep TorchServe's layout)")
    return tuple(dict.fromkeys(found))


def expand(name: str, variables: Mapping[str, str]) -> str:
    """Replace `${…}` in a file name; `:-` introduces a default."""

    def fill(match: re.Match[str]) -> str:
        key, _, otherwise = match[1].partition(":-")
        value = variables.get(key.removeprefix("env:").removeprefix("sys:"), otherwise or None)
        if value is None:
            raise ConfigError(f"the log configuration names ${{{match[1]}}}, which is not set")
        return value

    for _ in range(5):  # a property may refer to another one
        filled = re.sub(r"\$\{([^${}]+)\}", fill, name)
        if filled == name:
            break
        name = filled
    return name


def parse_xml(text: str) -> Element:
    """Parse a document and return its root. Entities are rejected, since they can expand without bound."""
    if len(text) > MAX_CHARACTERS:
        raise ConfigError(f"the log configuration is larger than {MAX_CHARACTERS} characters")
    top = Element("", {})
    stack = [top]
    parser = expat.ParserCreate()

    def on_start(tag: str, attributes: dict[str, str]) -> None:
        if len(stack) > 50:
            raise ConfigError("the log configuration is nested too deeply")
        element = Element(tag.rpartition("}")[2], attributes)
        stack[-1].children.append(element)
        stack.append(element)

    def on_end(tag: str) -> None:
        stack.pop()

    def on_text(data: str) -> None:
        stack[-1].text += data

    def on_doctype(*_: object) -> None:
        raise ConfigError("the log configuration has a DOCTYPE, which is not allowed; remove it")

    parser.StartElementHandler, parser.EndElementHandler = on_start, on_end
    parser.CharacterDataHandler, parser.StartDoctypeDeclHandler = on_text, on_doctype
    try:
        parser.Parse(text, True)
    except expat.ExpatError as error:
        raise ConfigError(f"the log configuration is not XML: {error}") from None
    if not top.children or top.children[0].tag.lower() != "configuration":
        raise ConfigError("the log configuration is not a log4j2 file: its root is not <Configuration>")
    return top.children[0]
