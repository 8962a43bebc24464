"""`flambeau check` finds what is wrong with a handler, and nothing wrong with a good one."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from support.archives import pack_handler
from support.running import HANDLERS

HEAD = """
import os, random, sys, time
from flambeau.errors import PredictionException

class Handler:
    def initialize(self, context):
        self.calls, self.kept, self.bias = 0, [], 0

    def handle(self, data, context):
        return [self.one(row["body"]) for row in data]

    def one(self, body):
        if not isinstance(body, dict) or "x" not in body:
            raise PredictionException("send an object with x", 400)
        return {"scores": {"cat": body["x"] * 2.0}}
"""


def flambeau(*words):
    command = [sys.executable, "-m", "flambeau.cli.main", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


@pytest.fixture
def check(tmp_path):
    """Check a handler whose class is the good one but for these lines; returns the exit status and the verdicts."""
    samples = tmp_path / "samples"
    samples.mkdir()
    for i in range(3):
        (samples / f"{i}.json").write_text(json.dumps({"x": i + 1}))

    def run_check(body="", *options, handler=None):
        file = handler or tmp_path / "handler.py"
        if handler is None:
            file.write_text(HEAD + body)
        result = flambeau("check", file, "--samples", samples, "--timeout", 0.5, "--json", *options)
        assert result.stdout, result.stderr
        document = json.loads(result.stdout)
        assert document["ok"] is (result.returncode == 0)
        return document["ok"], {v["what"]: (v["level"], v["text"]) for v in document["checks"]}, document["stages"]

    return run_check


def problems(verdicts):
    return {what: text for what, (level, text) in verdicts.items() if level == "problem"}


def test_good_handler_passes_every_check(check):
    ok, verdicts, stages = check()
    assert ok
    assert {level for level, _ in verdicts.values()} == {"ok"}
    assert verdicts["empty body"][1] == "rejected with 400: send an object with x"
    assert {"loads", "alone", "size", "twice", "batch", "order", "mixed sizes", "JSON NaN", "memory"} <= verdicts.keys()
    assert stages[-1]["name"] == "handle"


def test_verdicts_are_lines_with_a_mark(check, tmp_path):
    check()
    result = flambeau("check", tmp_path / "handler.py", "--samples", tmp_path / "samples" / "0.json")
    assert result.returncode == 0
    assert result.stdout.startswith("✓ loads: handler.py in 0.0")
    assert "✓ alone: 1 of 1 samples are answered\n" in result.stdout
    assert "median ms" in result.stderr


def test_archives_with_stages_are_checked(check, tmp_path):
    ok, verdicts, stages = check("", handler=pack_handler(tmp_path, "three_stages"))
    assert ok
    assert verdicts["JSON {}"] == (
        "note",
        "answers 503 (KeyError: 'x'); raise PredictionException(…, 400) to tell the client why",
    )
    assert [row["name"] for row in stages][:3] == ["preprocess", "inference", "postprocess"]


def test_handler_that_does_not_load_is_reported(check):
    ok, verdicts, _ = check("    def initialize(self, context):\n        raise OSError('no weights')\n")
    assert not ok
    assert verdicts["loads"][1].startswith("OSError: no weights (handler.py:")


def test_sample_that_is_not_answered_is_reported(check):
    ok, verdicts, _ = check("    def handle(self, data, context):\n        return {'a': 1}\n")
    assert not ok
    assert "(handler.py:16) returned dict of 1 (a), expected a list" in verdicts["sample 0.json"][1]
    ok, verdicts, _ = check("    def one(self, body):\n        return object()\n")
    assert "Unsupported model output" in verdicts["sample 2.json"][1]


def test_answers_that_depend_on_the_batch_are_found(check):
    mean = "    def handle(self, data, context):\n        m = sum(r['body']['x'] for r in data) / len(data)\n"
    ok, verdicts, _ = check(mean + "        return [{'scores': {'cat': r['body']['x'] / m}} for r in data]\n")
    assert not ok
    assert verdicts["batch"][1].startswith("0.json alone and in a batch of 4: [0].scores.cat: 1.0 vs 0.57")


def test_answers_that_depend_on_the_order_are_found(check):
    """A list sorted by value, and never sorted back."""
    body = "    def handle(self, data, context):\n        rows = sorted(data, key=lambda row: str(row['body']))\n"
    ok, verdicts, _ = check(body + "        return [self.one(row['body']) for row in rows]\n")
    assert not ok
    assert "order" in problems(verdicts)


def test_batches_are_not_looked_at_for_a_batch_size_of_one(check):
    body = "    def handle(self, data, context):\n        return [self.one(row['body']) for row in data[:1]]\n"
    ok, verdicts, _ = check(body)
    assert not ok
    assert "number of batch response mismatched" in problems(verdicts)["batch"]
    ok, verdicts, _ = check(body, "--batch-size", 1)
    assert ok
    assert verdicts["batch"][0] == "note"


def test_chance_is_a_note_and_no_failure(check):
    ok, verdicts, _ = check("    def one(self, body):\n        return {'n': random.random(), 'x': 1}\n")
    assert ok
    assert verdicts["twice"][0] == "note"
    assert "0.json is answered differently the second time: .n:" in verdicts["twice"][1]


def test_handler_corrupted_by_a_bad_request_is_found(check):
    body = """
    def one(self, body):
        if body == []:
            self.bias = 1
        if not isinstance(body, dict) or "x" not in body:
            raise PredictionException("no", 400)
        return {"x": body["x"] + self.bias}
"""
    ok, verdicts, _ = check(body)
    assert not ok
    assert verdicts["JSON []"] == ("problem", "after it, 0.json is answered differently: .x: 1 vs 2")


def test_neighbor_harmed_by_a_bad_request_is_found(check):
    body = """
    def handle(self, data, context):
        bad = any(not isinstance(row["body"], dict) for row in data)
        return [{"x": 0 if bad else row["body"].get("x")} for row in data]
"""
    ok, verdicts, _ = check(body)
    assert not ok
    assert verdicts["JSON null"] == (
        "problem",
        "beside it in a batch, 0.json is answered differently: .x: 1 vs 0",
    )


def test_handler_that_hangs_or_ends_its_process_is_found(check):
    body = """
    def one(self, body):
        if body is None:
            time.sleep(60)
        if body == []:
            sys.exit(3)
        if body == {}:
            os._exit(4)
        return "fine"
"""
    ok, verdicts, _ = check(body)
    assert not ok
    found = problems(verdicts)
    assert found["JSON null"].startswith("no answer within 0.5 s; the server kills a worker for that (handler.py:")
    assert found["JSON []"].startswith("the handler called sys.exit(3) (handler.py:")
    assert found["JSON {}"].startswith("os._exit(4) would exit the worker")
    assert found.keys() == {"JSON null", "JSON []", "JSON {}"}


def test_leaks_are_found(check):
    ok, verdicts, _ = check("    def one(self, body):\n        self.kept.append({'b': [1]})\n        return 'x'\n")
    assert not ok
    assert "objects (mostly " in problems(verdicts)["memory"]
    ok, verdicts, _ = check("    def one(self, body):\n        self.kept.append(b'x' * 300_000)\n        return 'x'\n")
    assert not ok
    assert "kB of memory" in problems(verdicts)["memory"]


def test_answer_that_is_too_large_is_found(check):
    ok, verdicts, _ = check("    def one(self, body):\n        return bytes(7_000_000)\n")
    assert not ok
    assert "7.0 MB" in problems(verdicts)["size"]


def test_nothing_to_check_with_is_said_plainly(tmp_path):
    (tmp_path / "none").mkdir()
    for samples, words in ((tmp_path / "none", "holds no files"), (tmp_path / "gone", "does not exist")):
        result = flambeau("check", HANDLERS / "echo.py", "--samples", samples)
        assert result.returncode == 1
        assert words in result.stderr
        assert "Traceback" not in result.stderr


def test_example_of_the_handler_is_the_sample_if_none_is_given(tmp_path):
    (tmp_path / "words.py").write_text('example = "to be"\ndef words(text):\n    return {"words": len(str(text))}\n')
    result = flambeau("check", tmp_path / "words.py")
    assert "✓ alone: 1 of 1 samples are answered" in result.stdout
    (tmp_path / "none.py").write_text("def words(text):\n    return text\n")
    result = flambeau("check", tmp_path / "none.py")
    assert result.returncode == 1
    assert "✗ samples: none: give a folder with --samples, or set `example = …` in the handler" in result.stdout
