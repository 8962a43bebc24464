"""Stacks of another process on request."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from flambeau.wire.stack_dumps import WORKER_CODE, StackDump, StackFrame, is_same_place, main_stack, stack_lines

PROGRAM = """
import select, threading
from flambeau.wire import stack_dumps

def watch():
    stack_dumps.receive_here()
    ready.set()
    select.select([], [], [])

ready = threading.Event()
stack_dumps.enable()
threading.Thread(target=watch, daemon=True).start()
ready.wait()

def hang():
    {setup}
    print("here", flush=True)
    {body}

hang()
"""
SLEEP = "import time; threading.Lock().__enter__()", "time.sleep(99)"
KEEP_THE_INTERPRETER = (
    "import ctypes; s = ctypes.create_string_buffer(128); c = ctypes.PyDLL(None); c.sem_init(s, 0, 0)",
    "c.sem_wait(s)",
)
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux shows memory files of other processes")


@pytest.mark.parametrize(("setup", "body"), [SLEEP, KEEP_THE_INTERPRETER])
def test_stacks_of_a_process_that_hangs(setup, body):
    program = PROGRAM.format(setup=setup, body=body)
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"here\n"
        try:
            for _ in range(2):
                dump = StackDump(process.pid)
                assert dump.is_requested
                frame, *_ = main_stack(dump.wait())
                assert (frame.file, frame.function) == ("<string>", "hang")
                assert "Thread" in dump.text()
        finally:
            process.kill()


def test_process_without_a_dump_file_gets_no_signal():
    with subprocess.Popen(["sleep", "99"]) as process:
        dump = StackDump(process.pid)
        assert (dump.is_requested, dump.wait()) == (False, "")
        assert process.poll() is None
        process.kill()
    assert StackDump(os.getpid()).wait() == ""


def test_stack_is_that_of_the_main_thread():
    text = (
        'Current thread 0x01 (most recent call first):\n  File "/a/w.py", line 7 in w\n\n'
        'Thread 0x02 (most recent call first):\n  File "/a/handler.py", line 12 in handle\n'
        '  File "/b.py", line 3 in run\n'
    )
    inner, outer = main_stack(text)
    assert (inner, outer) == (StackFrame("/a/handler.py", "12", "handle"), StackFrame("/b.py", "3", "run"))
    assert str(inner) == "handle, line 12 of handler.py"
    assert main_stack("") == []


def test_place_is_the_same_while_a_function_loops():
    def stack(*lines, function="handle"):
        return [
            StackFrame("/a/handler.py", str(lines[0]), function),
            *(StackFrame("/b", str(n), "f") for n in lines[1:]),
        ]

    assert is_same_place(stack(12, 3), stack(13, 3))
    assert not is_same_place(stack(12, 3), stack(12, 4))  # called from another line
    assert not is_same_place(stack(12, 3), stack(12, 3, 3))
    assert not is_same_place(stack(12, 3), stack(12, 3, function="other"))
    assert not is_same_place([], [])


def test_lines_of_a_failure_are_without_the_calls_of_the_worker():
    loop = f'  File "{WORKER_CODE}loop.py", line 126 in run\n  File "<frozen runpy>", line 88 in _run_code\n'
    head = "Thread 0x02 (most recent call first):\n"
    own = '  File "/a/handler.py", line 12 in handle\n'
    assert stack_lines(head + own + loop) == ['File "/a/handler.py", line 12 in handle']
    assert len(stack_lines(head + loop)) == 2
