"""From a handler file to answers over HTTP."""

from __future__ import annotations

import json
import uuid

import pytest

from support.archives import pack_handler

BOUNDARY = "xyzzy"


def test_handler_file_answers_within_a_second(share):
    server = share("echo.py")
    reply = server.predict("echo", {"id": 7})
    assert reply.status == 200
    assert reply.json == {"row": {"body": {"id": 7}}, "batch": 1}
    assert reply.body == json.dumps(reply.json, indent=2).encode() + b"\n"


@pytest.mark.parametrize(
    ("kind", "body", "value"),
    [
        ("application/json", b'{"a": [1, 2.5, null]}', {"a": [1, 2.5, None]}),
        ("application/json; charset=utf-8", b"[NaN]", None),
        ("application/json", b"not json", ["bytearray", "not json"]),
        ("text/plain", "grüße".encode(), "grüße"),
        ("text/plain", b"\xff\xfe", ["bytearray", "\xff\xfe"]),
        ("application/octet-stream", b"\x00\x01", ["bytearray", "\x00\x01"]),
        (None, b"plain", ["bytearray", "plain"]),
        (None, b"", ["bytearray", ""]),
    ],
)
def test_body_reaches_the_handler_by_its_media_type(share, kind, body, value):
    reply = share("echo.py").predict("echo", body, kind=kind)
    got = reply.json["row"]["body"]
    assert got == value if value is not None else got[0] != got[0]


def test_forms_become_one_entry_per_field(share):
    server = share("echo.py")
    form = (
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="data"; filename="x.json"\r\n'
        f'Content-Type: application/json\r\n\r\n{{"a": 1}}\r\n'
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="plain"\r\n\r\nvalue\r\n'
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="file"; filename="x.bin"\r\n\r\nraw\r\n'
        f"--{BOUNDARY}--\r\n"
    ).encode()
    reply = server.predict("echo", form, kind=f"multipart/form-data; boundary={BOUNDARY}")
    assert reply.json["row"] == {"data": {"a": 1}, "plain": ["bytearray", "value"], "file": ["bytearray", "raw"]}
    reply = server.predict("echo", b"x=1&y=a+b%21", kind="application/x-www-form-urlencoded")
    assert reply.json["row"] == {"x": ["bytearray", "1"], "y": ["bytearray", "a b!"]}


def test_handler_gets_the_type_of_each_parameter(share):
    server = share("told.py")
    form = (
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="data"; filename="x.json"\r\n'
        f"Content-Type: application/json\r\n\r\n{{}}\r\n"
        f'--{BOUNDARY}\r\nContent-Disposition: form-data; name="plain"\r\n\r\nvalue\r\n--{BOUNDARY}--\r\n'
    ).encode()
    headers = server.predict("told", form, kind=f"multipart/form-data; boundary={BOUNDARY}").json["headers"]
    assert headers["data"] == {"content-type": "application/json"}
    assert headers["plain"] == {"content-type": ""}
    assert "body" not in headers
    assert server.predict("told", {}).json["headers"]["body"] == {"content-type": "application/json"}


def test_form_that_cannot_be_read_is_a_bad_request(share):
    server = share("echo.py")
    reply = server.predict("echo", b"nonsense", kind="multipart/form-data")
    assert reply.status == 400
    assert "boundary" in reply.message
    reply = server.predict("echo", b"nonsense", kind=f"multipart/form-data; boundary={BOUNDARY}")
    assert reply.status == 400
    assert server.predict("echo", {"still": "alive"}).status == 200


def test_context_has_headers_ids_and_properties(share):
    server = share("told.py", "--batch-size", "4")
    reply = server.predict("told/1.0/more/path", {}, headers={"X-MiXeD": "Case", "X-Request-Id": "my-own-id"})
    told = reply.json
    assert told["id"] == "my-own-id" == reply.headers["x-request-id"]
    assert told["headers"]["X-MiXeD"] == "Case"
    assert told["headers"]["url_path"] == "more/path"
    assert told["headers"]["explain"] == "False"
    assert told["properties"]["batch_size"] == 4
    assert told["properties"]["gpu_id"] is None
    assert told["manifest"] is None
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["x-answer"] == "forty-two"


def test_request_id_is_made_when_the_client_sends_none_or_an_unfit_one(share):
    server = share("told.py")
    assert uuid.UUID(server.predict("told", {}).headers["x-request-id"]).version == 4
    assert uuid.UUID(server.predict("told", {}, headers={"X-Request-Id": "x" * 200}).headers["x-request-id"])


def test_status_and_phrase_are_the_handlers(share):
    server = share("told.py")
    reply = server.predict("told", {}, headers={"X-Status": "418"})
    assert reply.status == 418
    assert "headers" in reply.json


def test_any_method_predicts_and_options_describes(share):
    server = share("echo.py")
    assert server.request("GET", "/predictions/echo").status == 200
    assert server.request("PUT", "/predictions/echo/", b"{}").status == 200
    assert server.request("HEAD", "/predictions/echo").body == b""
    document = server.request("OPTIONS", "/predictions/echo").json
    assert document["info"]["title"] == "RESTful API for: echo"
    assert server.request("OPTIONS", "/").json["openapi"] == "3.0.1"
    assert server.request("POST", "/").status == 405


def test_unknown_model_version_and_path_are_distinguished(share):
    server = share("echo.py")
    reply = server.predict("nobody", {})
    assert (reply.status, reply.json["type"]) == (404, "ModelNotFoundException")
    assert reply.message == "Model not found: nobody"
    reply = server.predict("echo/9.9", {})
    assert (reply.status, reply.json["type"]) == (404, "ModelVersionNotFoundException")
    assert reply.message == "Model version: 9.9 does not exist for model: echo"
    reply = server.request("GET", "/nowhere")
    assert (reply.status, reply.json["type"]) == (404, "ResourceNotFoundException")


def test_function_handlers_are_initialized_without_data(share):
    server = share("function.py")
    assert server.predict("function", {"a": 1}).body == b"function: {'a': 1}"


def test_named_function_is_the_entry_point(share):
    server = share("function.py", "--handler", "function:entry")
    assert server.predict("function", {}).body == b"entry"


def test_handler_without_torch_never_loads_it(share):
    server = share("torchless.py", "--workers", "2")
    assert server.predict("torchless", {}).json["torch"] is False


def test_async_handler_takes_many_requests_at_a_time(share):
    server = share("asynchronous.py")
    futures = server.at_once(lambda i: server.predict("asynchronous", {"crowd": 6, "i": i}), list(range(10)))
    answers = [future.result().json for future in futures]
    assert max(answer["most"] for answer in answers) > 5
    assert sorted(answer["i"] for answer in answers) == list(range(10))
    assert len({answer["id"] for answer in answers}) == 10


def test_failure_in_an_async_handler_fails_no_other_request(share):
    server = share("asynchronous.py")
    orders = [{"s": 0.2, "raise": i == 3, "i": i} for i in range(6)]
    replies = [future.result() for future in server.at_once(lambda o: server.predict("asynchronous", o), orders)]
    assert [reply.status for reply in replies] == [200, 200, 200, 503, 200, 200]


def test_jobs_that_arrive_together_leave_together(share):
    server = share("echo.py", "--batch-size", "8", "--max-batch-delay", "60000")
    futures = server.at_once(lambda i: server.predict("echo", i), list(range(8)))
    replies = [future.result().json for future in futures]
    assert [reply["row"]["body"] for reply in replies] == list(range(8))
    assert max(reply["batch"] for reply in replies) == 8


def test_one_bad_request_in_a_batch_fails_alone(share):
    server = share("echo.py", "--batch-size", "6", "--max-batch-delay", "60000")
    bodies = ["a", "b", "raise", "c", "d", "e"]
    replies = [future.result() for future in server.at_once(lambda body: server.predict("echo", body), bodies)]
    assert [reply.status for reply in replies] == [200, 200, 503, 200, 200, 200]
    assert [reply.json["row"]["body"] for reply in replies if reply.status == 200] == ["a", "b", "c", "d", "e"]
    assert "one of you said raise" in replies[2].cause


def test_large_bodies_arrive_whole_and_intact(share):
    server = share("echo.py", "--max-request-size", "30000000", "--max-response-size", "90000000")
    for size in (100_000, 300_000, 1 << 20, 10 << 20):
        body = bytes(range(256)) * (size // 256)
        reply = server.predict("echo", body, kind="application/octet-stream")
        assert reply.json["row"]["body"][1].encode("latin-1") == body


def test_tcp_workers_do_the_same(share):
    server = share("echo.py", "--worker-transport", "tcp")
    body = b"x" * 2_000_000
    assert server.predict("echo", body).json["row"]["body"][1] == body.decode()


def test_base_handler_serves_eager_and_torchscript_models(start, tmp_path):
    torch = pytest.importorskip("torch")
    from flambeau.archive.pack import Recipe, pack

    model_file = tmp_path / "net.py"
    model_file.write_text(
        "import torch\n\n\nclass Net(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.linear = torch.nn.Linear(3, 2)\n\n    def forward(self, x):\n        return self.linear(x)\n"
    )
    handler = tmp_path / "vectors.py"
    handler.write_text(
        "import torch\nfrom ts.torch_handler.base_handler import BaseHandler\n\n\nclass Vectors(BaseHandler):\n"
        "    def preprocess(self, data):\n        return torch.tensor([row['body'] for row in data])\n"
    )
    net = torch.nn.Linear(3, 2)
    torch.save({f"linear.{key}": value for key, value in net.state_dict().items()}, tmp_path / "net.pth")
    with pytest.warns(DeprecationWarning, match="torch.jit"):  # old files must still be served
        torch.jit.trace(net, torch.zeros(1, 3)).save(tmp_path / "net.pt")
    eager = Recipe(
        model_name="eager", handler=str(handler), model_file=model_file, serialized_file=tmp_path / "net.pth"
    )
    scripted = Recipe(model_name="scripted", handler=str(handler), serialized_file=tmp_path / "net.pt")
    server = start(pack(eager, tmp_path), pack(scripted, tmp_path, format="tgz")).wait_ready()
    expected = net(torch.tensor([[1.0, 2.0, 3.0]])).tolist()[0]
    assert server.predict("eager", [1.0, 2.0, 3.0]).json == pytest.approx(expected)
    assert server.predict("scripted", [1.0, 2.0, 3.0]).json == pytest.approx(expected)


KINDS_OF_RESULTS = """
def handle(data, context):
    kind = data[0]["body"] if data else ""
    if kind == "own":
        context.set_response_content_type(0, "application/vnd.api+json")
    results = {"object": {"a": 1}, "list": [1], "empty": {}, "text": "[text]", "bytes": b"[1, 2]"}
    results |= {"number": -1.5, "small": 1e-7, "true": True, "words": "12 monkeys"}
    return [results.get(kind, {"b": 2})]
"""


def test_json_results_have_their_content_type_and_others_have_none(start, tmp_path):
    (tmp_path / "kinds.py").write_text(KINDS_OF_RESULTS)
    server = start(tmp_path / "kinds.py").wait_ready()
    own = {"own": "application/vnd.api+json"}
    expected = own | dict.fromkeys(("object", "list", "empty", "number", "small", "true"), "application/json")
    expected |= dict.fromkeys(("text", "bytes", "words"))
    found = {kind: server.predict("kinds", kind).headers.get("content-type") for kind in expected}
    assert found == expected


def test_json_results_have_no_content_type_unless_the_server_names_it(configured, tmp_path):
    reply = configured(pack_handler(tmp_path, "echo")).predict("echo", {"a": 1})
    assert (reply.status, reply.headers.get("content-type")) == (200, None)
