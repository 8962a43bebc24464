"""OpenAI's own client uploads files and makes batches of them."""

from __future__ import annotations

import json

import pytest

from flambeau.config.server import KeysConfig
from flambeau.frontend.key_file import write_private
from support.archives import pack_handler
from support.configured import ConfiguredServer

openai = pytest.importorskip("openai")

RUNNING = ("in_progress", "finalizing", "cancelling")
CHAT = "/v1/chat/completions"


def script(*steps, **orders):
    return json.dumps({"steps": steps, **orders})


def line(custom_id, text, url=CHAT, **more):
    body = {"model": "scripted", "messages": [{"role": "user", "content": text}], **more}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": body})


def client_of(server, key="none"):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0, timeout=30)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("batches")


@pytest.fixture(scope="module")
def server(folder):
    model = pack_handler(folder, "scripted")
    with ConfiguredServer(folder, model, files_folder=folder / "files") as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with client_of(server) as made:
        yield made


def upload(client, *lines):
    return client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")


def begin(client, file):
    return client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"a": "b"})


def finished(server, client, batch):
    server.until(lambda: client.batches.retrieve(batch.id).status not in RUNNING, timeout=60)
    return client.batches.retrieve(batch.id)


def results(client, id):
    found = [json.loads(line) for line in client.files.content(id).text.splitlines()]
    return {result["custom_id"]: result["response"] for result in found}


def test_batch_answers_the_requests_of_a_file(server, client):
    file = upload(client, line("a", "one"), line("b", "two"), line("c", "refuse"))
    assert (file.purpose, file.filename) == ("batch", "in.jsonl")
    done = finished(server, client, begin(client, file))
    assert (done.status, done.metadata) == ("completed", {"a": "b"})
    assert (done.request_counts.total, done.request_counts.completed, done.request_counts.failed) == (3, 2, 1)
    found = results(client, done.output_file_id)
    texts = {name: reply["body"]["choices"][0]["message"]["content"] for name, reply in found.items()}
    assert texts == {"a": "one", "b": "two"}
    [refused] = results(client, done.error_file_id).values()
    assert (refused["status_code"], "5000 tokens" in refused["body"]["error"]["message"]) == (400, True)
    assert done.id in [batch.id for batch in client.batches.list()]


def test_files_are_listed_read_and_deleted(client):
    file = upload(client, line("a", "one"))
    assert file.id in [one.id for one in client.files.list(purpose="batch")]
    assert client.files.retrieve(file.id).bytes == file.bytes
    assert client.files.content(file.id).text == line("a", "one")
    assert client.files.delete(file.id).deleted
    with pytest.raises(openai.NotFoundError, match="no file"):
        client.files.retrieve(file.id)
    with pytest.raises(openai.BadRequestError, match="must be batch"):
        client.files.create(file=("a", b"a"), purpose="assistants")


def test_file_with_invalid_lines_fails_and_names_them(server, client):
    failed = finished(server, client, begin(client, upload(client, line("a", "one"), line("a", "two"))))
    assert (failed.status, failed.errors.data[0].line) == ("failed", 2)
    with pytest.raises(openai.BadRequestError, match="no file of yours"):
        client.batches.create(input_file_id="file-none", endpoint=CHAT, completion_window="24h")


def test_batch_can_be_cancelled(server, client):
    slow = script([[0, "a"]], [[0, "b", "stop"]], pause=0.2)
    batch = begin(client, upload(client, *(line(str(i), slow) for i in range(500))))
    server.until(lambda: client.batches.retrieve(batch.id).request_counts.completed > 0)
    client.batches.cancel(batch.id)
    done = finished(server, client, batch)
    assert done.status == "cancelled"
    assert len(results(client, done.output_file_id)) == done.request_counts.completed < 500
    with pytest.raises(openai.BadRequestError, match="cancelled already"):
        client.batches.cancel(batch.id)


def test_batch_goes_on_after_a_server_was_killed(tmp_path):
    model = pack_handler(tmp_path, "scripted", config="places: 4\n")
    slow = script([[0, "a"]], [[0, "b", "stop"]], pause=0.05)
    with ConfiguredServer(tmp_path, model, files_folder=tmp_path / "files") as server, client_of(server) as client:
        batch = begin(client, upload(client, *(line(str(i), slow) for i in range(60))))
        server.until(lambda: client.batches.retrieve(batch.id).request_counts.completed >= 4)
        server.process.kill()
        server.process.wait()
    with ConfiguredServer(tmp_path, model, files_folder=tmp_path / "files") as server, client_of(server) as client:
        done = finished(server, client, batch)
        assert (done.status, done.request_counts.completed) == ("completed", 60)
        assert {*results(client, done.output_file_id)} == {str(i) for i in range(60)}
        assert len(client.files.content(done.output_file_id).text.splitlines()) == 60


def test_batch_belongs_to_a_key_and_ends_with_it(tmp_path):
    model = pack_handler(tmp_path, "scripted")
    file = tmp_path / "key_file.json"
    names = {"management": "m", "inference": "i", "API": "a"}
    own = {name: {"key": letter * 40} for name, letter in names.items()}
    users = {name: {"key": name[0] * 40, "api": "inference"} for name in ("ursula", "victor")}
    file.touch(0o600)
    file.write_text(json.dumps({**own, **users}))
    slow = script([[0, "a"]], [[0, "b", "stop"]], pause=0.1)
    settings = {"keys": KeysConfig(is_on=True, file=file), "files_folder": tmp_path / "files"}
    with ConfiguredServer(tmp_path, model, **settings) as server:
        ursula, victor = (client_of(server, letter * 40) for letter in "uv")
        batch = begin(ursula, upload(ursula, *(line(str(i), slow) for i in range(500))))
        assert [*victor.batches.list()] == [*victor.files.list()] == []
        with pytest.raises(openai.NotFoundError):
            victor.batches.retrieve(batch.id)
        server.until(lambda: ursula.batches.retrieve(batch.id).request_counts.completed > 0)
        write_private(file, {**own, "victor": users["victor"]})
        record = tmp_path / "files" / f"{batch.id}.json"
        server.until(lambda: json.loads(record.read_bytes())["status"] == "failed", timeout=60)
        assert "ursula" in json.loads(record.read_bytes())["errors"][0]["message"]


def test_server_without_a_folder_names_the_remedy(tmp_path):
    with ConfiguredServer(tmp_path) as server, client_of(server) as client:
        for call in (client.files.list, client.batches.list):
            with pytest.raises(openai.BadRequestError, match="--files-folder"):
                call()


def test_description_has_the_methods_of_every_path(server):
    """What a path answers to a method that it does not know is what it does know."""
    described = server.request("OPTIONS", "/").json["paths"]
    paths = [path for path in described if path.startswith(("/v1/", "/tokenize", "/detokenize")) and ":" not in path]
    assert {"/v1/batches/{batch_id}/cancel", "/v1/responses/{response_id}/input_items"} < {*paths}
    for path in paths:
        reply = server.request("PATCH", path)
        assert reply.status == 405, path
        allowed = {method.strip().lower() for method in reply.headers["allow"].split(",")} - {"head", "options"}
        assert {*described[path]} == allowed, path
