"""The functions of the workflows that tests register."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path


def begin(data, context):
    if data is None:
        return None
    value = next(iter(data[0].values()), b"")
    return [b"begin(" + (bytes(value) if isinstance(value, (bytes, bytearray)) else json.dumps(value).encode()) + b")"]


def left(data, context):
    return None if data is None else [{"left": bytes(data[0]["body"]).decode()}]


def right(data, context):
    return None if data is None else [json.dumps({"right": bytes(data[0]["body"]).decode()})]


def text(data, context):
    return None if data is None else ["plain text"]


def report(data, context):
    """What it got, and of which types."""
    if data is None:
        return None
    return [{name: [type(value).__name__, bytes(value).decode()] for name, value in data[0].items()}]


def header(data, context):
    return None if data is None else [context.get_request_header(0, "x-mine") or "none"]


def fails(data, context):
    if data is not None:
        raise RuntimeError("no luck")


def fails_once(data, context):
    """Fails when it is called for the first time, and works then."""
    if data is None:
        return None
    place = Path(os.environ["FLOW_FOLDER"]) / "failed"
    if not place.exists():
        place.touch()
        raise RuntimeError("the first time")
    return [b"at last"]


def meets(data, context):
    """Waits for the other branch to begin: alone it would never end."""
    return meet("one", "two") if data is not None else None


def meets_too(data, context):
    return meet("two", "one") if data is not None else None


def meet(own, other):
    folder = Path(os.environ["FLOW_FOLDER"])
    (folder / own).touch()
    while not (folder / other).exists():
        time.sleep(0.01)
    return [{own: "met"}]


def waits(data, context):
    """Waits until it is told to go on, or nobody waits for it any more."""
    if data is None:
        return None
    folder = Path(os.environ["FLOW_FOLDER"])
    (folder / "waiting").touch()
    while not (folder / "go").exists():
        if context.is_cancelled(0):
            (folder / "cancelled").touch()
            return [b"cancelled"]
        time.sleep(0.01)
    return [b"went on"]


def cannot_load(data, context):
    raise ValueError("never")
