"""The examples of docs/rest.md run as written."""

from __future__ import annotations

import sys

from support.snippets import run, snippets


def test_rest_docs_can_be_followed(start, tmp_path):
    handler, client = snippets("docs/rest.md", "python")
    (tmp_path / "double.py").write_text(handler)
    (tmp_path / "client.py").write_text(client.replace("127.0.0.1:8080", "127.0.0.1:PORT"))
    server = start(tmp_path / "double.py").wait_ready()
    for shell in snippets("docs/rest.md", "sh"):
        for line in shell.replace("\\\n", "").splitlines():
            command = line.replace(":8080", f":{server.port}").replace(":8081", f":{server.management_port}")
            result = run(command, tmp_path)
            assert result.returncode == 0, (line, result.stdout, result.stderr)
    program = (tmp_path / "client.py").read_text().replace("PORT", str(server.port))
    result = run(f"{sys.executable} - <<'END'\n{program}\nEND", tmp_path)
    assert "[[2. 2. 2.]]" in result.stdout, result.stderr
