"""A server and an agent, in one process."""

from __future__ import annotations

import asyncio
import io
import logging
import tarfile
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from flambeau.cluster import model_fetch
from flambeau.cluster.agent import Agent, AgentSettings, OutputFile, OwnWorker, own_environment
from flambeau.cluster.model_cache import ModelCache
from flambeau.errors import PlacementFailed
from flambeau.serving.cluster import agent_link
from flambeau.serving.cluster.agent_link import AgentLink
from flambeau.serving.cluster.placed_worker import process_state_of
from flambeau.serving.cluster.worker_port import WorkerPort
from flambeau.serving.workers.process_state import GONE, ProcessState, ThreadState
from flambeau.serving.workers.stacks import Stacks
from flambeau.wire.cluster_messages import RemoteFiles, Start
from flambeau.wire.model_files import digest_of
from flambeau.wire.tls import WrongServer
from support.file_server import serving_files

WORKER = OwnWorker("w", 4, [], None, 0)


class RemoteCache(ModelCache):
    """As on a machine that has nothing at the server's paths."""

    def find(self, folder, files, digest):
        return super().find("/nowhere", files, digest)


@asynccontextmanager
async def linked(cache):
    port = WorkerPort("127.0.0.1:0", 3)
    await port.open()
    joined, left = asyncio.Event(), asyncio.Event()
    link = AgentLink(lambda _: joined.set(), lambda _: left.set())
    token = port.expect(lambda: link.channel)
    settings = AgentSettings(
        agent="a", address=port.address, fingerprint=port.fingerprint, token=token, node="n", host="h"
    )
    running = asyncio.create_task(Agent(settings, cache).run())
    try:
        async with asyncio.timeout(30):
            await joined.wait()
            yield link
    finally:
        link.close()
        await asyncio.wait_for(running, 30)
        await asyncio.wait_for(left.wait(), 30)
        await port.close()


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    (folder / "handler.py").write_text("x = 1\n")
    (folder / "sub" / "weights").write_bytes(bytes(range(256)) * 1000)
    (folder / "empty").touch()
    return folder


async def test_agent_names_itself(tmp_path):
    async with linked(ModelCache(tmp_path / "cache")) as link:
        assert (link.joined.node, link.joined.host, link.joined.address) == ("n", "h", "127.0.0.1")
        assert {"python", "flambeau"} <= {*link.joined.versions}
        assert 0 < await link.find_port() < 65536


async def test_files_that_are_there_are_used_in_place(tmp_path, model):
    async with linked(ModelCache(tmp_path / "cache")) as link:
        assert await link.prepare(model) == str(model)
    assert not (tmp_path / "cache").exists()


async def test_files_are_sent_once_and_found_again(tmp_path, model, monkeypatch):
    monkeypatch.setattr(agent_link, "PIECE_BYTES", 10_000)
    sent = []
    monkeypatch.setattr(
        agent_link, "read_piece", lambda path, start, read=agent_link.read_piece: sent.append(path) or read(path, start)
    )
    async with linked(RemoteCache(tmp_path / "cache")) as link:
        folder = await link.prepare(model)
        assert folder == str(tmp_path / "cache" / digest_of(model))
        assert digest_of(type(model)(folder)) == digest_of(model)
        before = len(sent)
        assert await link.prepare(model) == folder
    assert before > 20
    assert len(sent) == before


@pytest.fixture
def sent(monkeypatch):
    """The files of which pieces were sent."""
    names = []
    monkeypatch.setattr(
        agent_link,
        "read_piece",
        lambda path, start, read=agent_link.read_piece: names.append(path.name) or read(path, start),
    )
    return names


@pytest.fixture
def web():
    with serving_files() as server:
        yield server


def archive_of(folder):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        archive.add(folder, ".")
    return buffer.getvalue()


def at_url(web, **more):
    return RemoteFiles(url=f"{web.url}/m.tar.gz", **{"allowed": [".*"], "allow_private": True, **more})


async def prepared(tmp_path, model, *remote):
    """What a machine without the files has in the end."""
    async with linked(RemoteCache(tmp_path / "cache")) as link:
        folder = await link.prepare(model, remote)
    assert digest_of(Path(folder)) == digest_of(model)
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [digest_of(model)]


async def test_machine_downloads_an_archive_by_itself(tmp_path, model, sent, web):
    web.files["/m.tar.gz"] = archive_of(model)
    await prepared(tmp_path, model, at_url(web))
    assert sent == []


async def test_what_differs_from_the_servers_files_is_sent(tmp_path, model, sent, web, caplog):
    other = tmp_path / "other"
    other.mkdir()
    (other / "handler.py").write_text("x = 2\n")  # of the same size
    web.files["/m.tar.gz"] = archive_of(other)
    await prepared(tmp_path, model, at_url(web))
    assert {*sent} == {"handler.py", "weights", "empty"}
    assert "differs" in caplog.text


@pytest.mark.parametrize(
    ("more", "words"),
    [({}, "404"), ({"allowed": ["https://.*"]}, "allowed_urls"), ({"allow_private": False}, "127.0.0.1")],
    ids=["missing", "not allowed", "private"],
)
async def test_what_a_machine_cannot_download_is_sent(tmp_path, model, sent, web, caplog, more, words):
    if more:
        web.files["/m.tar.gz"] = archive_of(model)
    with caplog.at_level(logging.WARNING):
        await prepared(tmp_path, model, at_url(web, **more))
    assert {*sent} == {"handler.py", "weights", "empty"}
    assert "could not get a model by itself" in caplog.text
    assert words in caplog.text
    assert len(web.asked) == (not more)


async def test_machine_gets_a_checkpoint_from_the_hub_and_the_rest_from_the_server(tmp_path, model, sent, monkeypatch):
    asked = []

    def fetch_from_hub(remote, files):
        asked.append((remote.hub, [file.path for file in files]))
        return model / "sub"

    monkeypatch.setattr(model_fetch, "fetch_from_hub", fetch_from_hub)
    await prepared(tmp_path, model, RemoteFiles(folder="sub", hub="acme/m@0123"))
    assert asked == [("acme/m@0123", ["sub/weights"])]
    assert {*sent} == {"handler.py", "empty"}


async def test_machine_that_cannot_store_a_model_says_why(tmp_path, model):
    (tmp_path / "cache").write_text("a file, not a folder")
    async with linked(RemoteCache(tmp_path / "cache")) as link:
        with pytest.raises(PlacementFailed, match="could not be stored on h"):
            await link.prepare(model)


async def test_agent_looks_at_a_worker_and_reads_its_stacks(tmp_path, monkeypatch):
    state = ProcessState(activity="locked", user_s=1.5, num_events=7, threads=(ThreadState("main", "S", "202 0x7", 3),))
    monkeypatch.setattr("flambeau.cluster.agent.read_process", lambda pid: state)
    monkeypatch.setattr("flambeau.cluster.agent.take_stacks", lambda pid, after_s: Stacks(f"{pid} {after_s}", True))
    monkeypatch.setattr(Agent, "_start", lambda agent, message: agent._workers.update({"w": WORKER}))
    async with linked(ModelCache(tmp_path / "cache")) as link:
        assert process_state_of(await link.look("w")) == GONE
        assert (await link.take_stacks("w", 0.0)).text == ""
        link.send(Start("w", "/", {}, ""))
        assert process_state_of(await link.look("w")) == state
        found = await link.take_stacks("w", 0.5)
        assert (found.text, found.is_endless) == ("4 0.5", True)


async def test_question_to_an_agent_that_is_gone_is_an_error(tmp_path):
    async with linked(ModelCache(tmp_path / "cache")) as link:
        asyncio.get_running_loop().call_soon(link.close)
        with pytest.raises(PlacementFailed, match="lost"):
            await link.find_port()


async def test_agent_does_not_serve_another_server():
    port = WorkerPort("127.0.0.1:0", 3)
    await port.open()
    settings = AgentSettings(agent="a", address=port.address, fingerprint="0" * 64, token="0" * 64, node="n")
    with pytest.raises(WrongServer):
        await Agent(settings).run()
    await port.close()


def test_output_is_read_in_order_and_a_large_file_is_emptied(tmp_path, monkeypatch):
    monkeypatch.setattr("flambeau.cluster.agent.MAX_FILE_BYTES", 100)
    path = tmp_path / "output"
    path.write_bytes(b"")
    file = OutputFile(str(path), is_error=False)
    with open(path, "ab") as worker:
        for number in range(60):
            worker.write(f"line {number}\n".encode())
            worker.flush()
            assert file.read() == f"line {number}\n".encode()
            assert file.read() == b""
    assert path.stat().st_size <= 120


def test_secrets_do_not_reach_workers():
    given = {"RAY_AUTH_TOKEN": "x", "RAY_JOB_ID": "1", "FLAMBEAU_CLUSTER_SECRET": "x", "PATH": "/bin"}
    assert own_environment(given) == {"PATH": "/bin"}
