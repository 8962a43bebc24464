"""Tells whether torch was loaded, and how many threads it may use."""

import os
import sys


def handle(data, context):
    if data is None:
        return None
    return [{"torch": "torch" in sys.modules, "threads": os.environ.get("OMP_NUM_THREADS")} for _ in data]
