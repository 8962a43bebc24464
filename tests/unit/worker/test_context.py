from __future__ import annotations

import threading

from flambeau.wire.messages import Request
from flambeau.worker.context import Context, RequestProcessor


def new_context():
    return Context("m", "/model", {"model": {}}, 4, 1, "0.1", model_yaml_config={"a": 1})


def begin(context, *headers):
    requests = [Request(i, f"id-{i}", list(h.items()), b"") for i, h in enumerate(headers)]
    context.begin(requests, [None for _ in requests])


def test_properties_are_torchserves():
    assert new_context().system_properties == {
        "model_dir": "/model",
        "gpu_id": 1,
        "batch_size": 4,
        "server_name": "MMS",
        "server_version": "0.1",
        "limit_max_image_pixels": True,
    }


def test_headers_are_found_whatever_their_case_and_keep_their_names():
    context = new_context()
    begin(context, {"X-Thing": "1"}, {"other": "2"})
    assert context.get_request_header(0, "x-thing") == "1"
    assert context.get_request_header(0, "X-Thing") == "1"
    assert context.get_request_header(1, "x-thing") is None
    assert context.get_all_request_header(0) == {"X-Thing": "1"}


def test_ids_are_there_only_with_requests():
    context = new_context()
    assert context.request_ids is None
    assert context.get_request_id() is None
    begin(context, {}, {})
    assert context.request_ids == {0: "id-0", 1: "id-1"}
    assert context.get_request_id(1) == "id-1"


def test_response_settings_belong_to_one_request_and_one_batch():
    context = new_context()
    begin(context, {}, {})
    context.set_response_status(404, "Nope", 1)
    context.set_response_content_type(0, "text/plain")
    context.set_response_header(0, "a", "b")
    assert context.get_response_status(0) == (200, None)
    assert context.get_response_status(1) == (404, "Nope")
    assert context.get_response_headers(0) == {"content-type": "text/plain", "a": "b"}
    assert context.get_response_content_type(0) == "text/plain"
    context.set_all_response_status(500, "All")
    assert context.get_response_status(0) == (500, "All")
    begin(context, {})
    assert context.get_response_status(0) == (200, None)
    assert context.get_response_headers(0) == {}


def test_status_without_a_request_is_ignored():
    new_context().set_response_status(404)


def test_handlers_may_put_anything_on_it():
    context = new_context()
    context.cache = {"x": 1}
    assert context.cache == {"x": 1}
    assert context == context
    assert context != new_context()


def test_no_request_is_cancelled_without_a_server():
    context = new_context()
    begin(context, {})
    assert context.is_cancelled(0) is False
    context.send(["chunk"])


def test_request_processor_has_the_methods_of_torchserve():
    processor = RequestProcessor({"k": "v"})
    processor.report_status(201, "Made")
    processor.add_response_property("h", "x")
    assert processor.get_request_property("k") == "v"
    assert processor.get_request_properties() == {"k": "v"}
    assert (processor.get_response_status_code(), processor.get_response_status_phrase()) == (201, "Made")
    assert processor.get_response_header("h") == "x"


def test_isolated_context_shares_nothing_but_what_cannot_be_copied():
    context = new_context()
    context.cache, context.lock = {"seen": []}, threading.Lock()
    twin = context.isolated()
    twin.cache["seen"].append(1)
    twin.system_properties["gpu_id"] = 7
    assert context.cache == {"seen": []}
    assert context.system_properties["gpu_id"] == 1
    assert twin.lock is context.lock
    assert twin.metrics is context.metrics


def test_sequence_headers_are_those_of_the_environment(monkeypatch):
    for name in ("ID", "START", "END"):
        monkeypatch.setenv(f"TS_REQUEST_SEQUENCE_{name}", f"X-{name}")
    context = new_context()
    begin(context, {"x-id": "s1"})
    assert context.get_sequence_id(0) == "s1"
    assert (context.header_key_sequence_start, context.header_key_sequence_end) == ("X-START", "X-END")
