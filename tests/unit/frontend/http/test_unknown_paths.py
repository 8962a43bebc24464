"""A path that does not exist is answered with the one that was probably meant."""

from __future__ import annotations

import pytest

from flambeau.frontend.http.unknown_paths import missing_path

INFERENCE = {"", "predictions", "explanations", "models", "v1", "v2", "ping", "docs", "*"}
MANAGEMENT = {"", "models", "slow", "cluster", "ping", "docs", "*"}
METRICS = {"metrics", "*"}


@pytest.mark.parametrize(
    ("path", "roots", "remedy"),
    [
        ("prediction/shout", INFERENCE, "did you mean /predictions/shout?"),
        (
            "chat/completions",
            INFERENCE,
            "did you mean /v1/chat/completions? The base URL of an OpenAI client ends with",
        ),
        ("predictions", INFERENCE, "name a model: /predictions/MODEL"),
        ("models", INFERENCE, "the management API has another port, 8081 by default"),
        ("models/a/b/c/d", INFERENCE | MANAGEMENT, "GET /docs lists the paths"),
        ("predictions/shout", MANAGEMENT, "the inference API has another port, 8080 by default"),
        ("v1/chat/completions", MANAGEMENT, "the inference API has another port, 8080 by default"),
        ("modles", MANAGEMENT, "did you mean /models?"),
        ("zzz", MANAGEMENT, "GET /docs lists the paths."),
        ("zzz", METRICS, "see the documentation"),
    ],
)
def test_path_that_is_missing_has_a_remedy(path, roots, remedy):
    text = missing_path("POST", path.split("/"), roots)
    assert text.startswith(f"There is no POST /{path} here; {remedy}")
    assert text.endswith((".", "?"))
