"""The worked example of docs/scaling.md, and its settings."""

from __future__ import annotations

import json

import yaml

from flambeau.config.model import ModelConfig
from support.snippets import run, snippets

FILE = "docs/scaling.md"


def test_tensor_parallel_example_answers_as_written(start, tmp_path):
    folder = tmp_path / "product"
    folder.mkdir()
    [handler] = snippets(FILE, "python")
    (folder / "handler.py").write_text(handler)
    (folder / "model-config.yaml").write_text(snippets(FILE, "yaml")[-1])
    server = start(folder)
    server.start_timeout_s = 90
    server.wait_ready()
    [ask] = snippets(FILE, "sh")
    result = run(ask.replace("127.0.0.1:8080", f"127.0.0.1:{server.port}"), tmp_path)
    assert json.loads(result.stdout) == [80, 90, 100, 110]
    assert len(server.describe("product")["workers"][0]["ranks"]) == 2


def test_settings_of_the_page_are_known():
    sleepy, group, _ = (ModelConfig().with_options(yaml.safe_load(text)) for text in snippets(FILE, "yaml"))
    assert (sleepy.scales_to_zero, sleepy.idle_s, sleepy.max_workers) == (True, 600, 2)
    assert (group.parallel_type, group.parallel_level) == ("tp", 4)
