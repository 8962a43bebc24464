"""The console in a real browser, on a real server whose workers are killed meanwhile."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest
from axe_core_python.selenium import Axe
from selenium.webdriver.common.keys import Keys

import flambeau.examples
from flambeau.config.server import KeysConfig
from support.archives import pack_handler
from support.browser import Browser, needs_browser
from support.pictures import jpeg
from support.running import HANDLERS, RunningServer

pytestmark = [pytest.mark.browser, pytest.mark.slow, needs_browser()]
SERIOUS = ("serious", "critical")
CHAT = os.path.join(*flambeau.examples.__path__, "storyteller")
FAILURES = "document.querySelector('[aria-label=Failures]').innerText"
SMALL_PIECES = """window.sent = window.fetch, window.fetch = async (path, ...more) => {
  const answer = await sent(path, ...more);
  return path === "/console/store" ? Response.json({ ...await answer.json(), pieceBytes: 300 }) : answer;
}"""
COLORS = """(() => {
  const canvas = document.querySelector('canvas.mask');
  const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
  const colors = new Set();
  for (let i = 0; i < pixels.length; i += 4) colors.add(pixels.slice(i, i + 4).join());
  return [...colors];
})()"""
SERVED = ("echo", "three_stages", "opinions", "boxes", "letters")
VIEWS = ("#/", "#/model/echo/1.0", "#/model/storyteller/1.0", "#/play/opinions/1.0", "#/play/storyteller/1.0")


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("store")
    pack_handler(folder, "echo", name="second", version="2.0", file="second-2.mar")
    pack_handler(folder, "echo", name="second")
    pack_handler(folder, "slow_start", name="tardy")
    return folder


@pytest.fixture(scope="module")
def served(tmp_path_factory, store):
    folder = tmp_path_factory.mktemp("console")
    models = [CHAT, *(str(HANDLERS / f"{name}.py") for name in SERVED)]
    options = ["--model-store", str(store), "--allow-uploads", "--response-timeout", "77"]
    server = RunningServer(folder / "log", *models, *options, env={"SLOW_START_UNTIL": str(folder / "go")})
    server.go = folder / "go"  # the file that ends the loading of `tardy`
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


def play(browser, served, model):
    browser.open(f"{served.management_url}/#/play/{model}/1.0")
    browser.find("[role=tab]")


def row_of(browser, setting):
    """The value and the origin of a setting on the page of a model."""
    path = f"//tr[th='{setting}']"
    return browser.wait(lambda: [cell.text for cell in browser.find_all(f"{path}/td")] or None)


@pytest.fixture
def added(served, store):
    """Register a model for one test: its name, and the function that packs it into the store."""
    names = []

    def add(name, pack):
        pack(store)
        names.append(name)
        query = f"url={name}.mar&initial_workers=1&synchronous=true"
        reply = served.request("POST", f"/models?{query}", port=served.management_port, timeout=100)
        assert reply.status == 200, reply.text

    yield add
    for name in names:
        served.request("DELETE", f"/models/{name}", port=served.management_port)
        for file in store.glob(f"{name}.*"):
            file.unlink()


# ---- overview ----


def test_overview_shows_models_and_the_host(browser):
    assert browser.sees("three_stages")
    assert browser.sees("6 of 6")
    assert browser.sees("for this server")
    assert browser.evaluate("document.querySelectorAll('.models tbody tr').length") == 6


def test_requests_appear_in_the_sparklines_and_on_the_page_of_the_model(browser, served):
    for _ in range(20):
        assert served.predict("echo", b"hello").status == 200
    browser.wait(lambda: "M" in browser.find("svg.spark:not(.flat) path.line").get_attribute("d"))
    browser.click("echo")
    assert browser.sees("20 × 200")


def test_page_that_is_opened_later_shows_what_was_before(window, served):
    assert served.predict("opinions", b"hello").status == 200
    window.open("about:blank")
    window.open(f"{served.management_url}/#/model/opinions/1.0")
    window.wait(lambda: "answers" in window.find("svg.chart").get_attribute("aria-label"))
    history = window.evaluate("document.querySelector('svg.chart path.line').getAttribute('d').split('L').length")
    assert history > 2


def test_death_of_a_worker_is_shown_within_two_seconds(browser, served):
    took = []
    while not took or (min(took) > 2 and len(took) < 3):  # a busy machine may be late once, not always
        browser.wait(lambda: len(served.worker_pids("echo")) == 1)
        failures = browser.evaluate(FAILURES)
        [pid] = served.worker_pids("echo")
        os.kill(pid, signal.SIGKILL)
        killed = time.monotonic()
        browser.wait_other(FAILURES, failures)
        took.append(time.monotonic() - killed)
    assert min(took) < 2
    browser.wait(lambda: served.worker_pids("echo") not in ([pid], []))
    browser.click("echo")
    assert browser.sees("Last failure")
    assert browser.sees("killed by SIGKILL")


def test_slow_worker_is_called_slow_and_a_hung_one_is_shown_with_its_place(browser, served, added):
    config = "minWorkers: 1\nmaxWorkers: 1\nhangTimeoutInSec: 2\n"
    added("hanging", lambda store: pack_handler(store, "hanging", config=config))
    browser.click("hanging")
    [slow] = served.at_once(lambda order: served.predict("hanging", order), [{"do": "sleep", "s": 5}])
    assert browser.sees("slow: no progress for")
    assert slow.result().status == 200
    browser.wait(lambda: "slow: no progress" not in browser.text)
    assert "it hung" not in browser.text
    [hung] = served.at_once(lambda order: served.predict("hanging", order, timeout=100), [{"do": "lock"}])
    browser.wait(lambda: "for a lock that no other thread of it can release" in browser.evaluate(FAILURES))
    assert "obey" in browser.evaluate(FAILURES)
    assert hung.result().status == 500
    browser.wait(lambda: browser.sees("ready") and len(served.worker_pids("hanging")) == 1)


def test_loading_model_shows_for_how_long_and_then_that_it_is_ready(browser, served):
    served.manage("POST", "/models?url=tardy.mar&initial_workers=1&synchronous=false")
    assert browser.sees("Loading")
    browser.wait(lambda: "for " in browser.find(".row-head").text)
    browser.open(f"{served.management_url}/#/play/tardy/1.0")
    assert browser.sees("tardy is loading.")
    served.go.touch()
    browser.find("[role=tab]")
    browser.open(f"{served.management_url}/#/")
    browser.wait(lambda: browser.sees("ready") and not browser.evaluate("document.querySelector('.row-head')"))
    browser.click("tardy")
    browser.wait(lambda: browser.find(".head .pill").text == "ready")
    assert served.manage("DELETE", "/models/tardy").status == 200
    assert browser.sees("tardy 1.0 is not registered.")


def test_what_a_stopped_server_said_last_is_marked(window, start):
    server = start("echo.py").wait_ready()
    window.open(f"{server.management_url}/")
    assert window.sees("1 of 1")
    assert not window.evaluate("document.querySelector('main.stale')")
    server.process.kill()
    window.find("main.stale")
    window.driver.get_log("browser")


# ---- a model ----


def test_parts_of_the_time_of_a_request_are_shown(browser, served):
    browser.open(f"{served.management_url}/#/model/three_stages/1.0")
    assert served.predict("three_stages", {"x": 4}).status == 200
    chart = browser.find(".span svg.chart")
    inference = browser.wait(lambda: re.search(r"inference (\d+)", chart.get_attribute("aria-label")))
    assert int(inference[1]) >= 10  # milliseconds that it sleeps
    assert all(part in chart.get_attribute("aria-label") for part in ("queue", "batch wait", "transfer", "postprocess"))
    assert browser.sees("Slowest requests of the last hour")
    assert "inference" in browser.find("[aria-label='Slowest requests'] .legend").text


def test_charts_are_read_with_the_keyboard(browser, served):
    browser.open(f"{served.management_url}/#/model/echo/1.0")
    chart = browser.find("svg.chart")
    chart.send_keys(Keys.ARROW_LEFT, Keys.ARROW_LEFT)
    assert browser.sees("s ago")
    assert browser.evaluate("document.querySelectorAll('.cursor').length") == 1


def test_each_setting_shows_where_its_value_came_from(browser, served):
    browser.open(f"{served.management_url}/#/model/storyteller/1.0")
    assert row_of(browser, "responseTimeout") == ["77 s", "--response-timeout"]
    assert row_of(browser, "minWorkers") == ["1", "model-config.yaml"]
    assert row_of(browser, "jobQueueSize") == ["100", "default"]
    assert row_of(browser, "handler.speculate_k") == ["3", "model-config.yaml"]


def test_output_of_a_worker_is_shown_as_text(browser):
    browser.click("boxes")
    assert browser.sees("<b>loaded</b>")


def test_scaling_by_the_form(browser, served):
    browser.click("echo")
    browser.click("Scale")
    for id in ("#least", "#most"):
        field = browser.find(id)
        field.clear()
        field.send_keys("2")
    browser.find("dialog button.primary").click()
    browser.wait(lambda: len(served.worker_pids("echo")) == 2)
    browser.wait(lambda: len(browser.find_all("//*[@aria-label='Table of workers']//tbody/tr")) == 2)
    browser.wait(lambda: row_of(browser, "maxWorkers") == ["2", "scaled"])
    served.manage("PUT", "/models/echo?min_worker=1&max_worker=1")


# ---- register and remove ----


def test_model_is_registered_from_the_store_made_default_and_removed(browser, served):
    for archive in ("second.mar", "second-2.mar"):
        browser.click("Register a model")
        browser.find(f"dialog input[value='{archive}']").click()
        browser.find("dialog button.primary").click()
        browser.wait(lambda: not browser.evaluate("document.querySelector('dialog')"))
    browser.open(f"{served.management_url}/#/model/second/2.0")
    browser.click("Share requests")
    share = browser.find("#percent")
    share.clear()
    share.send_keys("25")
    browser.find("#mirror").clear()
    browser.find("#mirror").send_keys("100")
    browser.find("dialog button.primary").click()
    assert browser.sees("25 % of requests")
    assert browser.sees("copies of 100 %")
    assert browser.sees("Gets copies of 100 % of the default version's requests")
    browser.click("Make default")
    assert browser.sees("default version")
    assert json.loads(served.manage("GET", "/models/second").body)[0]["modelVersion"] == "2.0"
    browser.open(f"{served.management_url}/#/model/second/1.0")
    browser.click("Unregister")
    browser.click("Cancel")
    assert served.manage("GET", "/models/second/1.0").status == 200
    browser.click("Unregister")
    browser.find("dialog button.danger").click()
    browser.wait(lambda: served.manage("GET", "/models/second/1.0").status == 404)
    assert served.manage("DELETE", "/models/second/2.0").status == 200
    browser.wait(lambda: "second" not in browser.find(".models tbody").text)


def test_mistake_in_a_registration_is_shown_where_it_was_made(browser):
    browser.click("Register a model")
    browser.click("URL")
    browser.find("#url").send_keys("no-such.mar", Keys.ENTER)
    browser.wait(lambda: "no-such.mar" in browser.find("dialog .problem").text)
    browser.find("#url").send_keys(Keys.ESCAPE)
    browser.wait(lambda: not browser.evaluate("document.querySelector('dialog')"))
    browser.driver.get_log("browser")  # the refused registration is in the browser's log


def test_archive_is_uploaded_in_pieces_and_registered(browser, served, store, tmp_path):
    archive = pack_handler(tmp_path, "echo", name="sent")
    browser.evaluate(f"({SMALL_PIECES}, 0)")
    browser.click("Register a model")
    browser.click("Upload")
    browser.find("#archive").send_keys(str(archive))
    browser.find("dialog button.primary").click()
    browser.wait(lambda: not browser.evaluate("document.querySelector('dialog')"))
    assert (store / archive.name).read_bytes() == archive.read_bytes()
    assert browser.sees("sent")
    assert served.manage("DELETE", "/models/sent").status == 200


def test_server_accepts_no_uploads_unless_that_is_set(start, tmp_path):
    store = tmp_path / "store"
    store.mkdir()
    server = start("echo.py", "--model-store", str(store)).wait_ready()
    answer = server.manage("PUT", "/console/uploads/a.mar?offset=0&size=1", b"x")
    assert (answer.status, "--allow-uploads" in answer.text) == (405, True)
    assert [*store.iterdir()] == []


# ---- playground ----


def test_text_gets_bars_and_code_that_runs(browser, served):
    play(browser, served, "opinions")
    field = browser.find("#body-Text")
    assert field.get_attribute("value") == "What a lovely day."  # the handler's example
    browser.click("Send")
    browser.wait(lambda: "75.0 %" in browser.find(".bars").text)
    assert "0.75" in run_shell(browser.find(".snippet pre").text)
    browser.click("Python")
    assert "0.75" in run_python(browser.find(".snippet pre").text)


def test_json_and_errors_are_shown(browser, served):
    play(browser, served, "three_stages")
    field = browser.find("#body-JSON")
    field.clear()
    field.send_keys('{"x": 21}')
    browser.click("Send")
    browser.wait(lambda: "42" in browser.find("section.card pre").text)
    browser.click("Python")
    assert "42" in run_python(browser.find(".snippet pre").text)
    field.clear()
    field.send_keys("{}")
    browser.click("Send")
    assert browser.find("section.card .problem").text.startswith("503: Prediction failed: KeyError: 'x'")
    assert "Traceback" in browser.find("section.card pre").text  # with its columns
    browser.click("curl")
    assert "--data-binary '{}'" in browser.find(".snippet pre").text  # the request that failed
    browser.driver.get_log("browser")


def test_objects_are_drawn_over_the_image(browser, served, tmp_path):
    (tmp_path / "two.jpg").write_bytes(jpeg())
    play(browser, served, "boxes")
    browser.find("#image").send_keys(str(tmp_path / "two.jpg"))
    browser.find(".picture rect.box")
    assert browser.evaluate("document.querySelectorAll('.picture rect.box').length") == 2
    assert browser.evaluate("document.querySelectorAll('.picture canvas.mask').length") == 1
    assert "cat 90.0 %" in browser.text


def test_classes_of_pixels_are_drawn_over_the_image(browser, served, added, tmp_path):
    pack_network = pytest.importorskip("support.packing").pack_network
    (tmp_path / "photo.jpg").write_bytes(jpeg())
    added("segmenter", lambda store: pack_network(store, "segmenter", "image_segmenter", "tiny_segmenter"))
    play(browser, served, "segmenter")
    browser.find("#image").send_keys(str(tmp_path / "photo.jpg"))
    browser.find(".picture.square canvas.mask")
    size = "(() => { const c = document.querySelector('canvas.mask'); return [c.width, c.height] })()"
    assert browser.evaluate(size) == [224, 224]
    colors = browser.evaluate(COLORS)
    assert len(colors) > 2  # of the classes in the mask; class 0 is not colored
    legend = browser.evaluate("[...document.querySelectorAll('.legend li')].map((one) => one.innerText.trim())")
    classes = [one for one in legend if one.startswith("class ")]
    assert {*classes} <= {"class 1", "class 2", "class 3"}
    assert len(classes) == len([color for color in colors if color != "0,0,0,0"])
    check_accessible(browser)


def test_similar_texts_are_darker(browser, served):
    play(browser, served, "letters")
    browser.click("Compare")
    browser.wait(lambda: browser.evaluate("document.querySelectorAll('.heat tbody td').length") == 16)
    assert browser.evaluate("document.querySelector('.heat tbody td').textContent") == "1.00"
    for theme in ("light", "dark"):
        browser.evaluate(f"(document.documentElement.dataset.theme = '{theme}', 0)")
        check_accessible(browser)
    assert '"embedding"' in run_shell(browser.find(".snippet pre").text)


def test_chat_streams_and_colors_tokens(browser, served):
    play(browser, served, "storyteller")
    browser.find("#probabilities").click()
    browser.find("#seed").send_keys("7")
    browser.evaluate("(document.querySelector('#length').value = 12, 0)")
    browser.find("#prompt").send_keys("Good morrow.", Keys.ENTER)
    browser.wait(lambda: "tokens/s" in browser.find(".turn.assistant small").text)
    assert browser.evaluate("document.querySelectorAll('.turn.assistant .token').length") > 3
    tokens = browser.find_all("//*[contains(@class, 'assistant')]/*[contains(@class, 'token')]")
    said = "".join(str(one.get_attribute("textContent")) for one in tokens)
    for kind in ("OpenAI", "Python"):  # the same seed gives the same text
        browser.click(kind)
        assert run_python(browser.find(".snippet pre").text).strip() == said.strip()


def test_text_of_a_chat_that_fails_is_shown(browser, served):
    play(browser, served, "storyteller")
    browser.evaluate("(document.querySelector('#prompt').value = 'a '.repeat(3000), 0)")
    browser.find("#prompt").send_keys(Keys.ENTER)
    browser.wait(lambda: browser.find(".talk .problem").text)
    browser.driver.get_log("browser")


def run_python(program):
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout


def run_shell(command):
    return subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True).stdout


# ---- everybody ----


def test_page_is_small_quick_and_loads_nothing_from_elsewhere(window, served):
    paints = [1000.0]
    while min(paints) > 500 and len(paints) < 8:  # the quickest: a busy machine is slow now and then
        window.open(f"{served.management_url}/")
        window.find(".models tbody tr")
        paints.append(window.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime"))
    assert min(paints) < 500
    resources = window.evaluate(
        "performance.getEntriesByType('resource').map(one => [one.name, one.encodedBodySize])"
        ".concat(performance.getEntriesByType('navigation').map(one => [one.name, one.encodedBodySize]))"
    )
    assert all(name.startswith(served.management_url) for name, _ in resources), resources
    assert sum(size for name, size in resources if "events" not in name) < 300_000
    assert window.errors == []


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("view", VIEWS)
def test_screen_readers_and_keyboards_can_use_it(browser, served, view, theme):
    browser.open(f"{served.management_url}/{view}")
    browser.evaluate(f"(document.documentElement.dataset.theme = '{theme}', 0)")
    browser.find("main h1")
    browser.find("main .card")
    check_accessible(browser)


def test_dialogs_can_be_used_with_a_screen_reader(browser):
    browser.click("Register a model")
    check_accessible(browser)
    browser.click("Upload")
    check_accessible(browser)
    browser.click("Cancel")


def check_accessible(browser):
    found = Axe().run(browser.driver)["violations"]
    assert [(one["id"], [node["html"] for node in one["nodes"]]) for one in found if one["impact"] in SERIOUS] == []


def test_focus_follows_the_keyboard(browser, served):
    browser.press(Keys.TAB, Keys.ENTER)  # the first link skips the bar
    assert browser.evaluate("document.activeElement.id") == "main"
    assert browser.evaluate("location.hash") in ("", "#/")
    play(browser, served, "opinions")
    browser.find("[role=tab][aria-selected=true]").send_keys(Keys.ARROW_RIGHT)
    assert browser.evaluate("document.activeElement.textContent") == "JSON"
    browser.find("#body-JSON")


def test_choice_of_dark_or_light_is_kept(browser, served):
    before = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    browser.find("#theme").click()
    browser.open(f"{served.management_url}/")
    browser.find("main .card")
    assert browser.evaluate("getComputedStyle(document.body).backgroundColor") != before
    browser.evaluate("localStorage.clear()")


def test_phone_needs_no_sideways_scrolling(browser, served):
    with browser.width(390):
        for view in VIEWS:
            browser.open(f"{served.management_url}/{view}")
            browser.find("main .card")
            width, inner = browser.evaluate("[document.documentElement.scrollWidth, window.innerWidth]")
            assert width <= inner == 390, view


def test_long_state_of_the_server_needs_no_sideways_scrolling(browser, served):
    for pixels in (390, 320):
        with browser.width(pixels):
            browser.open(f"{served.management_url}/")
            browser.find("main .card")
            browser.evaluate("document.getElementById('connection').textContent = '12 of 14 failed'")
            assert browser.evaluate("window.innerWidth") == pixels


def test_inference_address_points_to_the_console(window, served):
    window.open(served.url)
    window.click("The console")
    assert window.sees("Models ready")
    window.driver.get_log("browser")


def test_key_is_requested_and_a_wrong_one_is_named(window, configured, tmp_path):
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
    keys.write_text(json.dumps({**json.loads(keys.read_text()), "management": {"key": "another"}}))
    window.find("#key")  # a key that was revoked ends the stream, too
    window.driver.get_log("browser")
    window.evaluate("sessionStorage.clear()")
