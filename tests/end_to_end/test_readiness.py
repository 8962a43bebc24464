"""/readyz tells which startup models are not served, and why; an operator can accept the loss."""

from __future__ import annotations

import pytest

from support.archives import pack_handler


@pytest.fixture
def store(tmp_path):
    """A store with a model that works, an archive that is cut, and a model that cannot be loaded."""
    folder = tmp_path / "store"
    folder.mkdir()
    whole = pack_handler(folder, "echo").read_bytes()
    (folder / "cut.mar").write_bytes(whole[: len(whole) // 2])
    pack_handler(folder, "broken")
    return folder


def unready(server):
    """(status, {model: its entry}) of /readyz."""
    reply = server.request("GET", "/readyz")
    return reply.status, {model["modelName"]: model for model in reply.json.get("models", [])}


def test_model_of_a_store_that_cannot_be_served_is_named_until_it_is_deleted(start, store):
    server = start(store).wait_started()
    server.until(lambda: "lastFailure" in unready(server)[1]["broken"])
    status, models = unready(server)
    assert status == 503
    assert models.keys() == {"cut.mar", "broken"}
    assert "zip" in models["cut.mar"]["reason"]
    assert "a_database_that_nobody_has" in str(models["broken"]["lastFailure"])
    assert server.predict("echo", {}).status == 200
    assert server.manage("DELETE", "/models/broken").status == 200
    assert server.manage("DELETE", "/models/cut").json["status"] == 'Model "cut" unregistered'
    assert unready(server) == (200, {})
    assert server.manage("DELETE", "/models/cut").status == 404


def test_metrics_port_answers_probes_but_needs_no_ping(start, store):
    server = start(store).wait_started()
    statuses = {
        path: server.request("GET", path, port=server.metrics_port).status
        for path in ("/livez", "/startupz", "/readyz", "/ping", "/models")
    }
    assert statuses == {"/livez": 200, "/startupz": 200, "/readyz": 503, "/ping": 404, "/models": 404}


def test_missing_model_is_forgiven_when_it_is_registered_after_all(start, store):
    (store / "broken.mar").unlink()
    server = start(store).wait_started()
    assert unready(server)[0] == 503
    pack_handler(store, "echo", name="cut")
    assert server.manage("POST", "/models?url=cut.mar&initial_workers=1&synchronous=true").status == 200
    assert unready(server) == (200, {})


def test_loss_that_the_operator_allows_does_not_keep_the_server_from_being_ready(start, store):
    server = start(store, "--allow-missing").wait_ready()
    assert server.predict("echo", {}).status == 200
    assert unready(server)[1].keys() == {"cut.mar", "broken"}  # they are still named
