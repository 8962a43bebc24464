"""The paths that people try first: /, /docs, /openapi.json, /health and /metrics on the main port."""

from __future__ import annotations

import re

import pytest

from flambeau.config.server import Address, KeysConfig
from support.configured import ConfiguredServer
from support.running import HANDLERS, RunningServer, free_ports

BROWSER = {"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    running = RunningServer(tmp_path_factory.mktemp("pages") / "log", str(HANDLERS / "echo.py")).wait_ready()
    yield running
    running.stop()


def test_root_describes_the_server_to_programs(server):
    document = server.request("GET", "/").json
    assert document["name"] == "flambeau"
    assert document["models"] == [{"name": "echo", "version": "1.0", "ready": True}]
    links = document["links"]
    assert links["management"] == server.management_url
    assert links["metrics"] == f"http://127.0.0.1:{server.metrics_port}/metrics"
    for path in (links["docs"], links["openapi"], links["health"]):
        assert server.request("GET", path).status == 200
    assert server.manage("GET", "/").json["links"]["management"] == "/models"


def test_root_shows_browsers_a_page_and_keeps_its_description(server):
    page = server.request("GET", "/", headers=BROWSER)
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert 'href="/docs"' in page.text
    assert server.request("OPTIONS", "/").json["openapi"] == "3.0.1"
    assert server.request("POST", "/", b"x").status == 405
    assert server.request("HEAD", "/").body == b""


def test_pages_load_nothing_from_elsewhere_and_run_no_inline_code(server):
    for path in ("/", "/docs"):
        page = server.request("GET", path, headers=BROWSER)
        policy = page.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert not re.search(r"<script(?![^>]*src=)|<style| on\w+=| style=", page.text)
        for address in re.findall(r'(?:src|href)="([^"]*)"', page.text):
            if address == server.management_url:
                continue  # a link to the console
            assert address.startswith("/")
            assert server.request("GET", address).status == 200
    for file in ("/docs/docs.js", "/docs/docs.css"):
        content = server.request("GET", file)
        assert content.headers["x-content-type-options"] == "nosniff"
        assert not re.search(r"https?:|innerHTML|eval\(", content.text)


def test_browsers_find_an_icon(server):
    for request in (server.request, server.manage):
        icon = request("GET", "/favicon.ico")
        assert (icon.status, icon.headers["content-type"]) == (200, "image/svg+xml")
        for path in ("/", "/docs"):
            assert '<link rel="icon" href="/favicon.ico"' in request("GET", path, headers=BROWSER).text


def test_openapi_has_its_own_title_and_is_split_by_api(server):
    whole = server.request("GET", "/openapi.json").json
    assert whole["info"]["title"] == "Flambeau"
    assert [tag["name"] for tag in whole["tags"]] == ["inference", "openai", "kserve", "health"]
    assert "/metrics" not in whole["paths"]  # it is at another port
    tagged = [one["tags"][0] for methods in whole["paths"].values() for one in methods.values()]
    assert set(tagged) == {tag["name"] for tag in whole["tags"]}
    openai = server.request("GET", "/openapi.json?api=openai").json
    assert set(openai["paths"]) >= {"/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"}
    assert not any(path.startswith(("/predictions", "/models")) for path in openai["paths"])
    assert "/predictions/{model_name}" in server.request("GET", "/openapi.json?api=inference").json["paths"]
    assert "/models" in server.manage("GET", "/openapi.json?api=management").json["paths"]
    unknown = server.request("GET", "/openapi.json?api=soap")
    assert unknown.status == 400
    assert "inference, openai, kserve, health" in unknown.message


def test_health_is_readiness(server):
    assert server.request("GET", "/health").json == server.request("GET", "/readyz").json
    assert "There is no GET /metrics here" in server.request("GET", "/metrics").message
    assert server.request("GET", "/docs/other").status == 404


def test_metrics_are_on_the_main_port_when_their_port_is_the_same(tmp_path):
    [port] = free_ports(1)
    one = Address(port=port)
    addresses = {"inference": one, "management": one, "metrics": one}
    with ConfiguredServer(tmp_path, HANDLERS / "echo.py", pages=True, **addresses) as running:
        metrics = running.request("GET", "/metrics")
        assert (metrics.status, metrics.headers["content-type"][:10]) == (200, "text/plain")
        document = running.request("GET", "/").json
        assert (document["links"]["metrics"], document["links"]["management"]) == ("/metrics", "/models")
        tags = [tag["name"] for tag in running.request("GET", "/openapi.json").json["tags"]]
        assert tags == ["inference", "openai", "kserve", "management", "health", "metrics"]


def test_with_keys_pages_are_open_and_models_are_not(tmp_path):
    with ConfiguredServer(tmp_path, HANDLERS / "echo.py", pages=True, keys=KeysConfig(is_on=True)) as running:
        document = running.request("GET", "/").json
        assert "models" not in document
        assert "Authorization" in document["key"]
        assert running.request("GET", "/docs").status == 200
        assert running.request("GET", "/openapi.json").json["security"] == [{"key": []}]


def test_pages_of_other_sites_call_nothing_and_no_reply_becomes_a_page(server):
    crossing = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    [model] = [one["name"] for one in server.request("GET", "/").json["models"]][:1]
    for path in (
        f"/predictions/{model}?data=x",
        "/models",
        f"/models/{model}/invoke?data=x",
        "/v1/models",
        "/console/events",
    ):
        for port in (server.port, server.management_port):
            assert server.request("GET", path, headers=crossing, port=port).status == 403, path
    assert server.request("GET", "/", headers=crossing | BROWSER).status == 200  # a link to the page
    ours = server.request("GET", f"/predictions/{model}?data=x", headers={"Sec-Fetch-Site": "same-origin"})
    assert ours.status != 403
    assert ours.headers["x-content-type-options"] == "nosniff"
