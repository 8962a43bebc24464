"""Spans of a real server and its workers arrive at an OTLP receiver, with the right parents across processes."""

from __future__ import annotations

import json
import threading

import grpc
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from flambeau.frontend.grpc.messages import PredictionResponse, PredictionsRequest
from support.flows import pack_flow
from support.language_models import ONE_THREAD, write_language_model
from support.otlp_receiver import OtlpReceiver
from support.running import RunningServer, free_ports
from support.snippets import snippets

HANDLER = """
import os
from opentelemetry import trace

tracer = trace.get_tracer("my.handler")

class Handler:
    def initialize(self, context):
        with tracer.start_as_current_span("outside of requests"):
            pass

    def preprocess(self, data):
        return [bytes(row.get("body") or row.get("data") or b"").decode() for row in data]

    def inference(self, words):
        with tracer.start_as_current_span("look up") as span:
            span.set_attribute("words", len(words))
        return words

    def postprocess(self, words):
        if "fail" in words:
            raise ValueError("no such word")
        return words

    def handle(self, data, context):
        words = self.preprocess(data)
        if words == ["stream"]:
            return self.stream()
        if words == ["die once"] and not os.path.exists("died"):
            open("died", "w").close()
            os.kill(os.getpid(), 9)
        if words == ["header"]:
            return [context.get_request_header(0, "traceparent")]
        return self.postprocess(self.inference(words))

    def stream(self):
        for number in range(3):
            with tracer.start_as_current_span(f"item {number}"):
                item = f"{number} "
            yield [item]
"""
ASYNC = """
import asyncio
from opentelemetry import trace

class Handler:
    def initialize(self, context):
        pass

    async def handle(self, data, context):
        await asyncio.sleep(0.001)
        with trace.get_tracer("my.handler").start_as_current_span("awaited"):
            await asyncio.sleep(0.001)
        return ["done"] * len(data)
"""
STEPS = """
def first(data, context):
    return None if data is None else [bytes(row.get("body") or row.get("data")) + b"1" for row in data]

def second(data, context):
    return None if data is None else [bytes(row.get("body") or row.get("data")) + b"2" for row in data]
"""
[DOCUMENTED] = snippets("docs/tracing.md", "python")
PARENT = "b7ad6b7169203331"
ROUTE = "POST /predictions/{model_name}"


@pytest.fixture(scope="module")
def receiver():
    receiver = OtlpReceiver()
    yield receiver
    receiver.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory, receiver):
    folder = tmp_path_factory.mktemp("traces")
    (folder / "words.py").write_text(HANDLER)
    (folder / "later.py").write_text(ASYNC)
    (folder / "prices.py").write_text(DOCUMENTED)
    (folder / "pair").mkdir()
    (folder / "pair" / "handler.py").write_text(HANDLER)
    (folder / "pair" / "model-config.yaml").write_text("batchSize: 2\nmaxBatchDelay: 30000\n")
    settings = {"handler": {"compile": False, "max_num_seqs": 4, "num_blocks": 64}}
    (write_language_model(folder / "tiny") / "model-config.yaml").write_text(json.dumps(settings))
    (folder / "flows").mkdir()
    (folder / "steps.py").write_text(STEPS)
    pack_flow(folder / "flows", "chain", {"first": ["second"]}, handler=folder / "steps.py")
    [port] = free_ports(1)
    models = [str(folder / name) for name in ("words.py", "later.py", "prices.py", "pair", "tiny")]
    arguments = ["--tracing", "--trace-sampling", "0", "--grpc-port", str(port), "--access-log", "--log-format", "json"]
    arguments += ["--workflow-store", str(folder / "flows")]
    environment = {**receiver.environment, **ONE_THREAD}
    running = RunningServer(folder / "log", *models, *arguments, env=environment).wait_ready()
    running.grpc_port = port
    yield running
    running.stop()


def traced(number: int) -> tuple[str, dict[str, str]]:
    """A trace id, and the header of a client that records it."""
    trace_id = f"{number:032x}"
    return trace_id, {"traceparent": f"00-{trace_id}-{PARENT}-01"}


def test_spans_of_a_request_have_the_right_parents_across_processes(server, receiver):
    trace_id, headers = traced(0x101)
    reply = server.predict("words", b"hello", headers={**headers, "x-request-id": "r-101"})
    assert reply.text == "hello"
    stages = ("preprocess", "inference", "postprocess")
    spans = receiver.trace(trace_id, ROUTE, "queue", "batch", "look up", *stages)
    request, queue, batch, own = (spans[name] for name in (ROUTE, "queue", "batch", "look up"))
    assert (request.kind, request.parent_id) == ("SERVER", PARENT)
    assert (queue.parent_id, batch.parent_id, own.parent_id) == (request.id, request.id, batch.id)
    assert (request.process["flambeau.process"], own.process["flambeau.process"]) == ("server", "worker")
    assert own.process["process.pid"] == server.worker_pids("words")[0] != request.process["process.pid"]
    assert {one.process["service.name"] for one in spans.values()} == {"flambeau"}
    assert own.attributes == {"words": 1}
    assert {spans[name].parent_id for name in stages} == {batch.id}
    assert all(spans[name].is_inside(batch) for name in stages)
    assert queue.is_inside(request)
    assert own.is_inside(batch)
    assert batch.is_inside(request)
    names = ("http.request.method", "http.route", "http.response.status_code", "flambeau.request.id")
    assert [request.attributes[name] for name in names] == ["POST", "/predictions/{model_name}", 200, "r-101"]
    assert (batch.attributes["flambeau.batch.size"], batch.attributes["flambeau.model.name"]) == (1, "words")
    assert not any(one.is_error for one in spans.values())


def test_response_and_handler_get_the_traceparent_of_the_servers_spans(server, receiver):
    trace_id, headers = traced(0x102)
    reply = server.predict("words", b"header", headers=headers)
    spans = receiver.trace(trace_id, ROUTE, "batch")
    assert reply.headers["traceparent"] == f"00-{trace_id}-{spans[ROUTE].id}-01"
    assert reply.text == f"00-{trace_id}-{spans['batch'].id}-01"


def test_request_that_its_client_does_not_record_is_passed_on_unchanged(server, receiver):
    header = f"00-{0x103:032x}-{PARENT}-00"
    reply = server.predict("words", b"header", headers={"traceparent": header})
    assert (reply.text, reply.headers.get("traceparent")) == (header, None)
    assert "traceparent" not in server.predict("words", b"sampling is 0").headers
    trace_id, headers = traced(0x104)
    server.predict("words", b"later", headers=headers)
    receiver.trace(trace_id, "look up")
    assert not [span for span in receiver.spans if span.trace_id == f"{0x103:032x}"]
    assert not [span for span in receiver.spans if span.name == "outside of requests"]


def test_stream_is_traced_to_its_end(server, receiver):
    trace_id, headers = traced(0x105)
    assert server.predict("words", b"stream", headers=headers).text == "0 1 2 "
    spans = receiver.trace(trace_id, ROUTE, "batch", "item 0", "item 2")
    assert {spans[f"item {number}"].parent_id for number in range(3)} == {spans["batch"].id}
    assert spans["item 2"].is_inside(spans["batch"])


def test_handler_of_the_docs(server, receiver):
    trace_id, headers = traced(0x109)
    assert server.predict("prices", b"pear", headers=headers).text == "4"
    spans = receiver.trace(trace_id, "batch", "read prices")
    assert (spans["read prices"].parent_id, spans["read prices"].attributes) == (spans["batch"].id, {"rows": 1})
    assert spans["handler"].parent_id == spans["batch"].id


def test_async_handler_has_the_context_of_its_request(server, receiver):
    ids = [0x201, 0x202, 0x203]
    calls = [traced(number) for number in ids]
    threads = [threading.Thread(target=server.predict, args=("later",), kwargs={"headers": call[1]}) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for trace_id, _ in calls:
        spans = receiver.trace(trace_id, "batch", "awaited")
        assert spans["awaited"].parent_id == spans["batch"].id


def test_failed_request_has_an_error_in_both_spans(server, receiver):
    trace_id, headers = traced(0x106)
    reply = server.predict("words", b"fail", headers=headers)
    assert reply.status == 503
    spans = receiver.trace(trace_id, ROUTE, "batch")
    request, batch = spans[ROUTE], spans["batch"]
    assert (request.is_error, request.attributes["error.type"]) == (True, "503")
    assert batch.is_error
    assert "no such word" in batch.error
    log = [json.loads(line) for line in server.log.splitlines()]
    assert {one["logger"] for one in log if one.get("trace_id") == trace_id} >= {"flambeau.frontend.http.inference"}


def test_request_to_no_model_is_one_span(server, receiver):
    trace_id, headers = traced(0x107)
    assert server.predict("missing", b"", headers=headers).status == 404
    [span] = receiver.trace(trace_id, ROUTE).values()
    assert (span.attributes["http.response.status_code"], span.is_error) == (404, False)


def test_probes_and_descriptions_are_not_traced(server, receiver):
    _, headers = traced(0x108)
    for path in ("/ping", "/v1/models", "/v2/health/ready", "/predictions/words"):
        method = "OPTIONS" if path.startswith("/pred") else "GET"
        assert "traceparent" not in server.request(method, path, headers=headers).headers


def test_requests_of_one_batch_are_linked(server, receiver):
    calls = [traced(number) for number in (0x301, 0x302)]
    futures = server.at_once(lambda call: server.predict("pair", b"x", headers=call[1]), calls)
    assert [future.result().text for future in futures] == ["x", "x"]
    first, second = (receiver.trace(trace_id, ROUTE, "batch") for trace_id, _ in calls)
    assert first["batch"].attributes["flambeau.batch.size"] == 2
    assert (first["batch"].linked, second["batch"].linked) == ((calls[1][0],), (calls[0][0],))
    ids = {trace_id for trace_id, _ in calls}
    own = server.until(lambda: [span for span in receiver.spans if span.name == "look up" and span.trace_id in ids])
    assert [span.attributes["words"] for span in own] == [2]  # one call of the handler, in one of the traces


def test_worker_that_dies_is_a_span_of_its_own(server, receiver):
    trace_id, headers = traced(0x303)
    assert server.predict("words", b"die once", headers=headers).text == "die once"
    receiver.trace(trace_id, ROUTE, "look up")
    lost, answered = sorted(
        (span for span in receiver.spans if span.trace_id == trace_id and span.name == "batch"),
        key=lambda span: span.begin_ns,
    )
    assert (lost.error, answered.is_error) == ("the worker was lost", False)
    assert receiver.trace(trace_id, "look up")["look up"].parent_id == answered.id


def test_histograms_name_the_trace_of_a_request(server):
    trace_id, headers = traced(0x304)
    server.predict("words", b"hello", headers=headers)
    accept = {"accept": "application/openmetrics-text; version=1.0.0"}
    text = server.request("GET", "/metrics", port=server.metrics_port, headers=accept).text
    marked = {
        (family.name, *(sample.labels[key] for key in ("stage",) if key in sample.labels)): sample
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.exemplar and sample.exemplar.labels == {"trace_id": trace_id}
    }
    names = {(f"flambeau_{name}_seconds",) for name in ("request", "queue", "handler")}
    assert {*marked} == names | {
        ("flambeau_stage_seconds", name) for name in ("preprocess", "inference", "postprocess")
    }
    request = marked["flambeau_request_seconds",]
    assert 0 < request.exemplar.value <= float(request.labels["le"])
    plain = server.request("GET", "/metrics", port=server.metrics_port).text
    assert trace_id not in plain


# ---- gRPC ----

SERVICE = "org.pytorch.serve.grpc.inference.InferenceAPIsService"


@pytest.fixture(scope="module")
def channel(server):
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        yield channel


def to_request(word, model="words", **fields):
    return PredictionsRequest(model_name=model, input={"data": word.encode()}, **fields).SerializeToString()


def test_grpc_call(server, receiver, channel):
    trace_id, headers = traced(0x401)
    predict = channel.unary_unary(f"/{SERVICE}/Predictions")
    reply, call = predict.with_call(to_request("hello"), metadata=[*headers.items()], timeout=60)
    assert PredictionResponse.FromString(reply).prediction == b"hello"
    name = f"{SERVICE}/Predictions"
    spans = receiver.trace(trace_id, name, "queue", "batch", "look up", "inference")
    request = spans[name]
    assert (request.kind, request.parent_id, request.is_error) == ("SERVER", PARENT, False)
    assert dict(call.initial_metadata())["traceparent"] == f"00-{trace_id}-{request.id}-01"
    assert (spans["queue"].parent_id, spans["batch"].parent_id) == (request.id, request.id)
    assert (spans["look up"].parent_id, spans["inference"].parent_id) == (spans["batch"].id, spans["batch"].id)
    assert (request.attributes["rpc.method"], request.attributes["rpc.grpc.status_code"]) == ("Predictions", 0)
    [line] = server.until(lambda: [line for line in server.log.splitlines() if trace_id in line and "ACCESS" in line])
    access = json.loads(line)
    assert (access["model"], access["request_id"]) == ("words", request.attributes["flambeau.request.id"])


def test_grpc_stream(receiver, channel):
    trace_id, headers = traced(0x402)
    stream = channel.unary_stream(f"/{SERVICE}/StreamPredictions")
    replies = stream(to_request("stream"), metadata=[*headers.items()], timeout=60)
    assert [PredictionResponse.FromString(reply).prediction for reply in replies] == [b"0 ", b"1 ", b"2 "]
    spans = receiver.trace(trace_id, f"{SERVICE}/StreamPredictions", "batch", "item 2")
    assert spans["item 2"].parent_id == spans["batch"].id


def test_failed_grpc_call(receiver, channel):
    trace_id, headers = traced(0x403)
    with pytest.raises(grpc.RpcError) as error:
        channel.unary_unary(f"/{SERVICE}/Predictions")(to_request("fail"), metadata=[*headers.items()], timeout=60)
    spans = receiver.trace(trace_id, f"{SERVICE}/Predictions", "batch")
    request = spans[f"{SERVICE}/Predictions"]
    assert (request.is_error, request.attributes["error.type"]) == (True, error.value.code().name)
    assert "no such word" in spans["batch"].error


def test_grpc_sequence_is_one_call_with_a_batch_for_each_request(server, receiver, channel):
    trace_id, headers = traced(0x404)
    stream = channel.stream_stream(f"/{SERVICE}/StreamPredictions2")
    replies = stream(
        iter([to_request(word, sequence_id="s") for word in ("one", "two")]), metadata=[*headers.items()], timeout=60
    )
    assert {PredictionResponse.FromString(reply).prediction for reply in replies} == {b"one", b"two"}
    name = f"{SERVICE}/StreamPredictions2"
    request = receiver.trace(trace_id, name, "batch", "look up")[name]
    assert (request.parent_id, request.is_error) == (PARENT, False)
    spans = receiver.spans
    batches = [span for span in spans if span.trace_id == trace_id and span.name == "batch"]
    assert [span.parent_id for span in batches] == [request.id] * 2
    own = server.until(lambda: len(found := spans_named(receiver, trace_id, "look up")) == 2 and found)
    assert {span.parent_id for span in own} == {span.id for span in batches}


def spans_named(receiver, trace_id, name):
    return [span for span in receiver.spans if (span.trace_id, span.name) == (trace_id, name)]


# ---- WebSockets and workflows ----

SOCKET = "WEBSOCKET /predictions/{model_name}"


def test_each_message_of_a_websocket_is_a_request_of_the_trace_that_the_handshake_names(server, receiver):
    trace_id, headers = traced(0x601)
    with connect(f"ws://127.0.0.1:{server.port}/predictions/words", additional_headers=headers) as ws:
        for word in (b"one", b"header"):
            ws.send(word)
            assert ws.recv(timeout=60)
            assert ws.recv(timeout=60) == b""
        ws.send(b"fail")
        with pytest.raises(ConnectionClosed):
            ws.recv(timeout=60)
    requests = server.until(lambda: len(found := spans_named(receiver, trace_id, SOCKET)) == 3 and found)
    assert {(request.kind, request.parent_id) for request in requests} == {("SERVER", PARENT)}
    assert sorted(request.is_error for request in requests) == [False, False, True]
    batches = spans_named(receiver, trace_id, "batch")
    assert {batch.parent_id for batch in batches} == {request.id for request in requests}
    names = {request.attributes["flambeau.request.id"].rpartition("-")[2] for request in requests}
    assert names == {"1", "2", "3"}


def test_workflow_has_a_batch_for_each_node(server, receiver):
    reply = server.request("POST", "/workflows?url=chain.war", port=server.management_port)
    assert reply.status == 200, reply.text
    trace_id, headers = traced(0x602)
    assert server.request("POST", "/wfpredict/chain", b"x", headers).text == "x12"
    route = "POST /wfpredict/{workflow_name}"
    request = receiver.trace(trace_id, route)[route]
    batches = sorted(spans_named(receiver, trace_id, "batch"), key=lambda span: span.begin_ns)
    assert [span.parent_id for span in batches] == [request.id] * 2
    assert [span.attributes["flambeau.model.name"].rpartition("__")[2] for span in batches] == ["first", "second"]
    assert all(span.is_inside(request) for span in batches)


# ---- language models ----


def chat(server, headers, *, stream):
    document = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "To be"}],
        "max_tokens": 5,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
    }
    kind = {"content-type": "application/json"}
    return server.request("POST", "/v1/chat/completions", json.dumps(document).encode(), {**kind, **headers})


@pytest.mark.parametrize(("number", "stream"), [(0x501, False), (0x502, True)])
def test_chat_follows_the_conventions_for_generative_models(server, receiver, number, stream):
    trace_id, headers = traced(number)
    reply = chat(server, headers, stream=stream)
    assert reply.status == 200, reply.text
    route = "POST /v1/chat/completions"
    spans = receiver.trace(trace_id, route, "queue", "chat tiny", "first token", "decode")
    generation = spans["chat tiny"]
    assert reply.headers["traceparent"] == f"00-{trace_id}-{spans[route].id}-01"
    assert (spans[route].parent_id, generation.parent_id) == (PARENT, spans[route].id)
    assert (spans["first token"].parent_id, spans["decode"].parent_id) == (generation.id, generation.id)
    assert generation.begin_ns <= spans["first token"].end_ns <= spans["decode"].begin_ns + 1000
    found = {name.removeprefix("gen_ai."): value for name, value in generation.attributes.items()}
    assert (found["operation.name"], found["provider.name"], found["request.model"]) == ("chat", "flambeau", "tiny")
    assert (found["request.max_tokens"], found["request.temperature"], found["request.stream"]) == (5, 0, stream)
    assert (found["usage.output_tokens"], found["response.finish_reasons"]) == (5, ["length"])
    assert found["usage.input_tokens"] > 1
    assert found["response.id"] in reply.text


def test_generation_over_the_prediction_api(server, receiver):
    trace_id, headers = traced(0x503)
    body = {"prompt": "To be", "max_new_tokens": 4, "ignore_eos": True}
    assert server.predict("tiny", body, headers=headers).status == 200
    spans = receiver.trace(trace_id, ROUTE, "text_completion tiny", "first token")
    assert spans["text_completion tiny"].attributes["gen_ai.usage.output_tokens"] == 4


def test_chat_that_is_refused_is_one_span(server, receiver):
    trace_id, headers = traced(0x504)
    body = b'{"model": "tiny", "messages": []}'
    kind = {"content-type": "application/json"}
    assert server.request("POST", "/v1/chat/completions", body, {**kind, **headers}).status == 400
    [span] = receiver.trace(trace_id, "POST /v1/chat/completions").values()
    assert (span.is_error, span.attributes["http.response.status_code"]) == (False, 400)
