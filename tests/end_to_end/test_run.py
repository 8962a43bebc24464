"""`flambeau run` shows what each stage returns and where the time goes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.running import HANDLERS

MODULE = [sys.executable, "-m", "flambeau.cli.main"]


def run(*words):
    result = subprocess.run([*MODULE, "run", *map(str, words)], capture_output=True, text=True, timeout=100)
    assert result.returncode == 0, result.stderr
    lines = [re.split(r" {2,}", line.strip()) for line in result.stderr.splitlines()]
    return result.stdout, {line[0]: line[1:] for line in lines}


@pytest.fixture
def sample(tmp_path):
    file = tmp_path / "x.json"
    file.write_text('{"x": 4}')
    return file


def test_stages_are_shown_with_their_output_and_time(sample):
    answer, table = run(HANDLERS / "three_stages.py", "-i", sample, "-i", sample)
    assert json.loads(answer.partition("}")[0] + "}") == {"answer": 8}
    assert table["stage"] == ["output", "ms"]
    assert table["preprocess"][0] == "list of 2 int"
    assert table["inference"][0] == "dict of 1 (doubled)"
    assert table["postprocess"][0] == "list of 2 dict"
    assert table["initialize"][0] == "on cpu"
    assert float(table["initialize"][1]) >= 20
    assert float(table["inference"][1]) >= 10
    parts = ("preprocess", "inference", "postprocess", "rest of handle")
    assert sum(float(table[part][-1]) for part in parts) == pytest.approx(float(table["handle"][1]), abs=0.03)


def test_repeated_calls_show_the_first_and_the_median(sample):
    _, table = run(HANDLERS / "three_stages.py", "-i", sample, "--repeat", 5)
    assert table["stage"] == ["output", "first ms", "median of 5 ms"]
    parts = ("preprocess", "inference", "postprocess", "rest of handle")
    for column in (-2, -1):
        assert sum(float(table[part][column]) for part in parts) == pytest.approx(
            float(table["handle"][column]), abs=0.03
        )


def test_handler_without_stages_shows_only_the_whole(sample):
    _, table = run(HANDLERS / "function.py", "-i", sample)
    assert [*table][1:] == ["stage", "import", "initialize", "handle"]
    assert table["handle"][0] == "list of 1 str"


def test_another_handler_may_be_named(sample, tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "mine.py").write_text((HANDLERS / "three_stages.py").read_text())
    answer, _ = run(folder, "--handler", "mine.py", "-i", sample)
    assert json.loads(answer) == {"answer": 8}


def test_example_of_the_handler_is_the_input_if_none_is_given(tmp_path):
    (tmp_path / "words.py").write_text('example = "to be"\ndef words(text):\n    return {"words": len(text.split())}\n')
    answer, table = run(tmp_path / "words.py")
    assert json.loads(answer) == {"words": 2}
    assert 'no input: the example of the handler is sent: "to be"' in table
    (tmp_path / "none.py").write_text("def words(text):\n    return text\n")
    answer, table = run(tmp_path / "none.py")
    assert answer == ""
    assert "no input: pass a request body with --input FILE, or set `example = …` in the handler" in table


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        (
            "    raise ValueError('bad x')\n",
            "ValueError: bad x (mine.py:4), in `raise ValueError('bad x')`. If the request",
        ),
        ("    return {'a': 1}\n", "handle (mine.py:1) returned dict of 1 (a), expected a list with 1 element. Return"),
        (
            "    raise SystemExit(0)\n",
            "the handler called sys.exit(0) (mine.py:4). It ends the worker: raise an exception",
        ),
        (
            "    return answer()\n\n\nasync def answer():\n    return [1]\n",
            "handle (mine.py:1) returned coroutine, expected",
        ),
        ("    return [row['body']['y'] for row in data]\n", "KeyError: 'y' (mine.py:4): row['body'] has the keys 'x'"),
    ],
)
def test_mistake_has_the_words_of_the_server(tmp_path, sample, body, sentence):
    (tmp_path / "mine.py").write_text("def handle(data, context):\n    if data is None:\n        return None\n" + body)
    words = [Path(sys.executable).with_name("flambeau"), "run", tmp_path / "mine.py", "-i", sample]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100, check=False)
    *before, last = done.stderr.splitlines()
    assert (done.returncode, last.startswith(sentence)) == (1, True), done.stderr
    assert not [line for line in before if "typer" in line or "flambeau/" in line]  # only the author's lines


@pytest.mark.parametrize("command", ["run", "check"])
def test_interrupt_that_a_handler_raises_is_reported(tmp_path, sample, command):
    (tmp_path / "mine.py").write_text("def handle(data, context):\n    if data:\n        raise KeyboardInterrupt\n")
    option = "-i" if command == "run" else "--samples"
    words = [Path(sys.executable).with_name("flambeau"), command, tmp_path / "mine.py", option, sample]
    done = subprocess.run(words, capture_output=True, text=True, timeout=100, check=False)
    assert "KeyboardInterrupt (mine.py:3). Without Ctrl-C, the handler raised it" in done.stderr
    assert done.returncode != 0
