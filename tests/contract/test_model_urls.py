"""Where a model may come from: the store, allowed URLs, allowed folders, and nowhere else."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import sys
import tarfile
import threading
from urllib.parse import quote

import pytest

from support.archives import pack_handler
from support.configured import problem
from support.file_server import redirect, serving_files
from support.torchserve import CommandServer, our_environment


@pytest.fixture
def store(tmp_path):
    folder = tmp_path / "store"
    folder.mkdir()
    return folder


@pytest.fixture
def web(tmp_path):
    with serving_files() as server:
        folder = tmp_path / "remote"
        folder.mkdir()
        server.files["/echo.mar"] = pack_handler(folder, "echo").read_bytes()
        yield server


NOT_FOUND = "ModelNotFoundException"


def test_urls_are_denied_unless_allowed(configured, store, web):
    server = configured(model_store=store)
    for url in (f"{web.url}/echo.mar", "https://example.com/x.mar", "file:///etc/passwd", "FILE:///etc/passwd"):
        text = f"Given URL {url} does not match any allowed URL(s)"
        assert problem(server.register(url)) == (404, NOT_FOUND, text)
        assert server.logged(url, "allowed_urls")
    assert web.asked == []
    assert os.listdir(store) == []


def test_allowed_url_is_downloaded_and_goes_with_its_model(configured, store, web):
    server = configured(model_store=store, allowed_urls=[rf"{web.url}/.*"], allow_private_urls=True)
    url = f"{web.url}/echo.mar"
    assert server.register(url.replace("http:", "HTTP:"), initial_workers=1).status == 200  # in any case
    assert server.predict("echo", {"a": 1}).status == 200
    assert server.describe("echo")["modelUrl"] == url.replace("http:", "HTTP:")
    assert os.listdir(store) == ["echo.mar"]
    taken = problem(server.register(url, model_name="again"))
    assert taken == (500, "InternalServerException", "Model file already exists echo.mar")
    assert server.register("echo.mar", model_name="by-name").status == 200
    assert server.manage("DELETE", "/models/echo").status == 200
    assert os.listdir(store) == []
    assert server.register(url, initial_workers=1).status == 200
    server.stop()
    assert os.listdir(store) == ["echo.mar"]  # the server ends, its models do not


def test_private_addresses_need_a_setting_of_their_own(configured, store, web):
    server = configured(model_store=store, allowed_urls=[".*"])
    for host in ("127.0.0.1", "localhost", "[::1]", "0.0.0.0", "[::ffff:127.0.0.1]", "127.1", "2130706433"):
        url = f"http://{host}:{web.server_port}/echo.mar"
        reply = server.register(url)
        text = f"Failed to download archive from: {url}"
        assert problem(reply) == (400, "DownloadArchiveException", text), host
    assert server.logged("127.0.0.1", "allow_private_urls")
    assert web.asked == []


def test_failed_download_leaves_no_trace(configured, store, web):
    server = configured(model_store=store, allowed_urls=[rf"{web.url}/.*"], allow_private_urls=True)
    web.files["/elsewhere.mar"] = redirect("http://169.254.169.254/latest/x.mar")
    web.files["/rubbish.mar"] = b"no archive"
    for name, cause in (("none.mar", "404"), ("elsewhere.mar", "matches no expression of allowed_urls")):
        reply = server.register(f"{web.url}/{name}")
        text = f"Failed to download archive from: {web.url}/{name}"
        assert problem(reply) == (400, "DownloadArchiveException", text)
        assert cause in reply.cause
    reply = server.register(f"{web.url}/rubbish.mar")
    assert problem(reply) == (400, "InvalidModelException", "Model name is not defined.")
    assert "neither a zip nor" in reply.cause
    assert os.listdir(store) == []


def test_registration_that_fails_later_takes_the_file_along(configured, store, web, tmp_path):
    server = configured(model_store=store, allowed_urls=[".*"], allow_private_urls=True)
    web.files["/broken.mar"] = pack_handler(tmp_path, "broken").read_bytes()
    url = f"{web.url}/broken.mar"
    assert server.register(url, initial_workers=1).status == 500
    assert os.listdir(store) == []
    assert server.register(url).status == 200  # no 409, no file in the way
    assert problem(server.register(f"{web.url}/echo.mar", model_name="broken"))[0] == 409
    assert sorted(os.listdir(store)) == ["broken.mar", "echo.mar"]  # a conflict keeps what was fetched


def test_server_answers_while_it_downloads(configured, store, web):
    begun, over = threading.Event(), threading.Event()
    content = web.files["/echo.mar"]

    def slow(handler):
        begun.set()
        over.wait(30)
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content)

    web.files["/slow.mar"] = slow
    server = configured(model_store=store, allowed_urls=[".*"], allow_private_urls=True)
    [registration] = server.at_once(server.register, [f"{web.url}/slow.mar"])
    assert begun.wait(20)
    assert server.request("GET", "/ping").status == 200
    assert server.manage("GET", "/models").json == {"models": []}
    over.set()
    assert registration.result().status == 200


def test_stopping_does_not_wait_for_a_download(configured, store, web):
    begun, over = threading.Event(), threading.Event()
    web.files["/endless.mar"] = lambda handler: (begun.set(), over.wait(60))
    server = configured(model_store=store, allowed_urls=[".*"], allow_private_urls=True, drain_timeout_s=0.2)
    server.at_once(lambda url: server.register(url), [f"{web.url}/endless.mar"])
    assert begun.wait(20)
    server.stop(timeout=15)
    over.set()
    assert os.listdir(store) == []


def test_file_urls_and_folders_outside_the_store(configured, store, tmp_path):
    outside, other = tmp_path / "outside", tmp_path / "other"
    for folder in (outside, other):
        folder.mkdir()
        pack_handler(folder, "echo")
        pack_handler(folder, "echo", name="served", format="no-archive")
    server = configured(model_store=store, allowed_urls=[f"file://{outside}/.*"])
    assert server.register(f"file://{outside}/echo.mar", initial_workers=1).status == 200
    assert server.predict("echo", {}).status == 200
    assert os.listdir(store) == ["echo.mar"]
    # A folder is served in place, by its path or as a URL.
    assert server.register(f"{outside}/served", initial_workers=1).status == 200
    assert server.predict("served", {}).status == 200
    assert server.register(f"file://{outside}/served", model_name="again").status == 200
    for name in ("served", "again"):
        assert server.manage("DELETE", f"/models/{name}").status == 200
    assert (outside / "served" / "MAR-INF").exists()
    # Elsewhere nothing is, whatever lies there.
    url = f"{other}/served"
    assert problem(server.register(url)) == (404, NOT_FOUND, f"Model not found at: {url}")
    assert server.logged(url, f"file://{url}", "allowed_urls")
    url = f"file://{other}/echo.mar"
    assert problem(server.register(url))[2] == f"Given URL {url} does not match any allowed URL(s)"
    pack_handler(other, "echo", file="hidden.mar")
    climbing = f"file://{outside}/%2e%2e/other/hidden.mar"
    assert problem(server.register(climbing)) == (404, NOT_FOUND, f"Relative path is not allowed in url: {climbing}")


def test_checks_come_in_torchserves_order(configured, store):
    server = configured(model_store=store, allowed_urls=["https?://.*"])
    assert problem(server.manage("POST", "/models")) == (400, "BadRequestException", "Parameter url is required.")
    assert problem(server.manage("POST", "/models?url=")) == (404, NOT_FOUND, "empty url")
    url = "http://127.0.0.1/../x.mar"
    assert problem(server.register(url)) == (404, NOT_FOUND, f"Relative path is not allowed in url: {url}")
    for url in ("s3://bucket/x.mar", "nothing.mar", "/", "a\0b", "x" * 5000, "ftp://h/x.mar"):
        assert problem(server.register(url)) == (404, NOT_FOUND, f"Model not found at: {url}")
    without = configured()
    assert problem(without.register("x.mar")) == (404, NOT_FOUND, "Model store has not been configured.")
    assert problem(without.register("")) == (404, NOT_FOUND, "Model store has not been configured.")
    assert "--model-store" in without.register("x.mar").json["cause"][0]


def test_archive_in_a_subfolder_is_found_by_its_name(configured, store):
    pack_handler(store, "echo")
    server = configured(model_store=store)
    assert server.register("some/folder/echo.mar").status == 200
    assert server.describe("echo")["modelUrl"] == "some/folder/echo.mar"


def test_archive_that_cannot_be_read_is_a_model_whose_workers_fail(configured, store):
    (store / "rubbish.mar").write_text("no archive")
    server = configured(model_store=store)
    assert problem(server.register("rubbish.mar")) == (400, "InvalidModelException", "Model name is not defined.")
    assert server.register("rubbish.mar", model_name="m").status == 200
    assert server.logged("rubbish.mar", level="ERROR")
    reply = server.register("rubbish.mar", model_name="n", initial_workers=1)
    assert problem(reply) == (500, "InternalServerException", "Failed to start workers for model n version: 1.0")
    assert "neither a zip nor" in reply.cause
    assert server.manage("GET", "/models/n").status == 404
    assert server.manage("DELETE", "/models/m").status == 200


@pytest.mark.parametrize("top", ["", "model/"])
def test_tar_with_and_without_a_top_folder(configured, store, tmp_path, top):
    folder = pack_handler(tmp_path, "echo", format="no-archive")
    with tarfile.open(store / "echo.tar.gz", "w:gz") as archive:
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                archive.add(path, f"{top}{path.relative_to(folder)}")
    server = configured(model_store=store)
    assert server.register("echo.tar.gz", initial_workers=1).status == 200
    assert server.predict("echo", {}).status == 200


def check_signature(handler, secret):
    """Verify a request as S3 does, from what came over the wire."""
    headers = {name.lower(): value for name, value in handler.headers.items()}
    pattern = r"AWS4-HMAC-SHA256 Credential=(\S+?)/(\S+), SignedHeaders=(\S+), Signature=(\S+)"
    match = re.fullmatch(pattern, headers["authorization"])
    assert match is not None
    _, scope, names, signature = match.groups()
    path, _, query = handler.path.partition("?")
    lines = [handler.command, quote(path, safe="/"), query]
    lines += [f"{name}:{headers[name]}" for name in names.split(";")]
    lines += ["", names, headers["x-amz-content-sha256"]]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    key = b"AWS4" + secret
    for part in scope.split("/"):
        key = hmac.new(key, part.encode(), "sha256").digest()
    text = "\n".join(["AWS4-HMAC-SHA256", headers["x-amz-date"], scope, digest])
    assert hmac.new(key, text.encode(), "sha256").hexdigest() == signature
    assert {"host", "x-amz-date", "x-amz-content-sha256"} <= set(names.split(";"))
    return scope.split("/")[1:]


def test_s3_downloads_are_signed_where_asked(configured, store, web):
    content = web.files["/echo.mar"]
    seen = []

    def bucket(handler):
        if "authorization" not in handler.headers:
            handler.send_error(403)
            return
        seen.append(check_signature(handler, b"secret"))
        handler.send_response(200)
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content)

    web.files["/bucket/signed.mar"] = bucket
    url = f"{web.url}/bucket/signed.mar"
    keys = {"AWS_ACCESS_KEY_ID": "AKID", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "eu-west-1"}
    server = configured(model_store=store, allowed_urls=[".*"], allow_private_urls=True, env=keys)
    assert problem(server.register(url))[0] == 400
    assert server.register(url, s3_sse_kms=True).status == 200
    assert seen == [["eu-west-1", "s3", "aws4_request"]]
    without = configured(model_store=store, allowed_urls=[".*"], allow_private_urls=True, env=dict.fromkeys(keys, ""))
    reply = without.register(f"{web.url}/bucket/other.mar", s3_sse_kms=True)
    assert "AWS_DEFAULT_REGION is not set" in reply.cause


def test_model_from_a_url_is_there_again_after_a_restart(store, web, tmp_path):
    lines = [f"load_models=mine={web.url}/echo.mar", f"allowed_urls={web.url}/.*", "allow_private_urls=true"]
    for number in range(2):
        command = [sys.executable, "-m", "flambeau.torchserve.command"]
        server = CommandServer(command, tmp_path / f"start-{number}", store, lines, our_environment(), models=None)
        try:
            server.wait_for_models(["mine"])
            assert server.predict("mine", {}).status == 200
        finally:
            server.stop()
    assert web.asked == ["/echo.mar"]  # it was fetched once
    assert os.listdir(store) == ["echo.mar"]


def test_pattern_that_is_no_expression_stops_the_start(configured, store):
    with pytest.raises(AssertionError, match="is not a regular expression"):
        configured(model_store=store, allowed_urls=["("])


def test_signature_of_a_url_is_never_shown(configured, store, web, tmp_path):
    server = configured(
        model_store=store, allowed_urls=[rf"{web.url}/.*"], allow_private_urls=True, log_folder=tmp_path / "logs"
    )
    signed = "/echo.mar?X-Amz-Expires=60&X-Amz-Signature=s3cret"
    web.files[signed] = web.files["/echo.mar"]
    url = web.url + signed
    assert server.manage("POST", f"/models?url={quote(url, safe='')}").status == 200
    told = url.replace("s3cret", "***")
    assert server.describe("echo")["modelUrl"] == told
    assert server.manage("GET", "/models").json["models"] == [{"modelName": "echo", "modelUrl": told}]
    server.stop()
    assert "X-Amz-Signature%3D***" in (tmp_path / "logs" / "access_log.log").read_text()
    for log in (tmp_path / "logs").iterdir():
        assert "s3cret" not in log.read_text(), log
