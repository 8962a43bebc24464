"""The console in a real browser, on a real server whose workers are killed meanwhile."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest
from axe_core_python.selenium import Axe

from flambeau.config.server import KeysConfig
from support.archives import pack_handler
from support.browser import Browser, needs_browser
from support.running import HANDLERS, RunningServer

pytestmark = [pytest.mark.browser, pytest.mark.slow, needs_browser()]
SERIOUS = ("serious", "critical")
TALKATIVE = """
example = {"text": "hi"}

def handle(data, context):
    if data is None:
        print("<b>loaded</b>", flush=True)
        return None
    return [row["body"]["text"].upper() for row in data]
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("console")
    store = folder / "store"
    store.mkdir()
    pack_handler(store, "echo", name="second")
    (folder / "talkative.py").write_text(TALKATIVE)
    server = RunningServer(
        folder / "log", str(HANDLERS / "echo.py"), str(folder / "talkative.py"), "--model-store", str(store)
    )
    yield server.wait_ready()
    server.stop()


@pytest.fixture(scope="module")
def window():
    browser = Browser()
    yield browser
    browser.close()


@pytest.fixture
def browser(window, served):
    window.open(f"{served.management_url}/")
    assert window.sees("ready")
    yield window
    assert window.errors == []


def test_overview_shows_models_and_the_host(browser):
    assert browser.sees("echo")
    assert browser.sees("2 of 2")
    assert browser.sees("CPU")
    assert browser.evaluate("document.querySelectorAll('.models tbody tr').length") == 2


def test_requests_appear_in_the_charts(browser, served):
    for _ in range(20):
        assert served.predict("echo", b"hello").status == 200
    browser.wait(lambda: "M" in browser.find("svg.spark path.line").get_attribute("d"))
    browser.click("echo")
    assert browser.sees("Where the time goes")
    assert browser.sees("20 × 200")


def test_death_of_a_worker_is_told_soon(browser, served):
    [pid] = served.worker_pids("echo")
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    assert browser.sees("killed by SIGKILL")
    assert time.monotonic() - killed < 10  # about a second on a machine that has time for a browser
    browser.wait(lambda: served.worker_pids("echo") not in ([pid], []))
    browser.click("echo")
    assert browser.sees("Last failure")
    assert browser.sees("killed by SIGKILL")


def test_scaling_by_the_form(browser, served):
    browser.click("echo")
    browser.click("Scale")
    field = browser.find("#least")
    field.clear()
    field.send_keys("2")
    most = browser.find("#most")
    most.clear()
    most.send_keys("2")
    browser.find("dialog button.primary").click()
    browser.wait(lambda: len(served.worker_pids("echo")) == 2)
    browser.wait(lambda: browser.evaluate("document.querySelectorAll('.models tbody tr').length") == 2)


def test_model_is_registered_from_the_store_and_removed(browser, served):
    browser.click("Register a model")
    browser.find("#url").send_keys("no-such.mar")
    browser.find("dialog button.primary").click()
    browser.wait(lambda: "no-such.mar" in browser.find("dialog .problem").text)  # the cause, where the mistake was made
    field = browser.find("#url")
    field.clear()
    field.send_keys("second.mar")
    browser.find("dialog button.primary").click()
    browser.wait(lambda: not browser.evaluate("document.querySelector('dialog')"))
    browser.click("second")
    browser.click("Unregister")
    browser.find("dialog button.danger").click()
    browser.wait(lambda: served.manage("GET", "/models/second").status == 404)
    browser.wait(lambda: "second" not in browser.find(".models tbody").text)
    browser.driver.get_log("browser")  # the refused registration is in the browser's log


def test_playground_shows_the_answer_and_the_code(browser, served):
    browser.click("Playground")
    assert browser.sees("The answer appears here.")
    browser.open(f"{served.management_url}/#/play/echo/1.0")
    browser.click("Text")
    field = browser.find("#body")
    field.clear()
    field.send_keys("a few words")
    browser.click("Send")
    browser.wait(lambda: "a few words" in browser.find("section.card pre").text)
    assert browser.sees("--data-binary 'a few words'")


def test_output_of_a_worker_is_shown_as_text(browser):
    browser.click("talkative")
    assert browser.sees("<b>loaded</b>")


def test_form_begins_with_the_example_of_the_handler(browser, served):
    browser.open(f"{served.management_url}/#/play/talkative/1.0")
    browser.click("JSON")
    assert browser.find("#body").get_attribute("value") == '{"text": "hi"}'
    browser.click("Send")
    browser.wait(lambda: "HI" in browser.find("section.card pre").text)


def test_what_a_stopped_server_said_last_is_marked(window, start):
    server = start("echo.py").wait_ready()
    window.open(f"{server.management_url}/")
    assert window.sees("1 of 1")
    assert not window.evaluate("document.querySelector('main.stale')")
    server.process.kill()
    window.find("main.stale")
    window.driver.get_log("browser")


def test_page_is_small_quick_and_loads_nothing_from_elsewhere(browser, served):
    resources = browser.evaluate(
        "performance.getEntriesByType('resource').map(one => [one.name, one.encodedBodySize])"
        ".concat(performance.getEntriesByType('navigation').map(one => [one.name, one.encodedBodySize]))"
    )
    assert all(name.startswith(served.management_url) for name, _ in resources), resources
    assert sum(size for name, size in resources if "events" not in name) < 300_000


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("view", ["#/", "#/model/echo/1.0", "#/play/echo/1.0"])
def test_screen_readers_and_keyboards_can_use_it(browser, served, view, theme):
    browser.open(f"{served.management_url}/{view}")
    browser.evaluate(f"document.documentElement.dataset.theme = '{theme}'")
    assert browser.sees("echo")
    found = Axe().run(browser.driver)["violations"]
    assert [(one["id"], [node["html"] for node in one["nodes"]]) for one in found if one["impact"] in SERIOUS] == []


def test_phone_needs_no_sideways_scrolling(browser, served):
    browser.driver.set_window_size(500, 844)
    try:
        for view in ("#/", "#/model/echo/1.0", "#/play/echo/1.0"):
            browser.open(f"{served.management_url}/{view}")
            assert browser.sees("echo")
            width, inner = browser.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
            assert width <= inner, view
    finally:
        browser.driver.set_window_size(1280, 900)


def test_key_is_asked_for_and_a_wrong_one_is_told(window, configured, tmp_path):
    keys = tmp_path / "keys.json"
    server = configured(HANDLERS / "echo.py", keys=KeysConfig(is_on=True, file=keys), pages=True).wait_ready()
    window.open(f"{server.management_url}/")
    window.find("#key").send_keys("wrong")
    window.click("Continue")
    window.find("dialog .problem")
    window.find("#key").send_keys(json.loads(keys.read_text())["management"]["key"])
    window.click("Continue")
    assert window.sees("echo")
    assert window.sees("ready")
    window.driver.get_log("browser")
    window.evaluate("sessionStorage.clear()")
