"""Snippets in README and docs run as written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flambeau.archive.pack import Recipe, pack
from support.command import Command
from support.pages import Reader
from support.running import HANDLERS
from support.snippets import ROOT, run, snippets


def test_readme_can_be_followed(tmp_path):
    with Reader(tmp_path) as reader:
        reader.follow(ROOT / "README.md")
    assert reader.commands == 3


def test_torchserve_snippets_of_the_migration_page_run(tmp_path):
    command = Command(tmp_path)
    pack(Recipe(model_name="my_model", handler=str(HANDLERS / "echo.py")), tmp_path / "model_store")
    (tmp_path / "input.json").write_text("{}")
    try:
        for page, number in (("docs/migrate.md", 0), ("docs/migrate.md", 1)):
            shell = snippets(page, "sh")[number].replace("127.0.0.1:8080", f"127.0.0.1:{command.port}")
            words = "\n".join(line for line in shell.splitlines() if not line.startswith("pip "))
            words = words.replace("--models all", "--models all > out.txt 2>&1")  # the server keeps the pipes
            words = words.replace("curl ", "curl -sS --fail --retry 60 --retry-connrefused --retry-delay 1 ")
            result = run(words, tmp_path, TMPDIR=command.environment["TMPDIR"])
            assert result.returncode == 0, result.stdout + result.stderr
            run("torchserve --stop --foreground", tmp_path, TMPDIR=command.environment["TMPDIR"])
    finally:
        command.stop_all()


# Those with abilities answer other requests: see test_speech.py.
PLAIN_HANDLERS = [code for code in snippets("docs/handlers.md", "python") if "abilities" not in code]


@pytest.mark.parametrize("number", range(len(PLAIN_HANDLERS)))
def test_handlers_of_the_docs_answer(start, tmp_path, number):
    code = PLAIN_HANDLERS[number]
    handler = tmp_path / "documented.py"
    handler.write_text(code)
    if "BaseHandler" in code:
        torch = pytest.importorskip("torch")
        with pytest.warns(DeprecationWarning, match="torch.jit"):
            torch.jit.trace(torch.nn.Linear(3, 2), torch.zeros(1, 3)).save(tmp_path / "net.pt")
        recipe = Recipe(model_name="documented", handler=str(handler), serialized_file=tmp_path / "net.pt")
        server = start(pack(recipe, tmp_path)).wait_ready()
        assert len(server.predict("documented", [1, 2, 3]).json) == 2
        return
    server = start(handler).wait_ready()
    assert server.predict("documented", {"text": "a b"}).status == 200


@pytest.fixture
def scorer(tmp_path):
    """The folder of docs/hooks.md."""
    pytest.importorskip("torch")
    for language in ("python", "yaml"):
        for code in snippets("docs/hooks.md", language):
            file = tmp_path / code.partition("\n")[0].removeprefix("# ")
            file.parent.mkdir(exist_ok=True)
            file.write_text(code)
    return tmp_path / "scorer"


def test_hooks_of_the_docs_work(start, scorer):
    serving, asking, profiling, explaining, describing = snippets("docs/hooks.md", "sh")
    assert serving == "flambeau serve scorer/\n"
    assert profiling == f"ENABLE_TORCH_PROFILER=true {serving}"
    server = start(scorer).wait_ready()

    def shell(command):
        for documented, port in ((8080, server.port), (8081, server.management_port), (8082, server.metrics_port)):
            command = command.replace(f"127.0.0.1:{documented}", f"127.0.0.1:{port}")
        result = run(command, scorer.parent)
        assert result.returncode == 0, result.stderr
        return result.stdout

    answer = shell(asking)
    assert json.loads(answer[: answer.index("}") + 1]) == {"score": 4.5}
    for stage in ("preprocess", "inference", "postprocess"):
        assert f"ts_handler_{stage}{{" in answer
    assert json.loads(shell(explaining)) == [0.5, -2.0, 6.0]
    [described] = json.loads(shell(describing))
    assert described["customizedMetadata"] == {"device": "cpu", "inputs": 3}


def test_profiler_of_the_docs_writes_a_trace(start, scorer):
    traces = Path("/tmp/pytorch_profiler/scorer")  # as the page says
    before = {*traces.glob("*")}
    server = start(scorer, env={"ENABLE_TORCH_PROFILER": "true"}).wait_ready()
    assert server.predict("scorer", [1.0, 2.0, 3.0]).json == {"score": 4.5}
    new = {*traces.glob("*")} - before
    for trace in new:
        trace.unlink()
    assert new
    server.until(lambda: server.logged("aten::"))


def test_error_in_the_docs_is_what_the_server_says(start):
    [documented] = snippets("docs/operate.md", "json")
    reply = start("faulty.py").wait_ready().predict("faulty", {"do": "exit", "code": 3})
    assert reply.json == json.loads(documented)
