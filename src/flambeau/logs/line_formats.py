"""The layouts of log lines: for files and for a terminal; and the cleaning of untrusted text."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any

SERVER, ACCESS, MODEL = "SERVER", "ACCESS_LOG", "MODEL_LOG"
TS_METRICS, MODEL_METRICS = "TS_METRICS", "MODEL_METRICS"
_SHORT = frozenset((ACCESS, TS_METRICS, MODEL_METRICS))  # logs whose own files have short lines

# URL parameters that grant access: signatures of S3, Google and Azure, tokens, passwords. A URL inside the query of
# another URL may be percent-encoded.
_SECRETS = re.compile(
    r"((?:^|[?&]|%3f|%26)"
    r"(?:x-(?:amz|goog)-(?:signature|credential|security-token)|awsaccesskeyid|googleaccessid|signature|sig"
    r"|access_token|token|password|secret)(?:=|%3d))"
    r"(?:(?!&|%26).)+",
    re.IGNORECASE | re.DOTALL,
)
_CONTROLS = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u2028\\u2029]")
_LEVELS = {"WARNING": "WARN", "CRITICAL": "FATAL"}


class LineFormat:
    """What lines of one kind have in common; it is made once, not for every line.

    A full line is `<time> [<LEVEL>] <thread> <logger> - <message>`: ts_log, model_log and the console. A short one is
    `<time> - <message>`: the access log and the two metrics logs. `to_text` makes the message of what is logged as
    values: it gets the values, and the second in which they were logged. JSON lines have more fields: `worker` and
    `model`, and those that `to_fields` makes of the same values.
    """

    __slots__ = (
        "_second",
        "_text",
        "channel",
        "full",
        "level",
        "logger",
        "model",
        "own",
        "thread",
        "to_fields",
        "to_text",
        "worker",
    )

    def __init__(
        self,
        channel: str,
        level: int = logging.INFO,
        thread: str = "main",
        logger: str = "",
        to_text: Callable[..., str] = str,
        to_fields: Callable[..., dict[str, Any]] | None = None,
        *,
        worker: str = "",
        model: str = "",
    ) -> None:
        self.channel = channel
        self.level = level
        self.thread = thread
        self.logger = logger or channel
        self.to_text = to_text
        self.to_fields = to_fields
        self.worker = worker
        self.model = model
        self.full = f" [{level_name(level)}] {thread} {self.logger} - "  # between time and message
        self.own = " - " if channel in _SHORT else self.full  # the same in the log's own file
        self._second = -1
        self._text = ""

    def text_at(self, second: int) -> str:
        """The message of a line without values: it is the same for a whole second."""
        if second != self._second:
            self._second, self._text = second, self.to_text(second)
        return self._text


class LineGroup:
    """Lines that are logged at one moment with a value each: together they are one entry."""

    __slots__ = ("lines",)

    def __init__(self, lines: tuple[LineFormat, ...]) -> None:
        self.lines = lines


@lru_cache(1000)
def message_format(channel: str, level: int, thread: str, logger: str) -> LineFormat:
    """The format of lines that are logged as text."""
    return LineFormat(channel, level, thread, logger)


def terminal_line(created: float, level: int, message: str) -> str:
    """`<UTC time> <LEVEL> <message>`: the terminal of `flambeau serve`."""
    return f"{utc_second(int(created))} {logging.getLevelName(level):<7} {message}\n"


def local_time(created: float) -> str:
    """Local time with milliseconds, as in log4j's ISO8601."""
    second = int(created)
    return f"{local_second(second)},{int((created - second) * 1000):03d}"


@lru_cache(4)
def local_second(second: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(second))


@lru_cache(4)
def utc_second(second: int) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(second))


@lru_cache
def level_name(level: int) -> str:
    """A level under log4j's name, five characters wide."""
    name = logging.getLevelName(level)
    return f"{_LEVELS.get(name, name):<5}"


def printable(text: str) -> str:
    """Untrusted text on one line; control characters are escaped."""
    return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")


def tidy(text: str) -> str:
    """A message with its line breaks; other control characters are escaped."""
    if text.isprintable():
        return text
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def masked(url: str) -> str:
    """A URL or query without the values of credentials."""
    return _SECRETS.sub(r"\1***", url) if "=" in url or "%3" in url else url
