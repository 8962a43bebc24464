"""A context made for a test is the one a worker would make."""

from __future__ import annotations

import pytest

from flambeau.archive.pack import Recipe, pack
from flambeau.testing.context import new_handler_context
from flambeau.worker.context import Context
from support.running import HANDLERS


def test_requests_become_rows_as_they_do_in_a_worker():
    context = new_handler_context(requests=[{"x": 1}, "text", b"\x00"], headers={"X-Who": "me"})
    assert isinstance(context, Context)
    assert context.rows == [{"body": {"x": 1}}, {"body": "text"}, {"body": bytearray(b"\x00")}]
    assert context.get_request_header(1, "x-who") == "me"
    assert context.get_request_header(0, "content-type") == "application/json"
    assert context.get_request_id(2) == "test-2"
    assert context.system_properties["batch_size"] == 3


def test_each_request_may_have_its_own_headers():
    context = new_handler_context(requests=[b"a=1", b"{}"], headers=[{"Content-Type": FORM}, {}])
    assert context.rows[0] == {"a": bytearray(b"1")}
    assert context.get_request_header(1, "content-type") == "application/octet-stream"
    with pytest.raises(ValueError, match="zip"):
        context.set_requests([1, 2], [{}])


FORM = "application/x-www-form-urlencoded"


def test_next_batch_replaces_the_last_one():
    context = new_handler_context(requests=[1, 2])
    context.set_response_status(404, "gone", 0)
    assert context.set_requests(["again"]) == [{"body": "again"}]
    assert context.get_response_status(0) == (200, None)


def test_arguments_are_in_the_manifest(tmp_path):
    context = new_handler_context(
        model_dir=tmp_path, model_file="net.py", serialized_file="net.pt", config={"k": 1}, batch_size=8, gpu_id=1
    )
    assert context.manifest["model"]["modelFile"] == "net.py"
    assert context.manifest["model"]["serializedFile"] == "net.pt"
    assert context.model_yaml_config == {"k": 1}
    assert (context.system_properties["batch_size"], context.system_properties["gpu_id"]) == (8, 1)
    assert context.system_properties["model_dir"] == str(tmp_path)


def test_manifest_and_config_of_the_folder_are_read(tmp_path):
    (tmp_path / "model-config.yaml").write_text("threshold: 0.5\n")
    recipe = Recipe(
        model_name="m", handler=str(HANDLERS / "echo.py"), config_file=tmp_path / "model-config.yaml", version="3.0"
    )
    folder = pack(recipe, tmp_path, format="no-archive")
    context = new_handler_context(model_dir=folder, serialized_file="other.pt")
    assert context.model_name == "m"
    assert context.manifest["model"]["modelVersion"] == "3.0"
    assert context.manifest["model"]["serializedFile"] == "other.pt"
    assert context.model_yaml_config == {"threshold": 0.5}


def test_values_that_a_handler_sends_are_kept():
    context = new_handler_context(requests=[1, 2])
    context.send(["a", "b"])
    assert context.sent == [["a", "b"]]
    assert not context.is_cancelled(1)
