from __future__ import annotations

import time

import pytest

from flambeau.config.model import read_options
from flambeau.errors import ConfigError


def test_options_are_a_mapping(tmp_path):
    file = tmp_path / "model-config.yaml"
    file.write_text("")
    assert read_options(file) == {}
    file.write_text("- a list")
    with pytest.raises(ConfigError, match=r"model-config\.yaml must hold a mapping"):
        read_options(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_options(tmp_path / "missing.yaml")


@pytest.mark.parametrize("text", ["a: " + "[" * 100_000, "- " * 100_000, "a: " + "{b: " * 1000])
def test_yaml_that_is_too_deep_is_rejected(tmp_path, text):
    file = tmp_path / "model-config.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match="nested more than 100 levels deep"):
        read_options(file)


def test_yaml_that_is_too_long_is_rejected(tmp_path):
    file = tmp_path / "model-config.yaml"
    file.write_text("# long\n" * 200_000)
    with pytest.raises(ConfigError, match="longer than 1 MiB"):
        read_options(file)


LEVELS = ["a0: &a0 {k: v}", *(f"a{i}: &a{i} {{<<: [{','.join([f'*a{i - 1}'] * 10)}]}}" for i in range(1, 8))]
WIDE = ["a: &a {" + ", ".join(f"k{i}: 1" for i in range(5000)) + "}", f"b: {{<<: [{','.join(['*a'] * 9000)}]}}"]
EXPENSIVE = pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("\n".join(LEVELS), "merge keys"),
        ("\n".join(WIDE), "merge keys"),
        (f"a: [{'[],' * 340_000}]", "more than 50000 values"),
        (f"a: 1{':1' * 400_000}", "more than 1000 digits"),
    ],
    ids=["levels", "wide", "list", "number"],
)


@EXPENSIVE
def test_yaml_that_takes_too_long_is_rejected(tmp_path, text, reason):
    file = tmp_path / "model-config.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=reason):
        read_options(file)


@pytest.mark.perf
@EXPENSIVE
def test_yaml_that_takes_too_long_is_rejected_within_2_s(tmp_path, text, reason):
    file = tmp_path / "model-config.yaml"
    file.write_text(text)
    began = time.process_time()
    with pytest.raises(ConfigError, match=reason):
        read_options(file)
    assert time.process_time() - began < 2


def test_merge_keys_and_long_lists_within_reason_are_read(tmp_path):
    file = tmp_path / "model-config.yaml"
    file.write_text(
        "a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\nhandler:\n" + "".join(f"  k{i}: {i}\n" for i in range(20_000))
    )
    options = read_options(file)
    assert options["b"] == {"x": 1, "y": 3}
    assert len(options["handler"]) == 20_000
