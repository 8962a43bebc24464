"""The examples of docs/rest.md run as written."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from flambeau.frontend.http.api_descriptions import MANAGEMENT
from support.snippets import run, snippets


def test_rest_docs_can_be_followed(start, tmp_path):
    handler, _, client = snippets("docs/rest.md", "python")
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


def test_every_parameter_of_a_registration_is_documented():
    page = (Path(__file__).parents[2] / "docs" / "rest.md").read_text()
    table = page.partition("Parameters of a registration:")[2].partition("```")[0]
    [registration] = [one for one in MANAGEMENT if (one.path, one.method) == ("/models", "post")]
    assert {*re.findall(r"^\| `(\w+)`", table, re.MULTILINE)} == {one.name for one in registration.query}
