"""The pytest plugin, as it works for somebody who has installed the package."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HANDLER = """
class Doubler:
    def initialize(self, context):
        self.factor = context.model_yaml_config.get("factor", 2)

    def preprocess(self, data):
        return [row["body"]["x"] for row in data]

    def handle(self, data, context):
        return [{"answer": self.factor * x} for x in self.preprocess(data)]
"""


@pytest.fixture
def run_tests(tmp_path):
    """Run pytest on a test module, with warnings as errors and the plugin found by its entry point."""
    group = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["pytest11"]
    installed = tmp_path / "site" / "like_flambeau-1.dist-info"
    installed.mkdir(parents=True)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: like-flambeau\nVersion: 1\n")
    lines = [f"{name} = {target}" for name, target in group.items()]
    (installed / "entry_points.txt").write_text("\n".join(["[pytest11]", *lines, ""]))
    project = tmp_path / "project"
    project.mkdir()
    (project / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    (project / "doubler.py").write_text(HANDLER)
    path = os.pathsep.join([str(installed.parent), *filter(None, [os.environ.get("PYTHONPATH")])])

    def run_pytest(code, *options, cwd=project):
        (project / "test_it.py").write_text(code)
        command = [sys.executable, "-X", "dev", "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, project]
        env = {**os.environ, "PYTHONPATH": path}
        env.pop("PYTEST_ADDOPTS", None)
        return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=100)

    return run_pytest


SERVED = """
import os
from pathlib import Path
from urllib.request import urlopen

def test_served(model_server):
    server = model_server("doubler.py", batch_size=4, max_batch_delay=1)
    reply = server.predict("doubler", {"x": 21})
    assert (reply.status, reply.json) == (200, {"answer": 42})
    assert server.describe("doubler")["batchSize"] == 4
    for url in (server.url + "/ping", server.management_url + "/models"):
        with urlopen(url) as response:
            assert response.status == 200
    failed = server.predict("doubler", {})
    assert failed.status == 503
    assert "KeyError: 'x'" in failed.cause
    assert "Model server started." in server.log
    Path("pid").write_text(str(server.process.pid))

def test_it_was_stopped(model_server):
    try:
        os.kill(int(Path("pid").read_text()), 0)
    except ProcessLookupError:
        return
    raise AssertionError("it still runs")

def test_it_can_be_stopped(model_server):
    assert model_server("doubler.py", name="other").stop() == 0

def test_stages(handler_context):
    from doubler import Doubler
    context = handler_context(config={"factor": 3}, requests=[{"x": 1}, {"x": 2}])
    handler = Doubler()
    handler.initialize(context)
    assert handler.preprocess(context.rows) == [1, 2]
    assert handler.handle(context.rows, context) == [{"answer": 3}, {"answer": 6}]
"""


def test_fixtures_serve_and_call_a_handler(run_tests, tmp_path):
    result = run_tests(SERVED, cwd=tmp_path)  # the handler is found beside the test
    assert "4 passed" in result.stdout, result.stdout + result.stderr
    assert "ResourceWarning" not in result.stderr


def test_server_that_does_not_start_fails_the_test_with_its_log(run_tests, tmp_path):
    (tmp_path / "project" / "broken.py").write_text("import nonsense\n")
    code = """
def test_it(model_server):
    model_server("broken.py")

def test_gone(model_server):
    model_server("gone.py")
"""
    result = run_tests(code)
    assert "2 failed" in result.stdout
    assert "No module named 'nonsense'" in result.stdout
    assert "gone.py does not exist" in result.stdout
    assert "the model server is not ready" in result.stdout


def test_plugin_costs_nothing_until_it_is_used(run_tests):
    code = """
import sys

def test_it():
    loaded = {name for name in sys.modules if name.partition(".")[0] in ("flambeau", "torch", "msgspec")}
    assert loaded == {"flambeau", "flambeau.testing", "flambeau.testing.plugin"}
"""
    result = run_tests(code)
    assert "1 passed" in result.stdout, result.stdout
