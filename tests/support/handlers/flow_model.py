"""A model of a workflow: says its name around what it gets."""

from __future__ import annotations


def handle(data, context):
    if data is None:
        return None
    return [f"{context.model_name}({bytes(row['body']).decode()})".encode() for row in data]
