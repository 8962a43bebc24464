"""BackgroundCompiler: compiles each thing once, while steps go on."""

from __future__ import annotations

import threading

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
