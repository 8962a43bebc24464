"""API descriptions: what each listener offers, in OpenAPI's words."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from flambeau import __version__
from flambeau.frontend.http.app import Endpoint, not_allowed
from flambeau.frontend.http.catalog import INFERENCE, MANAGEMENT
from flambeau.frontend.http.exchange import Exchange
from flambeau.frontend.http.openapi import Operation, document
from flambeau.frontend.http.problems import respond_json


def listener_document(operations: Sequence[Operation]) -> dict[str, Any]:
    """The description of a listener."""
    return document("TorchServe APIs", operations, __version__)


def model_document(name: str) -> dict[str, Any]:
    """The description of one model's inference API."""
    operations = [
        replace(operation, path=operation.path.replace("{model_name}", name))
        for operation in INFERENCE
        if operation.id in ("predictions", "explanations", "kserve_v1_predict", "kserve_v2_infer")
    ]
    return document(f"RESTful API for: {name}", operations, "1.0.0")


def management_document(name: str) -> dict[str, Any]:
    """The description of one model's management API."""
    operations = [operation for operation in MANAGEMENT if "{model_name}" in operation.path]
    named = [replace(operation, path=operation.path.replace("{model_name}", name)) for operation in operations]
    return document(f"RESTful Management API for: {name}", named, __version__)


def root(operations: Sequence[Operation]) -> Endpoint:
    """`OPTIONS /`: the description of a listener."""

    def describe(exchange: Exchange, segments: list[str]) -> None:
        if exchange.method == "OPTIONS":
            respond_json(exchange, 200, listener_document(operations))
        else:
            not_allowed(exchange)

    return describe


def always(operations: Sequence[Operation]) -> Endpoint:
    """`/api-description`: the same document for any method."""

    def describe(exchange: Exchange, segments: list[str]) -> None:
        respond_json(exchange, 200, listener_document(operations))

    return describe
