from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flambeau.config.model import read_options
from flambeau.config.yaml_file import load_yaml
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


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"!!timestamp x", "a value is not a valid timestamp (line 1, column 1)"),
        (b"a: 1\nb: !!timestamp x", "a value is not a valid timestamp (line 2, column 4)"),
        (b"a: !!bool x", "a value is not a valid bool (line 1, column 4)"),
        (b"a: !!int x", "a value is not a valid int (line 1, column 4)"),
        (b"a: 2001-99-99", "a value is not a valid timestamp (line 1, column 4)"),
        (b"a: [1,", "did not find expected node content (line 2, column 1)"),
        (b"a: !!python/object:os.system x", "(line 1, column 4)"),
        (b"\xff\xff", "is not valid YAML"),
    ],
)
def test_place_of_an_error_is_named_in_one_line(content, reason):
    with pytest.raises(ConfigError) as error:
        load_yaml(content, "a.yaml")
    assert reason in str(error.value)
    assert "\n" not in str(error.value)


TAGS = st.sampled_from(
    [
        "",
        *(
            f"!!{tag} "
            for tag in ["timestamp", "int", "float", "bool", "null", "binary", "set", "omap", "pairs", "str"]
        ),
    ]
)
SCALARS = st.sampled_from(
    ["x", "1", "~", "'", '"\\ud800"', "2001-01-01", "[", "{", "*a", "&a", "<<", ".nan", "0o9", "1:2"]
)


@given(st.lists(st.tuples(TAGS, SCALARS), max_size=4), st.binary(max_size=20))
def test_any_yaml_is_read_or_rejected(values, raw):
    lines = "\n".join(f"k{i}: {tag}{value}" for i, (tag, value) in enumerate(values))
    for content in (lines.encode(), lines.encode() + raw, raw):
        try:
            load_yaml(content, "a.yaml")
        except ConfigError as error:
            assert str(error).startswith("a.yaml")  # noqa: PT017


def test_invalid_yaml_is_shown_with_its_line_and_where_its_part_begins():
    with pytest.raises(ConfigError) as caught:
        load_yaml(b"a: 1\nb: [4\nc: 2\n", "m.yaml")
    assert "(line 3, column 2) in `c: 2`, while parsing a flow sequence that begins at line 2" in str(caught.value)
    with pytest.raises(ConfigError, match="indent with spaces"):
        load_yaml(b"a: 1\n\tb: 2\n", "m.yaml")


def test_key_that_is_set_twice_is_named_with_both_lines(tmp_path, caplog):
    file = tmp_path / "model-config.yaml"
    file.write_text("minWorkers: 1\nhandler: &h\n  a: 1\n  b: 2\n  a: 3\nmore: {<<: *h, a: 4}\nminWorkers: 2\n")
    options = read_options(file)
    assert (options["minWorkers"], options["handler"]["a"], options["more"]["a"]) == (2, 3, 4)
    assert [record.args for record in caplog.records] == [
        ("model-config.yaml", "minWorkers", 1, 7),
        ("model-config.yaml", "a", 3, 5),
    ]
