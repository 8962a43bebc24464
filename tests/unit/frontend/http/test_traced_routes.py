from __future__ import annotations

from types import SimpleNamespace

import pytest

from flambeau.frontend.http.router import ANYTHING
from flambeau.frontend.http.traced_routes import route_of, traced


@pytest.mark.parametrize(
    ("path", "route"),
    [
        ("predictions/cat", "/predictions/{model_name}"),
        ("predictions/cat/1.0", "/predictions/{model_name}/{model_version}"),
        ("predictions/cat/1.0/a/b", "/predictions/{model_name}/{model_version}/{path}"),
        ("invocations", "/invocations"),
        ("models/cat/invoke", "/models/{model_name}/invoke"),
        ("v1/chat/completions", "/v1/chat/completions"),
        ("v1/models/cat:predict", "/v1/models/{model_name}:predict"),
        ("v2/models/cat/infer", "/v2/models/{model_name}/infer"),
        ("v2/models/cat/versions/3/infer", "/v2/models/{model_name}/versions/{model_version}/infer"),
        ("cat/predict", "/{model_name}/predict"),
    ],
)
def test_names_are_replaced_so_that_spans_have_few_names(path, route):
    assert route_of(path.split("/")) == route


def test_without_tracing_the_endpoints_are_the_same():
    routes = {"predictions": object(), "ping": object()}
    assert traced(routes, None) == routes


def test_only_endpoints_that_run_models_are_traced():
    tracing = SimpleNamespace(begin=None)
    routes = {"predictions": object(), "v1": object(), ANYTHING: object(), "ping": object(), "upgrade/v1": object()}
    found = traced(routes, tracing)
    assert {name for name, endpoint in found.items() if endpoint is not routes[name]} == {"predictions", "v1", ANYTHING}
