"""docs/develop.md can be followed word by word."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest

from support.snippets import run, snippets

PAGE = "docs/develop.md"


@pytest.fixture
def folder(tmp_path):
    handler, test = snippets(PAGE, "python")
    (tmp_path / "words.py").write_text(handler)
    (tmp_path / "test_words.py").write_text(test)
    return tmp_path


def without_numbers(text):
    """Lines without times and what depends on them, as those differ, and without the spaces that align them."""
    numbers = r"\d+\.\d+|(?<=over )\d+(?= calls)"
    return [" ".join(re.sub(numbers, "", line).split()) for line in text.strip().splitlines()]


def test_run_and_check_print_what_the_page_shows(folder):
    run_it, check_it, _ = snippets(PAGE, "sh")
    table, verdicts, _ = snippets(PAGE, "text")
    result = run(run_it, folder)
    assert result.returncode == 0, result.stderr
    assert without_numbers(result.stderr)[1:] == without_numbers(table)
    result = run(check_it, folder)
    assert result.returncode == 0, result.stdout
    assert without_numbers(result.stdout) == without_numbers(verdicts)


def test_tests_of_the_page_pass(folder):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "flambeau.testing.plugin", "-p", "no:cacheprovider"]
    env = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    result = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=100)
    assert "2 passed" in result.stdout, result.stdout


def test_watching_logs_what_the_page_says(folder, start):
    *_, serve_it = snippets(PAGE, "sh")
    *_, lines = snippets(PAGE, "text")
    program, command, *words = serve_it.split()
    assert (program, command) == ("flambeau", "serve")
    server = start(*[folder / word if word.endswith(".py") else word for word in words]).wait_ready()
    file = folder / "words.py"

    def ask():
        return server.predict("words", b"one two", kind="text/plain").json

    assert ask() == {"words": 2, "longest": ["one", "two"]}
    file.write_text(file.read_text().replace("reverse=True", "reverse=False"))
    assert ask()["words"] == 2
    file.write_text(file.read_text().replace('get("most", 3)', 'get("most", 1)'))
    assert ask()["longest"] == ["one"]
    for line in lines.strip().splitlines():
        server.until(lambda line=line: line in server.log)
