"""The examples of docs/python.md run as written, and it names what there is."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path

from flambeau import AsyncClient, Client
from support.snippets import snippets

PAGE = (Path(__file__).parents[2] / "docs" / "python.md").read_text()


def run_program(folder, number, text, **env):
    script = folder / f"program{number}.py"
    script.write_text(text)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **env}
    command = [sys.executable, script.name]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=100, check=False
    )


def test_python_docs_can_be_followed(start, tmp_path):
    words, root, calls, concurrent, handler = snippets("docs/python.md", "python")
    (tmp_path / "count.py").write_text(handler)
    server = start(tmp_path / "count.py")
    first = run_program(tmp_path, 1, words)
    assert first.stdout.startswith("{'words': 6}\nhttp://127.0.0.1:"), first.stderr
    assert run_program(tmp_path, 2, root).stdout == "{'root': 12.0}\n"
    server.wait_ready()
    third = run_program(tmp_path, 3, calls, FLAMBEAU_URL=server.url)
    assert third.stdout.startswith("0\n1\n2\n\n0\n\n1\n\n2\n\n503 "), third.stderr
    assert third.stdout.endswith("['count'] True\n")
    fourth = run_program(tmp_path, 4, concurrent, FLAMBEAU_URL=server.url)
    assert fourth.stdout.startswith("['', '0\\n', '0\\n1\\n', '0\\n1\\n2\\n']\n0\n"), (fourth.stdout, fourth.stderr)


def test_every_method_and_argument_of_the_clients_is_documented():
    for client in (Client, AsyncClient):
        methods = {name for name, _ in inspect.getmembers(client, inspect.isfunction) if not name.startswith("_")}
        arguments = {*inspect.signature(client).parameters}
        missing = {name for name in methods | arguments if f"`{name}" not in PAGE and f"{name}=" not in PAGE}
        assert missing <= {"call", "close"}  # for what has no method yet, and for `with`
