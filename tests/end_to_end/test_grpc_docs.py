"""The examples of docs/grpc.md do what the page says."""

from __future__ import annotations

from support.grpc_calls import grpc_flags
from support.snippets import run, snippets

PAGE = "docs/grpc.md"


def test_clients_of_the_page_are_answered(start, tmp_path):
    flags = grpc_flags()
    for code in snippets(PAGE, "python"):
        name = code.splitlines()[0].removeprefix("# ")
        (tmp_path / name).write_text(code.replace("localhost:7070", f"localhost:{flags[1]}"))
    start(tmp_path / "handler.py", tmp_path / "sums.py", *flags).wait_ready()
    stubs = snippets(PAGE, "sh")[1]
    made = run(f"{stubs}\npython client.py", tmp_path)
    assert made.stdout == "HELLO\nHELLO\n", made.stderr
    assert run("python triton_client.py", tmp_path).stdout == "[4.]\n"
