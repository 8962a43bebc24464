"""docs/configuration.md shows the table of settings as it is, and its example is valid."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from flambeau.config.resolution import resolve, to_server_config
from flambeau.config.settings import ENGINE_SETTINGS, SERVE

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "scripts"))
from settings_table import renamed_keys, rows  # noqa: E402

PAGE = (ROOT / "docs" / "configuration.md").read_text()
REMEDY = "run scripts/settings_table.py and paste its output"


def part(begin, end):
    return PAGE[PAGE.index(f"\n## {begin}\n") : PAGE.index(f"\n## {end}\n")]


@pytest.mark.parametrize(
    ("begin", "end", "table"),
    [
        ("Settings", "Settings of llm serve", SERVE),
        ("Settings of llm serve", "Variables of the commands", ENGINE_SETTINGS),
    ],
)
def test_page_has_every_setting_with_its_default(begin, end, table):
    shown = part(begin, end)
    assert "\n".join(rows(table)).strip() in shown, REMEDY


def test_page_names_the_setting_of_each_renamed_key():
    shown = re.findall(
        r"^\| `(\w+)` \| `(\w+)` \|$", part("From config.properties", "Configuration file"), re.MULTILINE
    )
    assert dict(shown) == renamed_keys(), REMEDY


def test_example_of_the_page_is_read(tmp_path):
    [example] = re.findall(r"```yaml\n(# flambeau.yaml\n.*?)```", PAGE, re.DOTALL)
    file = tmp_path / "flambeau.yaml"
    file.write_text(example)
    settings = resolve(SERVE, flags={}, environment={}, file=file)
    config = to_server_config(settings, SERVE)
    assert (config.inference.is_tls, config.max_request_bytes) == (True, 10_000_000)
    cats, dogs = settings["models"]
    assert (cats.settings, dogs.settings) == ({}, {"name": "dogs", "workers": 2, "batch_size": 8})
    assert config.public


def test_error_on_the_page_is_the_one_that_is_printed(tmp_path, monkeypatch):
    [message] = re.findall(r"```text\nflambeau: (flambeau.yaml, line 9: .*)\n```", PAGE)
    monkeypatch.chdir(tmp_path)
    Path("flambeau.yaml").write_text("\n" * 8 + "max_request_sise: 1\n")
    with pytest.raises(Exception, match=re.escape(message)):
        resolve(SERVE, flags={}, environment={}, file=Path("flambeau.yaml"))
