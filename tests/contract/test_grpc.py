"""gRPC predictions: messages, handler input, statuses, streams, deadlines, limits."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from google.protobuf.empty_pb2 import Empty
from google.rpc.error_details_pb2 import ErrorInfo
from grpc import StatusCode

from flambeau.cli.lifecycle import SAME_SIGNAL_S
from flambeau.config.server import Address, GrpcConfig
from flambeau.metrics.system import resident_bytes
from support.archives import pack_handler
from support.configured import ConfiguredServer
from support.grpc_calls import Client, grpc_flags, refusal, request

INTERNAL_ERROR = "org.pytorch.serve.http.InternalServerException"


@pytest.fixture
def serve(start):
    """Start a server with gRPC ports; gives it and a client."""
    clients = []

    def start_server(*arguments, env=None, handler="orders.py", channel=grpc.insecure_channel):
        flags = grpc_flags()
        server = start(*([handler] if handler else []), *arguments, *flags, env=env).wait_ready()
        client = Client(int(flags[1]), int(flags[3]), channel)
        clients.append(client)
        return server, client

    yield start_server
    for client in clients:
        client.close()


# ---- what reaches the handler, and what comes back ----


def test_inputs_reach_the_handler_as_bytearrays_and_nothing_else(serve):
    _, client = serve()
    raw = bytes(range(256))
    told = json.loads(client.predict(inputs={"data": raw, "text": "häuser".encode(), "empty": b""}))
    assert told == {
        "data": ["bytearray", raw.decode("latin-1")],
        "text": ["bytearray", "häuser".encode().decode("latin-1")],
        "empty": ["bytearray", ""],
    }
    told = json.loads(client.predict(order={"do": "told"}, inputs={"data": b"1"}, metadata=[("x-mine", "7")]))
    assert told["headers"] == {"order": {"content-type": ""}, "data": {"content-type": ""}}
    assert told["types"] == {"order": "bytearray", "data": "bytearray"}


def test_replies_are_the_bytes_that_http_would_send(serve):
    _, client = serve()
    assert (
        client.predict(order={"do": "answer", "value": {"a": [1, 2.5, None]}})
        == json.dumps({"a": [1, 2.5, None]}, indent=2).encode()
    )
    assert client.predict(order={"do": "answer", "value": "text"}) == b"text"


def test_large_inputs_go_through_shared_memory(serve):
    _, client = serve()
    sizes = json.loads(client.predict(order={"do": "length"}, inputs={"a": b"a" * 3_000_000, "b": b"b" * 1_000_000}))
    assert sizes["a"] == 3_000_000
    assert sizes["b"] == 1_000_000
    assert len(client.predict(order={"do": "big", "bytes": 4_000_000})) == 4_000_000


def test_ping_has_the_health_as_json_text(serve):
    _, client = serve()
    assert client.inference.Ping(Empty(), timeout=60).health == '{\n  "status": "Healthy"\n}'


def test_versions_are_chosen_by_name(serve, tmp_path):
    store = tmp_path / "store"
    store.mkdir()
    for version in ("1.0", "2.0"):
        pack_handler(store, "orders", version=version, file=f"{version}.mar")
    _, client = serve(store, handler=None)
    manifest = {"do": "answer", "value": "here"}
    assert client.predict(order=manifest, model_version="2.0") == b"here"
    code, text = refusal(client.predict, order=manifest, model_version="3.0")
    assert code is StatusCode.INTERNAL
    assert text == (
        "Model version: 3.0 does not exist for model: orders\n"
        "org.pytorch.serve.archive.model.ModelVersionNotFoundException"
    )


# ---- statuses ----


def test_errors_before_a_worker_has_the_request_are_internal(serve):
    server, client = serve()
    assert refusal(client.predict, "nobody", {}) == (
        StatusCode.INTERNAL,
        "Model not found: nobody\norg.pytorch.serve.archive.model.ModelNotFoundException",
    )
    assert refusal(client.predict, "", {}) == (
        StatusCode.INTERNAL,
        "Parameter model_name is required.\nBadRequestException.()",
    )
    server.manage("PUT", "/models/orders?min_worker=0&synchronous=true")
    code, text = refusal(client.predict, order={"do": "told"})
    assert code is StatusCode.INTERNAL
    assert text.startswith('Model "orders" has no worker to serve inference request.')
    assert text.endswith("\nInternalServerException.()")


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (400, StatusCode.INVALID_ARGUMENT),
        (401, StatusCode.UNAUTHENTICATED),
        (403, StatusCode.PERMISSION_DENIED),
        (404, StatusCode.NOT_FOUND),
        (409, StatusCode.ABORTED),
        (418, StatusCode.FAILED_PRECONDITION),
        (429, StatusCode.RESOURCE_EXHAUSTED),
        (501, StatusCode.UNIMPLEMENTED),
        (504, StatusCode.DEADLINE_EXCEEDED),
        (599, StatusCode.INTERNAL),
        (600, StatusCode.UNKNOWN),
    ],
)
def test_exceptions_and_statuses_of_handlers_become_codes(serve_orders, code, expected):
    client = serve_orders
    assert refusal(client.predict, order={"do": "refuse", "code": code}) == (
        expected,
        f"not like this\n{INTERNAL_ERROR}",
    )
    assert refusal(client.predict, order={"do": "status", "code": code, "text": "no"}) == (
        expected,
        f"no\n{INTERNAL_ERROR}",
    )


@pytest.fixture(scope="module")
def serve_orders(tmp_path_factory):
    from support.running import HANDLERS, free_ports

    port, management_port = free_ports(2)
    config = GrpcConfig(inference=Address(port=port), management=Address(port=management_port))
    # Not `flambeau serve`, which adds the cause to the texts.
    server = ConfiguredServer(tmp_path_factory.mktemp("orders"), HANDLERS / "orders.py", grpc=config)
    server.wait_ready()
    client = Client(port, management_port)
    yield client
    client.close()
    server.stop()


def test_other_faults_of_handlers_and_workers(serve_orders):
    client = serve_orders
    assert refusal(client.predict, order={"do": "raise"}) == (
        StatusCode.UNAVAILABLE,
        f"Prediction failed\n{INTERNAL_ERROR}",
    )
    assert refusal(client.predict, order={"do": "exit"}) == (StatusCode.INTERNAL, f"Worker died.\n{INTERNAL_ERROR}")
    code, text = refusal(client.predict, order={"do": "big", "bytes": 7_000_000})
    assert code is StatusCode.UNAVAILABLE
    assert "max_response_size" in text
    assert client.predict(order={"do": "status", "code": 201, "text": "made"}) == b"made"


def test_a_long_error_text_still_arrives(serve_orders):
    code, text = refusal(serve_orders.predict, order={"do": "status", "code": 400, "text": "é\n%" * 10_000})
    assert code is StatusCode.INVALID_ARGUMENT
    assert text.startswith("é\n%é\n%")
    assert text.endswith(INTERNAL_ERROR)


# ---- streams ----


def test_stream_of_a_handler_that_streams_and_of_one_that_does_not(serve_orders):
    client = serve_orders
    assert client.stream(order={"do": "stream", "n": 4}) == [b"0 ", b"1 ", b"2 ", b"3 "]
    assert client.stream(order={"do": "answer", "value": "once"}) == [b"once"]
    assert client.stream(order={"do": "answer", "value": ""}) == [b""]


def test_predictions_puts_the_parts_of_a_stream_together(serve_orders):
    assert serve_orders.predict(order={"do": "stream", "n": 4}) == b"0 1 2 3 "
    code, text = refusal(serve_orders.predict, order={"do": "stream", "n": 100, "bytes": 1_000_000})
    assert code is StatusCode.RESOURCE_EXHAUSTED
    assert "max_response_size" in text


def test_a_stream_that_breaks_ends_with_an_error_after_the_parts_that_were_made(serve_orders):
    replies = serve_orders.inference.StreamPredictions(
        request(order={"do": "stream", "n": 5, "fail at": 2}), timeout=60
    )
    assert next(replies).prediction == b"0 "
    assert next(replies).prediction == b"1 "
    assert refusal(lambda: next(replies)) == (StatusCode.UNAVAILABLE, f"Prediction failed\n{INTERNAL_ERROR}")


def test_parts_arrive_one_by_one(serve_orders, tmp_path):
    note = tmp_path / "note"
    replies = serve_orders.inference.StreamPredictions(
        request(order={"do": "stream", "n": 2000, "pause": 0.01, "note": str(note)}), timeout=30
    )
    assert next(replies).prediction == b"0 "
    assert not note.exists()
    replies.cancel()


def test_a_client_that_does_not_read_costs_little_memory(serve, tmp_path):
    server, client = serve()
    before = resident_bytes(server.process.pid)
    note = tmp_path / "note"
    replies = client.inference.StreamPredictions(
        request(order={"do": "stream", "n": 400, "bytes": 1_000_000, "note": str(note)}), timeout=60
    )
    assert len(next(replies).prediction) == 1_000_000
    assert client.predict(order={"do": "answer", "value": "still here"}) == b"still here"  # it held up the worker
    assert note.read_text() == "ended early"
    assert resident_bytes(server.process.pid) - before < 100 << 20
    code, text = refusal(lambda: [*replies])
    assert code is StatusCode.RESOURCE_EXHAUSTED
    assert text.startswith("The client stopped reading")


# ---- StreamPredictions2 ----


def sequence(client, *requests, timeout=60):
    return [*client.inference.StreamPredictions2(iter(requests), timeout=timeout)]


def test_sequence_headers_are_set_and_replies_come_in_order(serve_orders):
    requests = [request(order={"do": "answer", "value": str(i)}, sequence_id="s") for i in range(20)]
    replies = sequence(serve_orders, *requests)
    assert [reply.prediction for reply in replies] == [str(i).encode() for i in range(20)]
    assert {reply.sequence_id for reply in replies} == {"s"}
    (told,) = sequence(serve_orders, request(order={"do": "told"}, sequence_id="s"))
    headers = json.loads(told.prediction)["headers"]
    assert headers == {"ts_request_sequence_id": "s", "order": {"content-type": ""}}


def test_a_sequence_that_starts_needs_no_id(serve_orders):
    (reply,) = sequence(serve_orders, request(order={"do": "told"}, inputs={"ts_request_sequence_start": b"True"}))
    assert re.fullmatch(r"ts-seq-[0-9a-f-]{36}", reply.sequence_id)
    assert reply.status.code == 0


def test_errors_are_messages_and_the_stream_goes_on(serve_orders):
    replies = sequence(
        serve_orders,
        request(order={"do": "answer", "value": "a"}, sequence_id="s"),
        request(order={"do": "raise"}, sequence_id="s"),
        request("nobody", {}, sequence_id="s"),
        request(order={"do": "answer", "value": "b"}),
        request(order={"do": "answer", "value": "c"}, sequence_id="s"),
    )
    of_sequence = [reply for reply in replies if reply.sequence_id == "s"]
    assert [reply.prediction for reply in of_sequence] == [b"a", b"", b"", b"c"]
    assert [reply.status.code for reply in of_sequence] == [0, 14, 13, 0]
    assert [reply.status.message for reply in of_sequence] == ["", "Prediction failed", "Model not found: nobody", ""]
    info = ErrorInfo()
    assert of_sequence[1].status.details[0].Unpack(info)
    assert info.reason == INTERNAL_ERROR
    (nameless,) = (reply for reply in replies if not reply.HasField("sequence_id"))
    assert nameless.status.message == "Parameter sequenceId is required."


def test_sequences_on_one_stream_do_not_wait_for_each_other(serve, tmp_path):
    _, client = serve("--workers", "2")
    gate = tmp_path / "gate"
    requests = [
        request(order={"do": "wait", "path": str(gate)}, sequence_id="slow"),
        request(order={"do": "answer", "value": "quick"}, sequence_id="fast"),
        request(order={"do": "answer", "value": "after"}, sequence_id="slow"),
    ]
    replies = client.inference.StreamPredictions2(iter(requests), timeout=30)
    assert next(replies).prediction == b"quick"
    gate.touch()
    assert [reply.prediction for reply in replies] == [b"waited", b"after"]


def test_parts_of_streams_are_messages_of_their_sequence(serve_orders):
    replies = sequence(serve_orders, request(order={"do": "stream", "n": 3}, sequence_id="s"))
    assert [reply.prediction for reply in replies] == [b"0 ", b"1 ", b"2 "]


# ---- deadlines and cancellation ----


def test_deadlines_take_jobs_out_of_the_queue(serve, tmp_path):
    server, client = serve()
    gate, note = tmp_path / "gate", tmp_path / "note"
    busy = client.inference.Predictions.future(request(order={"do": "wait", "path": str(gate)}), timeout=30)
    server.until(gate.with_name("gate.begun").exists)
    with ThreadPoolExecutor(40) as pool:
        order = {"do": "note", "path": str(note)}
        storm = [pool.submit(refusal, client.predict, order=order, timeout=0.3) for _ in range(40)]
        assert {future.result()[0] for future in storm} == {StatusCode.DEADLINE_EXCEEDED}
    client.inference.Ping(Empty(), timeout=60)  # the server has read what came before, on the same connection
    # All have left the queue; the first had been sent to the worker in advance, and counts until the worker answers.
    server.until(lambda: server.describe("orders")["jobQueueStatus"]["pendingRequests"] <= 1)
    gate.touch()
    assert busy.result().prediction == b"waited"
    assert client.predict(order={"do": "answer", "value": "next"}) == b"next"
    assert not note.exists()


def test_a_deadline_and_a_cancellation_reach_the_handler(serve, tmp_path):
    server, client = serve()
    for number, timeout in enumerate((0.5, None)):
        note = tmp_path / f"note-{number}"
        order = {"do": "stream", "n": 10_000, "pause": 0.01, "note": str(note)}
        replies = client.inference.StreamPredictions(request(order=order), timeout=timeout)
        assert next(replies).prediction == b"0 "
        if timeout is None:
            replies.cancel()
        server.until(note.exists)
        assert note.read_text() == "ended early"


def test_client_timeout_of_the_model_is_a_deadline(serve, tmp_path):
    pack_handler(tmp_path, "orders", config="clientTimeoutInMills: 200\n")
    _, client = serve(tmp_path / "orders.mar", handler=None)
    code, text = refusal(client.predict, order={"do": "wait", "path": str(tmp_path / "never")})
    assert code is StatusCode.DEADLINE_EXCEEDED
    assert "clientTimeoutInMills" in text


# ---- hostile ----


def test_messages_that_are_none_are_refused(serve_orders):
    service = "/org.pytorch.serve.grpc.inference.InferenceAPIsService"
    predict = serve_orders.channel.unary_unary(f"{service}/Predictions")
    for junk in (b"\xff\xff\xff", b"\x0a\x05ab", b"\x1a\x03\x0a\x01"):
        code, text = refusal(predict, junk, timeout=60)
        assert code is StatusCode.INVALID_ARGUMENT
        assert "PredictionsRequest" in text
    streams = serve_orders.channel.stream_stream(f"{service}/StreamPredictions2")
    good = request(order={"do": "answer", "value": "good"}, sequence_id="s").SerializeToString()
    replies = streams(iter([good, b"\xff\xff"]), timeout=60)
    assert b"good" in next(replies)
    assert refusal(lambda: next(replies))[0] is StatusCode.INVALID_ARGUMENT
    assert refusal(serve_orders.channel.unary_unary(f"{service}/Nothing"), b"", timeout=60)[0] is (
        StatusCode.UNIMPLEMENTED
    )


def test_messages_over_the_limit_are_refused(serve):
    _, client = serve("--max-request-size", "100000")
    assert json.loads(client.predict(order={"do": "length"}, inputs={"a": b"x" * 90_000}))["a"] == 90_000
    code, text = refusal(client.predict, inputs={"a": b"x" * 120_000})
    assert code is StatusCode.RESOURCE_EXHAUSTED
    assert "max_request_size allows 100000" in text
    code, text = refusal(client.predict, inputs={"a": b"x" * 5_000_000})
    assert code is StatusCode.RESOURCE_EXHAUSTED
    assert "larger than max" in text


def test_more_inputs_than_a_form_may_have_are_refused(serve_orders):
    many = {str(i): b"" for i in range(1001)}
    told = "The request has 1001 inputs; 1000 are allowed."
    for call in (serve_orders.predict, serve_orders.stream):
        code, text = refusal(call, inputs=many)
        assert code is StatusCode.INVALID_ARGUMENT
        assert text.startswith(told)
    asked = [request(inputs=many, sequence_id="s"), request(order={"do": "answer", "value": "on"}, sequence_id="s")]
    replies = [*serve_orders.inference.StreamPredictions2(iter(asked), timeout=60)]
    assert [reply.status.message for reply in replies] == [told, ""]
    assert replies[1].prediction == b"on"


def test_bytes_that_are_not_http2_do_no_harm(serve):
    server, client = serve()
    port = int(client.channel._channel.target().decode().rpartition(":")[2])
    for junk in (b"\x00" * 1000, b"GET / HTTP/1.1\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 5000, b""):
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(junk)
            connection.settimeout(10)
    held = [socket.create_connection(("127.0.0.1", port)) for _ in range(200)]
    assert client.predict(order={"do": "answer", "value": "fine"}) == b"fine"
    for connection in held:
        connection.close()
    assert server.is_ready


def test_huge_metadata_is_refused_and_forgotten(serve_orders):
    code, _ = refusal(serve_orders.predict, order={"do": "told"}, metadata=[("x-much", "y" * 200_000)])
    assert code in (StatusCode.RESOURCE_EXHAUSTED, StatusCode.UNAVAILABLE, StatusCode.INTERNAL)
    assert serve_orders.predict(order={"do": "answer", "value": "fine"}) == b"fine"


# ---- the ports ----


def test_the_access_log_has_a_line_for_each_call(serve):
    server, client = serve("--access-log")
    client.predict(order={"do": "answer", "value": 1})
    refusal(client.predict, "nobody", {})
    path = "org.pytorch.serve.grpc.inference.InferenceAPIsService/Predictions"
    line = re.compile(rf'/127\.0\.0\.1:\d+ "gRPC {re.escape(path)} HTTP/2\.0" (\d+) \d+$', re.MULTILINE)
    server.until(lambda: line.findall(server.log) == ["0", "13"])


def test_calls_are_counted_like_http_requests(serve):
    server, client = serve()
    client.predict(order={"do": "answer", "value": 1})
    refusal(client.predict, order={"do": "raise"})
    text = server.request("GET", "/metrics", port=server.metrics_port).text
    assert re.search(r'flambeau_requests_total\{model="orders",version="[^"]*",status="200"\} 1', text)
    assert re.search(r'flambeau_requests_total\{model="orders",version="[^"]*",status="503"\} 1', text)


def test_a_port_that_is_taken_is_a_clear_error(serve, start):
    _, client = serve()
    port = client.channel._channel.target().decode().rpartition(":")[2]
    other = start("orders.py", "--grpc-port", port)
    assert other.process.wait(60) == 1
    assert f"gRPC: http://127.0.0.1:{port} is in use by another process" in other.log


def refusal_of_ping(client):
    try:
        client.inference.Ping(Empty(), timeout=5)
    except grpc.RpcError as error:
        return error.code()
    return None


def test_accepted_calls_are_answered_while_the_server_stops(serve, tmp_path):
    server, client = serve()
    gate = tmp_path / "gate"
    call = client.inference.Predictions.future(request(order={"do": "wait", "path": str(gate)}), timeout=30)
    server.until(gate.with_name("gate.begun").exists)
    stream = client.inference.StreamPredictions(request(order={"do": "stream", "n": 3}), timeout=30)
    server.until(lambda: server.describe("orders")["jobQueueStatus"]["pendingRequests"] == 1)
    server.process.terminate()
    server.until(lambda: "stopping" in server.log)
    server.until(lambda: refusal_of_ping(client) is StatusCode.UNAVAILABLE)
    gate.touch()
    assert call.result().prediction == b"waited"
    assert [reply.prediction for reply in stream] == [b"0 ", b"1 ", b"2 "]
    assert server.process.wait(60) == 0


def test_no_accepted_call_is_lost_in_the_middle_of_a_stop(serve):
    server, client = serve("--access-log")
    stop = threading.Event()

    def call_until_stopped(codes):
        while not stop.is_set():
            try:
                assert client.predict(order={"do": "answer", "value": "x"}) == b"x"
                codes.append(StatusCode.OK)
            except grpc.RpcError as error:
                codes.append(error.code())

    codes = [[] for _ in range(4)]
    callers = [threading.Thread(target=call_until_stopped, args=(own,)) for own in codes]
    for caller in callers:
        caller.start()
    server.until(lambda: sum(map(len, codes)) > 50)
    server.process.terminate()
    assert server.process.wait(60) == 0
    stop.set()
    for caller in callers:
        caller.join()
    # gRPC marks a server as shut down before it sends GOAWAY, and cancels what arrives between the two: how many calls
    # that are depends on the machine, but none is accepted after them, and none reaches the server after the GOAWAY.
    order = [StatusCode.OK, StatusCode.CANCELLED, StatusCode.UNAVAILABLE]
    for own in codes:
        assert own == sorted(own, key=order.index)
        assert {own[0], own[-1]} == {StatusCode.OK, StatusCode.UNAVAILABLE}
    accepted = re.findall(r'Predictions HTTP/2.0" (\d+) ', server.log)
    assert accepted == ["0"] * sum(own.count(StatusCode.OK) for own in codes)


def test_a_second_signal_does_not_wait_for_calls(serve, tmp_path):
    server, client = serve()
    gate = tmp_path / "gate"
    call = client.inference.Predictions.future(request(order={"do": "wait", "path": str(gate)}), timeout=30)
    server.until(gate.with_name("gate.begun").exists)
    server.process.terminate()
    server.until(lambda: "stopping" in server.log)
    first = time.monotonic()
    server.until(lambda: time.monotonic() > first + SAME_SIGNAL_S)
    server.process.terminate()
    assert server.process.wait(60) == 1
    assert refusal(call.result)[0] in (StatusCode.UNAVAILABLE, StatusCode.CANCELLED)
    assert "Traceback" not in server.log
