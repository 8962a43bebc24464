"""What a client may have meant by a path that does not exist."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from flambeau.errors import suggest

BELOW_V1 = frozenset({"chat", "completions", "responses", "embeddings", "audio", "messages", "files", "batches"})
INFERENCE = frozenset({"predictions", "explanations", "invocations", "tokenize", *BELOW_V1})
MANAGEMENT = frozenset({"models", "slow", "cluster", "keys"})
MAX_SHOWN = 200


def missing_path(method: str, segments: Sequence[str], roots: Collection[str]) -> str:
    """The answer for a path that is not among `roots`, the first segments of the paths of this port."""
    path = "/" + "/".join(segments)
    text = f"There is no {method} {path[:MAX_SHOWN]} here; {remedy(segments, roots)}"
    return text if text.endswith("?") else f"{text}."


def remedy(segments: Sequence[str], roots: Collection[str]) -> str:
    root, rest = segments[0], segments[1:]
    path = "/".join(segments)[:MAX_SHOWN]
    is_inference = "predictions" in roots
    below_v1 = rest[0] if root == "v1" and rest else root
    if not is_inference and (root in INFERENCE or below_v1 in BELOW_V1):
        return "the inference API has another port, 8080 by default"
    if root in MANAGEMENT and is_inference and "slow" not in roots:
        return "the management API has another port, 8081 by default"
    if root in BELOW_V1:
        return f"did you mean /v1/{path}? The base URL of an OpenAI client ends with /v1"
    if root in ("predictions", "explanations") and not rest:
        return f"name a model: /{root}/MODEL"
    if near := suggest(root, [name for name in roots if name.isidentifier() and name != root]):
        return f"did you mean /{'/'.join([near, *rest])[:MAX_SHOWN]}?"
    return "GET /docs lists the paths" if "docs" in roots else "see the documentation of the REST APIs"
