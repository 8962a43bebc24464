"""OpenAPI 3.0.1 documents, with the operation ids that generated clients know (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Schema = Mapping[str, Any]

TEXT: Schema = {"type": "string"}
WHOLE: Schema = {"type": "integer"}
FLAG: Schema = {"type": "boolean"}
STATUS: Schema = {"type": "object", "required": ["status"], "properties": {"status": TEXT}}
OBJECT: Schema = {"type": "object"}
ERROR: Schema = {
    "type": "object",
    "required": ["code", "type", "message"],
    "properties": {
        "code": {"type": "integer", "description": "The HTTP status."},
        "type": {"type": "string", "description": "The class of the error."},
        "message": {"type": "string", "description": "What went wrong."},
        "cause": {"type": "array", "items": TEXT, "description": "The cause; only on servers that show details."},
    },
}
# Of the paths that OpenAI's and vLLM's clients call.
OPENAI_ERROR: Schema = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": TEXT,
                "type": TEXT,
                "param": {"type": "string", "nullable": True, "description": "The invalid field."},
                "code": {"type": "string", "nullable": True},
                "cause": {
                    "type": "array",
                    "items": TEXT,
                    "description": "How a worker died; only on servers that show details.",
                },
            },
        }
    },
}
ERROR_TEXTS = {
    400: "A parameter, the body or the key is invalid",
    401: "The key is invalid",
    403: "The default version cannot be removed while others remain",
    404: "No such model or version",
    405: "Not allowed by the configuration of this server",
    408: "The request timed out",
    409: "The name and version are already registered, or were unregistered meanwhile",
    413: "The body is too large",
    429: "The queue is full",
    500: "The server or the worker failed",
    503: "No worker is available, or the handler failed",
    507: "Out of memory",
}
PREDICTING = (400, 404, 408, 413, 500, 503, 507)


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a query."""

    name: str
    schema: Schema
    description: str
    is_required: bool = False

    def document(self) -> dict[str, Any]:
        entry: dict[str, Any] = {"in": "query", "name": self.name, "description": self.description}
        return {**entry, "required": self.is_required, "schema": self.schema}


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One method of one path."""

    path: str
    method: str
    id: str
    summary: str
    query: Sequence[Parameter] = ()
    body: Mapping[str, Schema] | None = None  # media type → schema
    answers: Mapping[int, tuple[str, Schema | None]] = field(default_factory=lambda: {200: ("Success", OBJECT)})
    errors: Sequence[int] = ()
    error: Schema = field(default_factory=lambda: ERROR)
    content_type: str = "application/json"

    def document(self) -> dict[str, Any]:
        segments = self.path.replace(":", "/").split("/")
        names = [segment[1:-1] for segment in segments if segment.startswith("{")]
        parameters: list[dict[str, Any]] = [
            {"in": "path", "name": name, "required": True, "schema": {"type": "string", "minLength": 1}}
            for name in names
        ]
        document: dict[str, Any] = {
            "description": self.summary,
            "operationId": self.id,
            "parameters": [*parameters, *(parameter.document() for parameter in self.query)],
        }
        if self.body is not None:
            content = {media_type: {"schema": schema} for media_type, schema in self.body.items()}
            document["requestBody"] = {"required": False, "content": content}
        document["responses"] = {
            **{
                str(status): response(text, schema, self.content_type)
                for status, (text, schema) in self.answers.items()
            },
            **{str(status): response(ERROR_TEXTS[status], self.error) for status in self.errors},
        }
        return document


def response(description: str, schema: Schema | None, content_type: str = "application/json") -> dict[str, Any]:
    """One response; without a schema, the handler decides its content."""
    if schema is None:
        return {"description": description}
    return {"description": description, "content": {content_type: {"schema": schema}}}


def document(title: str, operations: Sequence[Operation], version: str) -> dict[str, Any]:
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method] = operation.document()
    return {"openapi": "3.0.1", "info": {"title": title, "version": version}, "paths": paths}
