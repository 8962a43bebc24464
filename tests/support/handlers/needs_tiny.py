"""Needs a package that only its own requirements bring."""

from __future__ import annotations

import sys

import msgspec
import tinylib


def handle(data, context):
    if data is None:
        return None
    told = {
        "version": tinylib.VERSION,
        "where": tinylib.__file__,
        "python": sys.executable,
        "msgspec": msgspec.__file__,
    }
    return [told] * len(data)
