"""Envelopes around handlers, named by the model or by the server."""

from __future__ import annotations

import base64
import json
import subprocess
import sys

import pytest

from flambeau.archive.pack import Recipe, pack
from support.running import HANDLERS, RunningServer
from support.torchserve import CommandServer, our_environment

BATCH = "batchSize: 3\nmaxBatchDelay: 600000\n"  # only a full batch leaves before the client gives up


def pack_one(folder, name, handler, config, *extra):
    settings = folder / f"{name}.yaml"
    settings.write_text(config)
    recipe = Recipe(
        model_name=name,
        handler=str(HANDLERS / f"{handler}.py"),
        config_file=settings,
        extra_files=[HANDLERS / f"{file}.py" for file in extra],
    )
    return str(pack(recipe, folder))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    archives = [
        pack_one(folder, "json", "shares", "envelope: json\n"),
        pack_one(folder, "json_batched", "shares", f"envelope: json\n{BATCH}"),
        pack_one(folder, "json_async", "async_shares", "envelope: json\n"),
        pack_one(folder, "kserve_batched", "shares", f"envelope: kserve\n{BATCH}"),
        pack_one(folder, "v2", "names", "envelope: kservev2\n"),
        pack_one(folder, "v2_batched", "names", f"envelope: kservev2\n{BATCH}"),
        pack_one(folder, "body", "bare", "envelope: body\n"),
        pack_one(folder, "own", "bare", "envelope: xml_envelope\n", "xml_envelope"),
    ]
    running = RunningServer(folder / "log", *archives).wait_ready()
    yield running
    running.stop()


def as_batch(server, model, documents):
    replies = [future.result() for future in server.at_once(lambda body: server.predict(model, body), documents)]
    return replies


def test_json_instances_are_answered_as_compact_predictions(server):
    reply = server.predict("json", {"instances": [{"data": 1}, {"data": 2}]})
    assert reply.body == b'{"predictions": [[1, 2], [2, 2]]}'


def test_json_bodies_without_a_content_type_are_parsed(server):
    assert server.predict("json", b'{"instances": [{"data": 1}]}').json == {"predictions": [[1, 1]]}


def test_json_instances_of_a_batch_go_to_the_handler_together(server):
    documents = [{"instances": [{"data": i}] * (i + 1)} for i in range(3)]
    answers = [reply.json for reply in as_batch(server, "json_batched", documents)]
    assert answers == [{"predictions": [[i, 6]] * (i + 1)} for i in range(3)]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"[1]", "JSON object"),
        (b'{"inputs": []}', "'instances'"),
        (b'{"instances": 3}', "'instances'"),
        (b'{"instances": []}', "empty"),
        (b'{"instances": [{"b64": "?"}]}', "base64"),
        (b'{"instances": [{"b64": 3}]}', "base64"),
        (b"not json", "not JSON"),
        (b"", "empty"),
    ],
)
def test_bad_documents_are_refused_with_the_reason(server, body, reason):
    reply = server.predict("json", body)
    assert reply.status == 400, reply.body
    assert reason in reply.message


def test_bad_document_fails_alone_in_its_batch(server):
    good, bad, other = as_batch(
        server, "json_batched", [{"instances": [{"data": 1}]}, {}, {"instances": [{"data": 2}]}]
    )
    assert (good.json, other.json) == ({"predictions": [[1, 1]]}, {"predictions": [[2, 1]]})
    assert bad.status == 400


def test_async_handlers_overlap_inside_an_envelope(server):
    documents = [{"instances": [i] * (i + 1)} for i in range(6)]
    answers = [f.result().json for f in server.at_once(lambda body: server.predict("json_async", body), documents)]
    assert answers == [{"predictions": [i * 2] * (i + 1)} for i in range(6)]


def test_every_kserve_request_of_a_batch_is_answered(server):
    documents = [{"instances": [{"data": i}] * (i + 1)} for i in range(3)]
    answers = [reply.json for reply in as_batch(server, "kserve_batched", documents)]
    assert answers == [{"predictions": [[i, 6]] * (i + 1)} for i in range(3)]


def test_kserve_v2_tensors_come_back_under_their_names(server):
    document = {
        "id": "my-id",
        "inputs": [
            {"name": "matrix", "shape": [2, 2], "datatype": "FP32", "data": [1, 2, 3, 4.5]},
            {"name": "text", "shape": [1], "datatype": "BYTES", "data": ["ab"]},
        ],
    }
    assert server.predict("v2", document).json == {
        "id": "my-id",
        "model_name": "v2",
        "model_version": "1.0",
        "outputs": [
            {"name": "matrix", "datatype": "FP64", "data": [2.0, 4.0, 6.0, 9.0], "shape": [4]},
            {"name": "text", "datatype": "BYTES", "data": ["abab"], "shape": [1]},
        ],
    }


def test_every_kserve_v2_request_of_a_batch_is_answered(server):
    documents = [
        {"inputs": [{"name": f"{i}-{j}", "shape": [1], "datatype": "INT64", "data": [i]} for j in range(i + 1)]}
        for i in range(3)
    ]
    for i, reply in enumerate(as_batch(server, "v2_batched", documents)):
        outputs = [{"name": f"{i}-{j}", "datatype": "INT64", "data": [i * 2], "shape": [1]} for j in range(i + 1)]
        assert reply.json["outputs"] == outputs
        assert reply.json["id"] == reply.headers["x-request-id"]


def test_body_envelope_takes_the_body_out_of_the_row(server):
    assert server.predict("body", {"a": 1}).json == ["dict", {"a": 1}]
    assert server.predict("body", b"raw").json == ["bytearray", None]


def test_model_may_bring_an_envelope_of_its_own(server):
    assert server.predict("own", b"<a>hello</a>").body == b"<b>['str', 'hello']</b>"


def test_unknown_envelope_is_a_load_error_that_names_the_known_ones(start, tmp_path):
    archive = pack_one(tmp_path, "odd", "bare", "envelope: nosuch\n")
    failure = start(archive).wait_started().failure("odd")
    assert "'nosuch'" in failure
    assert "body, json, kserve, kservev2" in failure


def test_pipeline_and_envelope_do_not_go_together(start, tmp_path):
    failure = (
        start(pack_one(tmp_path, "both", "bare", "envelope: json\npipeline: true\n")).wait_started().failure("both")
    )
    assert "pipeline: true" in failure
    assert "envelope (json)" in failure


def test_config_properties_names_the_envelope_of_all_models_but_those_that_name_their_own(tmp_path):
    pack_one(tmp_path, "plain", "bare", "")
    pack_one(tmp_path, "other", "bare", "envelope: body\n")
    pack_one(tmp_path, "without", "bare", "envelope: none\n")
    command = [sys.executable, "-m", "flambeau.torchserve.command"]
    server = CommandServer(command, tmp_path / "server", tmp_path, ["service_envelope=json"], our_environment())
    try:
        server.wait_for_models(["plain", "other", "without"])
        encoded = base64.b64encode(b"x").decode()
        document = {"instances": [{"b64": encoded}, "text"]}
        assert server.predict("plain", document).json == {"predictions": [["bytes", None], ["str", "text"]]}
        assert server.predict("other", document).json == ["dict", document]
        assert server.predict("without", document).json == ["dict", {"body": document}]
    finally:
        assert server.stop() == 0


def test_run_in_this_process_knows_the_envelope_too(tmp_path):
    archive = pack_one(tmp_path, "json", "shares", "envelope: json\n")
    (tmp_path / "request.json").write_text(json.dumps({"instances": [{"data": 5}]}))
    command = [sys.executable, "-m", "flambeau.cli.main", "run", archive, "--input", str(tmp_path / "request.json")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert '{"predictions": [[5, 1]]}' in result.stdout, result.stderr
