"""Prints as many megabytes as the body says."""

import sys


def handle(data, context):
    for row in data or []:
        for _ in range(int(row["body"])):
            sys.stdout.write(("x" * 99 + "\n") * 10_000)
        sys.stdout.flush()
    return ["done"] * len(data or [])
