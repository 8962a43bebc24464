"""What code warns of, collected instead of written."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def warnings_of(name: str) -> Iterator[list[str]]:
    """The warnings of a logger and those below it, while this lasts."""
    said: list[str] = []

    class Collector(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING:
                said.append(record.getMessage())

    logger, collector = logging.getLogger(name), Collector()
    propagates, logger.propagate = logger.propagate, False
    logger.addHandler(collector)
    try:
        yield said
    finally:
        logger.removeHandler(collector)
        logger.propagate = propagates
