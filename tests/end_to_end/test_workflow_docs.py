"""What the docs say about workflows works as written."""

from __future__ import annotations

import zipfile

from flambeau.archive.pack import Recipe, pack
from support.flows import pack_flow
from support.snippets import snippets

LOUD = """
def handle(data, context):
    return None if data is None else [bytes(row["body"]).upper() for row in data]
"""


def test_workflow_of_the_docs_answers(configured, tmp_path):
    [spec] = snippets("docs/workflows.md", "yaml")
    [handler] = snippets("docs/workflows.md", "python")
    (tmp_path / "shout_flow.py").write_text(handler)
    (tmp_path / "loud.py").write_text(LOUD)
    store = tmp_path / "store"
    store.mkdir()
    pack(Recipe(model_name="loud", handler=str(tmp_path / "loud.py")), store)
    war = pack_flow(store, "shout", {}, handler=tmp_path / "shout_flow.py", spec=spec)
    assert "shout_flow.py" in zipfile.ZipFile(war).namelist()
    server = configured(model_store=store)  # without a workflow store, the model store is one
    assert server.register_workflow("shout.war").status == 200, server.log
    reply = server.request("POST", "/wfpredict/shout", b" hello ")
    assert reply.json == {"text": "HELLO", "letters": 5}
    assert server.manage("GET", "/models/shout__loud").status == 200
