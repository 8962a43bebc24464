"""Whatever a handler returns, sets or raises: the same status, headers and body as from TorchServe.

Needs an environment with torchserve and Java, named by FLAMBEAU_TORCHSERVE_VENV.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from support.archives import pack_handler
from support.torchserve import CommandServer, our_environment, torchserve_environment

VENV = os.environ.get("FLAMBEAU_TORCHSERVE_VENV")

pytestmark = [
    pytest.mark.skipif(not VENV, reason="FLAMBEAU_TORCHSERVE_VENV does not name an environment with TorchServe"),
    pytest.mark.timeout(600),
]

ORDERS = [
    *({"do": "value", "with": {"value": value}} for value in (None, 1, 1.5, True, "text", "é", [], {}, [1, {"a": []}])),
    *({"do": name} for name in ("numbers", "binary", "tensor", "no_list", "too_many", "not_serializable", "memory")),
    *({"do": "error", "with": {"message": text}} for text in ("no", "cuda error")),  # "CUDA error": docs/migrate.md
    *({"do": "prediction_exception", "with": {"code": code}} for code in (400, 404, 413, 422, 500, 503, 507, 599)),
    *({"do": "status", "with": {"code": code}} for code in (200, 201, 404, 413, 500, 507)),
    {"do": "status", "with": {"code": 418, "phrase": "I am a teapot"}},
    {"do": "all_status"},
    {"do": "headers"},
    {"do": "told"},
    {"do": "stream", "with": {"chunks": ["a", "b", "c"]}},
    {"do": "stream", "with": {"chunks": [{"a": 1}, "é"]}},
    {"do": "absent"},
]
KEPT = ("content-type", "x-made", "ts_stream_next", "cache-control", "pragma", "expires", "transfer-encoding")


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    store, folder = tmp_path_factory.mktemp("store"), tmp_path_factory.mktemp("servers")
    pack_handler(store, "outcomes")
    venv = Path(VENV)
    lines = ["default_workers_per_model=1"]
    theirs = CommandServer([f"{venv}/bin/torchserve"], folder / "theirs", store, lines, torchserve_environment(venv))
    ours = CommandServer(
        [sys.executable, "-m", "flambeau.torchserve.command"], folder / "ours", store, lines, our_environment()
    )
    try:
        yield [server.wait_for_models(["outcomes"], 150) for server in (theirs, ours)]
    finally:
        theirs.stop()
        ours.stop()


def without_cause(body: bytes) -> bytes:
    """An error without what only trusted callers are told."""
    if b'"cause": [' not in body:
        return body
    document = json.loads(body)
    del document["cause"]
    return json.dumps(document, indent=2).encode() + b"\n"


@pytest.mark.parametrize("order", ORDERS, ids=json.dumps)
def test_outcome_is_the_same(servers, order):
    theirs, ours = (server.predict("outcomes", order, headers={"X-Mixed": "yes"}) for server in servers)
    assert (ours.status, without_cause(ours.body)) == (theirs.status, theirs.body)
    kept = [{name: reply.headers.get(name) for name in KEPT} for reply in (theirs, ours)]
    assert kept[1] == kept[0]
