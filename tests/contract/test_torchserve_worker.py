"""Code that uses TorchServe's worker side itself: its service, its loader, its worker on a socket."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from contextlib import nullcontext
from unittest import mock

import pytest

from flambeau.worker.context import Context
from support.running import HANDLERS, path
from ts.handler_utils.utils import send_intermediate_predict_response
from ts.model_loader import ModelLoaderFactory
from ts.protocol import otf_message_handler
from ts.service import Service, emit_metrics
from ts.utils.util import PredictionException
from unit.torchserve.worker_protocol.test_protocol import END, integer, text


def request(body: bytes, request_id: bytes = b"1", kind: str = "") -> dict:
    parameters = [{"name": "body", "contentType": kind, "value": bytearray(body)}]
    return {"requestId": request_id, "headers": [{"name": b"X-A", "value": b"b"}], "parameters": parameters}


def service_of(entry_point) -> Service:
    return Service("m", ".", None, entry_point, None, 2)


def answer(code: int, message: bytes, body: bytes) -> bytes:
    return integer(code) + text(message) + text(b"1") + text(b"") + integer(code) + text(b"") + integer(0) + text(body)


def test_a_batch_is_taken_apart():
    headers, rows, ids = Service.retrieve_data_for_inference([request(b"x", kind="text/csv")])
    assert headers[0].get_request_property("body") == {"content-type": "text/csv"}
    assert headers[0].get_request_property("x-a") == headers[0].get_request_properties()["X-A"] == "b"
    assert (rows, ids) == ([{"body": b"x"}], {0: "1"})
    with pytest.raises(ValueError, match="Received invalid inputs"):
        Service.retrieve_data_for_inference(None)


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (MemoryError(), 507, b"Out of resources"),
        (RuntimeError("CUDA error: out of memory"), 507, b"Out of resources"),
        (PredictionException("not here", 404), 404, b"not here"),
        (PredictionException("too large", 413), 507, b"too large"),
        (KeyError("x"), 503, b"Prediction failed"),
    ],
)
def test_what_a_handler_raises_becomes_a_status_and_a_text(error, code, message):
    service = service_of(mock.Mock(side_effect=error))
    assert service.predict([request(b"x")]) == answer(code, message, b"error") + END


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ("text", b"Invalid model predict output"),
        (["a", "b"], b"number of batch response mismatched"),
        ([object()], b"Unsupported model output data type."),
    ],
)
def test_what_a_handler_may_not_return(result, message):
    assert service_of(lambda data, context: result).predict([request(b"x")]) == answer(503, message, b"error") + END


def test_what_a_handler_returns_is_encoded_and_timed():
    service = service_of(lambda data, context: [f"{context.get_request_id()} {data[0]['body'].decode()}"])
    assert service.predict([request(b"x")]) == answer(200, b"Prediction success", b"1 x") + END
    assert [sample[0] for sample in service.context.metrics.take()] == ["PredictionTime"]


def test_metrics_are_written_to_the_log(caplog):
    caplog.set_level(logging.INFO)
    emit_metrics(["one"])
    assert "[METRICS]one" in caplog.text


DEPRECATED = otf_message_handler.send_intermediate_predict_response


@pytest.mark.parametrize(
    ("send", "warns"),
    [(send_intermediate_predict_response, nullcontext()), (DEPRECATED, pytest.warns(PendingDeprecationWarning))],
)
def test_chunks_go_to_a_socket_and_later_ranks_send_none(send, warns, monkeypatch):
    context = Context("m", ".", None, 1, None, "1")
    context.cl_socket = mock.Mock()
    service = service_of(None)
    context.request_processor, _, context.request_ids = service.retrieve_data_for_inference([request(b"x")])
    with warns:
        send(["chunk"], context.request_ids, "so far", 200, context)
        monkeypatch.setenv("LOCAL_RANK", "1")
        send(["chunk"], context.request_ids, "so far", 200, context)
    [call] = context.cl_socket.sendall.call_args_list
    assert call.args[0].startswith(integer(200) + text(b"so far"))
    assert context.get_response_headers(0) == {"ts_stream_next": "true"}


@pytest.mark.usefixtures("event_loop")
def test_the_loader_loads_by_the_rules_of_workers(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    service = ModelLoaderFactory.get_model_loader().load("m", str(HANDLERS), "echo.py", None, 1)
    assert service.predict([request(b"x")]).endswith(b'"batch": 1\n}' + END)
    enveloped = ModelLoaderFactory.get_model_loader().load("m", str(HANDLERS), "function", None, 1, "body")
    assert enveloped.context.model_name == "m"
    with pytest.raises(ValueError, match="names no handler"):
        ModelLoaderFactory.get_model_loader().load("m", str(HANDLERS))


@pytest.mark.parametrize(("handler", "mode"), [("echo.py", []), ("asynchronous.py", ["--async"])])
def test_a_worker_is_driven_over_its_socket(handler, mode, tmp_path):
    name = tmp_path / "sock.9000"
    words = [sys.executable, "-m", "ts.model_service_worker", "--sock-type", "unix", "--sock-name", str(name), *mode]
    worker = subprocess.Popen(
        words, stdout=subprocess.PIPE, text=True, cwd=HANDLERS, env={**os.environ, "PYTHONPATH": path()}
    )
    try:
        lines = iter(worker.stdout.readline, "")
        assert next(lines) == f"[PID]{worker.pid}\n"
        assert next(lines) == "Torch worker started.\n"
        with socket.socket(socket.AF_UNIX) as peer:
            peer.connect(str(name))
            peer.settimeout(30)
            load = text(b"m") + text(str(HANDLERS).encode()) + integer(1) + text(handler.encode())
            peer.sendall(b"L" + load + integer(-1) + text(b"") + b"\x01")
            loaded = integer(200) + text(b"loaded model m") + END
            assert receive(peer, len(loaded)) == loaded
            peer.sendall(b"I" + text(b"1") + END + text(b"body") + text(b"application/json") + text(b"{}") + END + END)
            head = integer(200) + text(b"Prediction success") + text(b"1")
            assert receive(peer, len(head)) == head
        assert worker.wait(30) == 0
    finally:
        worker.kill()
        worker.wait()
        worker.stdout.close()


def receive(peer: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (packet := peer.recv(size - len(data))):
        data += packet
    return data


@pytest.mark.usefixtures("event_loop")
def test_a_worker_that_cannot_load_says_why(tmp_path):
    from ts.model_service_worker import TorchModelServiceWorker

    worker = TorchModelServiceWorker("tcp", None, None, 0)
    worker.sock.close()
    service, message, code = worker.load_model({"modelName": b"m", "modelPath": bytes(tmp_path), "handler": b"absent"})
    assert (service, code) == (None, 500)
    assert "no handler 'absent'" in message
    for arguments in ((), ("unix",), ("tcp", "x")):
        with pytest.raises(ValueError, match=r"provided|No socket"):
            TorchModelServiceWorker(*arguments)
