"""Every route of the inference port is in its API description, and the other way round."""

from __future__ import annotations

from dataclasses import replace

from flambeau.config.server import Address, ServerConfig
from flambeau.frontend.anthropic.api import PATHS as ANTHROPIC_PATHS
from flambeau.frontend.http.api_descriptions import INFERENCE
from flambeau.frontend.http.router import ANYTHING, UPGRADE
from flambeau.frontend.openai.api import POST
from flambeau.frontend.openai.audio import TASKS
from flambeau.frontend.routes import OPENAI, extension_routes, routes_by_address
from flambeau.serving.server import Server

DESCRIBED = {operation.path for operation in (*INFERENCE, *OPENAI)}
# Pages for people, and aliases of described paths.
PAGES = {"docs", "openapi.json", "health", "favicon.ico", "static"}
AT_V1 = {"chat", "completions", "embeddings", "models", "messages", "responses", "files", "batches", "audio"}


def first_segments(paths):
    return {path.split("/")[1] for path in paths}


def test_first_segments_of_all_routes_are_described():
    config = replace(ServerConfig(), inference=Address(port=0), management=Address(port=1), pages=False)
    server = Server(config)
    routes = routes_by_address(server, None)[config.inference]
    served = {path.removeprefix(UPGRADE) for path in routes} - {ANYTHING, *extension_routes(server, "inference")}
    assert served - PAGES <= first_segments(DESCRIBED)
    assert first_segments(DESCRIBED) <= {*routes, "{model_name}", "metrics"}  # an older path; another port


def test_paths_of_the_openai_api_are_described():
    served = {("v1", *path) for path in (*POST, *ANTHROPIC_PATHS)} | {("v1", "audio", name) for name in TASKS}
    assert {"/" + "/".join(path) for path in served} <= DESCRIBED
    assert {path.split("/")[2] for path in DESCRIBED if path.startswith("/v1/")} >= AT_V1


def test_operation_ids_are_unique():
    ids = [operation.id for operation in (*INFERENCE, *OPENAI)]
    assert len({*ids}) == len(ids)
