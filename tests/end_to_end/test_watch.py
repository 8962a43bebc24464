"""`flambeau serve --watch` answers with the code as it is now."""

from __future__ import annotations

import pytest

from flambeau.archive.pack import Recipe, pack
from support.archives import pack_handler
from support.running import Load
from support.streams import Stream

HANDLER = """
import itertools
import neighbor

LOADS = itertools.count(1)


class Handler:
    def initialize(self, context):
        with open(context.system_properties["model_dir"] + "/loads", "a") as file:
            file.write("x")
        self.weights = "heavy"

    def handle(self, data, context):
        return [f"one {self.weights} {neighbor.word()}" for _ in data]
"""


@pytest.fixture
def model(tmp_path):
    """A model folder; edits are told apart even on file systems that are slow to notice."""
    folder = tmp_path / "watched"
    folder.mkdir()
    (folder / "handler.py").write_text(HANDLER)
    (folder / "neighbor.py").write_text("def word():\n    return 'word'\n")
    return folder


def edit(file, old, new):
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def logged(server, *keys):
    """What a worker prints may reach the log a little after its answer."""
    server.until(lambda: server.logged(*keys))


def loads(folder):
    return len((folder / "loads").read_text())


def test_code_is_reloaded_and_weights_are_kept(start, model):
    server = start(model, "--watch").wait_ready()

    def ask():
        return server.predict("watched", b"").body.decode()

    assert ask() == "one heavy word"
    edit(model / "handler.py", "one", "two")  # the same size, maybe within the same second
    assert ask() == "two heavy word"
    edit(model / "neighbor.py", "'word'", "'words'")
    assert ask() == "two heavy words"
    (model / "unrelated.py").write_text("x = ")
    assert ask() == "two heavy words"
    assert loads(model) == 1
    logged(server, "reloaded", "handler.py", "kept")
    logged(server, "reloaded", "neighbor.py", "kept")
    assert len(server.logged("stdout reloaded")) == 2

    edit(model / "handler.py", "heavy", "light")
    assert ask() == "two light words"
    assert loads(model) == 2
    logged(server, "reloaded", "handler.py", "initialize changed")
    pids = server.worker_pids("watched")
    assert len(pids) == 1
    assert server.describe("watched")["workers"][0]["restarts"] == 0


def test_code_that_cannot_be_loaded_is_the_answer_until_it_is_mended(start, model):
    server = start(model, "--watch").wait_ready()
    assert server.predict("watched", b"").status == 200
    edit(model / "handler.py", "def handle(self", "def handle(self,,")
    for _ in range(2):
        reply = server.predict("watched", b"")
        assert reply.status == 503
        assert "SyntaxError" in reply.cause
        assert "def handle(self,,," in reply.cause
    edit(model / "handler.py", "def handle(self,,", "def handle(self")
    assert server.predict("watched", b"").body == b"one heavy word"
    assert loads(model) == 1  # a slip of the pen costs no weights

    edit(model / "handler.py", '        self.weights = "heavy"', '        raise OSError("no weights")')
    reply = server.predict("watched", b"")
    assert reply.status == 503
    assert "OSError: no weights" in reply.cause
    edit(model / "handler.py", '        raise OSError("no weights")', '        self.weights = "new"')
    assert server.predict("watched", b"").body == b"one new word"

    edit(model / "handler.py", "import neighbor", "import neighbor, newcomer")
    assert "No module named 'newcomer'" in server.predict("watched", b"").cause
    (model / "newcomer.py").write_text("")
    assert server.predict("watched", b"").status == 200
    server.until(lambda: len(server.logged("W-9000-", "cannot be loaded")) == 3)


def test_functions_are_reloaded_and_called_with_none(start, tmp_path):
    file = tmp_path / "function.py"
    file.write_text("STATE = []\ndef handle(data, context):\n    STATE.append(data is None)\n    return [STATE[:1]]\n")
    server = start(file, "--watch").wait_ready()
    assert server.predict("function", b"").json == [True]
    edit(file, "[STATE[:1]]", "[['new', *STATE]]")
    assert server.predict("function", b"").json == ["new", True, False]
    logged(server, "stdout reloaded", "function.py")


def test_async_handlers_are_reloaded_when_idle(start, tmp_path):
    file, gate = tmp_path / "waiter.py", tmp_path / "gate"
    file.write_text(
        f"import asyncio\nfrom pathlib import Path\n\nGATE = {str(gate)!r}\n\n\nclass Waiter:\n"
        "    async def initialize(self, context):\n        self.at = 'first'\n\n"
        "    async def handle(self, data, context):\n"
        "        for _ in range(5):\n            await asyncio.sleep(0.01)\n            yield 'old '\n"
        "        while not Path(GATE).exists():\n            await asyncio.sleep(0.01)\n"
    )
    server = start(file, "--watch").wait_ready()
    streams = [Stream(server, "waiter", {}) for _ in range(2)]
    assert [stream.begin().read(4) for stream in streams] == [b"old "] * 2
    edit(file, "old", "new")
    waiting = server.at_once(lambda _: server.predict("waiter", b""), [0])
    gate.touch()
    assert waiting[0].result().body == b"new " * 5
    assert [stream.response.read() for stream in streams] == [b"old " * 4] * 2
    for stream in streams:
        stream.leave()
    edit(file, "'first'", "'second'")
    assert server.predict("waiter", b"").status == 200
    logged(server, "reloaded", "initialize")
    edit(file, "async def handle", "def handle")
    edit(file, "await asyncio.sleep(0.01)", "pass")
    assert "restart the server" in server.predict("waiter", b"").cause


def test_requests_during_a_reload_are_all_answered(start, model):
    server = start(model, "--watch", "--batch-size", "4").wait_ready()
    with Load(lambda: server.predict("watched", b""), threads=3) as load:
        for old, new in (("one", "two"), ("two", "six"), ("six", "ten")):
            seen = len(load.replies)
            server.until(lambda seen=seen: len(load.replies) > seen + 10)
            edit(model / "handler.py", old, new)
        server.until(lambda: load.replies[-1].body == b"ten heavy word")
    # A file that is read while it is written is an error, and reported as such; it is never answered by old code.
    assert {reply.status for reply in load.replies} <= {200, 503}
    assert not load.errors


def test_model_file_and_config_make_the_handler_anew(start, tmp_path):
    torch = pytest.importorskip("torch")
    (tmp_path / "net.py").write_text(
        "import torch\n\n\nclass Net(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        "        self.two = torch.nn.Parameter(torch.zeros(()))\n\n"
        "    def forward(self, x):\n        return x * self.two\n"
    )
    (tmp_path / "vectors.py").write_text(
        "import torch\nfrom flambeau.handlers.base import BaseHandler\n\n\nclass Vectors(BaseHandler):\n"
        "    def preprocess(self, data):\n        return torch.tensor([row['body'] for row in data]) * 1.0\n\n"
        "    def postprocess(self, data):\n        return [[x, self.model_yaml_config['k']] for x in data.tolist()]\n"
    )
    (tmp_path / "model-config.yaml").write_text("k: 1\n")
    torch.save({"two": torch.tensor(2.0)}, tmp_path / "net.pth")
    recipe = Recipe(
        model_name="vectors",
        handler=str(tmp_path / "vectors.py"),
        model_file=tmp_path / "net.py",
        serialized_file=tmp_path / "net.pth",
        config_file=tmp_path / "model-config.yaml",
    )
    folder = pack(recipe, tmp_path, format="no-archive")
    server = start(folder, "--watch").wait_ready()
    assert server.predict("vectors", 3).json == [6.0, 1]
    edit(folder / "vectors.py", "* 1.0", "* 1.5")
    assert server.predict("vectors", 2).json == [6.0, 1]
    logged(server, "reloaded", "vectors.py", "kept")
    edit(folder / "net.py", "x * self.two", "x * self.two * 2")
    assert server.predict("vectors", 2).json == [12.0, 1]
    logged(server, "reloaded", "net.py", "Net changed")
    edit(folder / "model-config.yaml", "k: 1", "k: 5")
    assert server.predict("vectors", 2).json == [12.0, 5]
    logged(server, "reloaded", "model-config.yaml changed")


def test_archives_are_not_watched_and_nothing_is_without_the_flag(start, tmp_path, model):
    server = start(pack_handler(tmp_path, "echo"), "--watch").wait_ready()
    logged(server, "echo", "not watched")
    unwatched = start(model).wait_ready()
    assert unwatched.predict("watched", b"").body == b"one heavy word"
    edit(model / "handler.py", "one", "two")
    assert unwatched.predict("watched", b"").body == b"one heavy word"
