"""Logging set-up for either process."""

from __future__ import annotations

import logging
import sys
import time


def set_up_server_logs(level: str) -> None:
    """One line per event on stderr, with UTC time stamps."""
    formatter = logging.Formatter("%(asctime)s %(levelname)-7s %(message)s", "%Y-%m-%dT%H:%M:%SZ")
    formatter.converter = time.gmtime
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)


def set_up_worker_logs() -> None:
    """Bare messages on stdout, as TorchServe's workers wrote them; the server adds time and worker."""
    logging.basicConfig(stream=sys.stdout, format="%(message)s", level=logging.INFO)
