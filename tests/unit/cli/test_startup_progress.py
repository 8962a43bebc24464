from __future__ import annotations

import io
import subprocess
from types import SimpleNamespace

import pytest
from rich.console import Console

from flambeau.cli.startup_progress import StartupProgress, curl_command
from flambeau.wire.example_requests import of_inputs, of_shape, to_text

URL = "http://here/predictions/m"
JSON = "-H 'content-type: application/json'"


def model(handler, *, abilities=(), example="", envelope="", **options):
    return SimpleNamespace(
        handler=handler,
        abilities=frozenset(abilities),
        config=SimpleNamespace(options=options),
        example=example,
        envelope=envelope,
    )


@pytest.mark.parametrize(
    ("handler", "words"),
    [
        ("onnx", f"{JSON} -d '[0.5]'"),
        ("text_classifier", f"{JSON} -d '\"What a fine day\"'"),
        ("mine.py", f"{JSON} -d '{{}}'"),
    ],
)
def test_command_fits_the_handler(handler, words):
    assert curl_command(URL, model(handler)) == f"curl {URL} {words}"


def test_generator_is_shown_as_it_streams():
    assert curl_command(URL, model("gpt_handler", abilities=["generate"])).startswith(f"curl -N {URL} -H")


def test_example_of_the_settings_comes_before_that_of_the_worker_and_is_quoted():
    given = model("mine.py", example="1")
    assert curl_command(URL, given).endswith("-d 1")
    given.config.options["example"] = '["it\'s"]'
    assert curl_command(URL, given).endswith("""-d '["it'"'"'s"]'""")


def test_long_body_is_made_by_a_program():
    command = curl_command(URL, model("onnx", example=of_shape([3, 224, 224], 0.5)))
    program, _, curl = command.partition(" | ")
    assert curl == f"curl {URL} {JSON} -d @-"
    printed = subprocess.run(program, shell=True, capture_output=True, text=True, timeout=60, check=True).stdout
    assert printed.count("0.5") == 3 * 224 * 224


@pytest.mark.parametrize(
    ("envelope", "end"), [("body", "-d '[1]'"), ("kserve", """-d '{"instances": [[1]]}'"""), ("own", "-d '{}'")]
)
def test_envelope_is_put_around_the_example(envelope, end):
    assert curl_command(URL, model("mine.py", example="[1]", envelope=envelope)).endswith(end)


def test_examples_of_a_signature():
    assert of_shape([2, 3], 0) == "[[0, 0, 0], [0, 0, 0]]"
    assert of_shape([], 0.5) == "0.5"
    assert of_shape([100, 2], 0.5) == "[[0.5]*2]*100"
    assert of_inputs({"x": of_shape([1], 0)}) == "[0]"
    assert of_inputs({"x": of_shape([1], 0), "y": of_shape([], True)}) == '{"x": [0], "y": true}'


@pytest.mark.parametrize(
    ("example", "text"), [({"text": "hi"}, '{"text": "hi"}'), (b"x", ""), (open, ""), ([0.25] * 1000, "")]
)
def test_example_that_is_no_json_or_long_is_not_reported(example, text):
    assert to_text(example) == text


def test_failed_model_is_told_without_colors():
    console = Console(file=io.StringIO(), color_system=None)
    progress = StartupProgress(console)
    with progress.loading("good"):
        pass
    with progress.loading("bad") as outcome:
        outcome.failed = True
    assert [line[:-6] for line in console.file.getvalue().splitlines()] == ["● good", "✗ bad failed after"]
