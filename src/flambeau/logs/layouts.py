"""How a line of a log looks: TorchServe's two layouts, and ours for a terminal (pure)."""

from __future__ import annotations

import logging
import re
import time
from functools import lru_cache

SERVER, ACCESS, MODEL = "SERVER", "ACCESS_LOG", "MODEL_LOG"
TS_METRICS, MODEL_METRICS = "TS_METRICS", "MODEL_METRICS"

# Parameters of a URL that let whoever knows them in: signatures of S3, Google and Azure, and their like. A URL within
# another one's query may be encoded once more.
_SECRETS = re.compile(
    r"((?:^|[?&]|%3f|%26)"
    r"(?:x-(?:amz|goog)-(?:signature|credential|security-token)|awsaccesskeyid|googleaccessid|signature|sig"
    r"|access_token|token|password|secret)(?:=|%3d))"
    r"(?:(?!&|%26).)+",
    re.IGNORECASE | re.DOTALL,
)
_CONTROLS = re.compile("[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u2028\\u2029]")
_LEVELS = {"WARNING": "WARN", "CRITICAL": "FATAL"}


def short_line(stamp: str, message: str) -> str:
    """`<time> - <message>`: the access log and the two metrics logs."""
    return f"{stamp} - {message}\n"


def full_line(stamp: str, level: int, thread: str, logger: str, message: str) -> str:
    """`<time> [<LEVEL>] <thread> <logger> - <message>`: ts_log, model_log and the console."""
    return f"{stamp} [{level_name(level)}] {thread} {logger} - {message}\n"


def terminal_line(created: float, level: int, message: str) -> str:
    """`<UTC time> <LEVEL> <message>`: what `flambeau serve` prints."""
    return f"{utc_second(int(created))} {logging.getLevelName(level):<7} {message}\n"


def local_time(created: float) -> str:
    """Local time with milliseconds, as log4j's ISO8601."""
    second = int(created)
    return f"{local_second(second)},{int((created - second) * 1000):03d}"


@lru_cache(4)
def local_second(second: int) -> str:
    """A second of local time."""
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(second))


@lru_cache(4)
def utc_second(second: int) -> str:
    """A second of UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(second))


@lru_cache
def level_name(level: int) -> str:
    """A level in log4j's words, five letters wide."""
    name = logging.getLevelName(level)
    return f"{_LEVELS.get(name, name):<5}"


def printable(text: str) -> str:
    """Text from outside on one line: control characters are shown, not obeyed."""
    return text if text.isprintable() else text.encode("unicode_escape").decode("ascii")


def tidy(text: str) -> str:
    """A message as it may be written: its lines stay lines, what else would move a terminal's cursor is shown."""
    if text.isprintable():
        return text
    return _CONTROLS.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


def masked(url: str) -> str:
    """A URL, or the query of one, without the values that would let others in."""
    return _SECRETS.sub(r"\1***", url) if "=" in url or "%3" in url else url
