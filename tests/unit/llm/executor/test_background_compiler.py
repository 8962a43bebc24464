"""BackgroundCompiler: compiles each thing once, while steps go on."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from flambeau.llm.executor.background_compiler import BackgroundCompiler


def test_each_thing_is_compiled_once_while_steps_go_on():
    compiler, may_finish, made = BackgroundCompiler(), threading.Event(), []

    def make():
        may_finish.wait(60)
        made.append(1)
        return lambda inputs: inputs.ids_T

    assert [compiler.find("key", make) for _ in range(3)] == [None] * 3
    assert not compiler.wait(timeout_s=0.01)
    may_finish.set()
    assert compiler.wait(timeout_s=60)
    assert compiler.find("key", make) is not None
    assert made == [1]
    compiler.close()
    assert compiler.find("another", make) is None
    assert compiler.wait(timeout_s=60)


def test_closing_abandons_a_long_compilation():
    compiler, has_begun = BackgroundCompiler(), threading.Event()

    def make():
        has_begun.set()
        while True:
            threading.Event().wait(0.01)

    compiler.find("key", make)
    assert has_begun.wait(60)
    compiler.close()
    assert compiler.wait(timeout_s=60)


EXITING = """
import threading
import torch
from flambeau.llm.executor.background_compiler import BackgroundCompiler

matrix, has_begun = torch.randn(300, 300), threading.Event()

def make():
    while True:
        torch.linalg.svd(matrix)
        has_begun.set()

compiler = BackgroundCompiler()
compiler.find("key", make)
has_begun.wait(60)
"""


@pytest.mark.timeout(120)
def test_a_process_that_ends_meanwhile_is_not_aborted():
    ended = subprocess.run([sys.executable, "-c", EXITING], capture_output=True, text=True, timeout=100)
    assert (ended.returncode, ended.stderr) == (0, "")
