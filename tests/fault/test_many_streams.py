"""Two hundred clients stream at once, and a quarter of them vanish in the middle."""

from __future__ import annotations

import asyncio
import json
import time

import psutil
import pytest
import yaml

from flambeau.examples import shakespeare
from support.running import RunningServer

NUM_CLIENTS, VANISHING_EVERY = 200, 4
SPEAKERS = ("ROMEO", "JULIET", "MENENIUS", "KING RICHARD", "GLOUCESTER")
LINES = ("What say you", "I pray thee", "My lord", "O, speak", "Good morrow")
PROMPTS = [f"{speaker}:\n{line}" for speaker in SPEAKERS for line in LINES]
NUM_TOKENS = 16
LOADS_S = 90


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("many")
    options = {"model_path": str(shakespeare.FOLDER / "target"), "num_blocks": 700, "compile": False}
    (folder / "model-config.yaml").write_text(yaml.safe_dump({"handler": {"name": "gpt_handler", **options}}))
    arguments = (str(folder), "--name", "gpt", "--job-queue-size", "300")
    server = RunningServer(folder / "log", *arguments, env={"OMP_NUM_THREADS": "1"})
    server.start_timeout_s = LOADS_S
    yield server.wait_ready()
    server.stop()


def order(i: int) -> dict[str, object]:
    """What client i asks for; every second one is sampled, with a seed."""
    sampling = {"temperature": 0.9, "seed": i} if i % 2 else {"temperature": 0}
    return {"prompt": PROMPTS[i % len(PROMPTS)], "max_new_tokens": NUM_TOKENS, "stream": True, **sampling}


async def ask(port: int, body: dict[str, object], *, vanishes: bool = False) -> str:
    """The text of a stream; or its first piece, and the connection cut."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    content = json.dumps({**body, "max_new_tokens": 500} if vanishes else body).encode()
    head = f"POST /predictions/gpt HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n"
    writer.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + content)
    answer = await reader.readuntil(b"\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 "), answer
    text = b""
    while size := int(await reader.readline(), 16):
        text += await reader.readexactly(size)
        await reader.readexactly(2)
        if vanishes:
            writer.transport.abort()
            return ""
    writer.close()
    return text.decode()


def blocks_used(server) -> int:
    return server.manage("GET", "/models/gpt?customized=true").json[0]["customizedMetadata"]["blocks_used"]


async def all_at_once(port: int) -> list[str]:
    return await asyncio.gather(*(ask(port, order(i), vanishes=i % VANISHING_EVERY == 3) for i in range(NUM_CLIENTS)))


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_clients_that_vanish_change_nothing_for_the_others(server):
    alone = {i: asyncio.run(ask(server.port, order(i))) for i in range(0, 2 * len(PROMPTS), 7)}
    first = asyncio.run(all_at_once(server.port))
    assert {i: first[i] for i in alone if i % VANISHING_EVERY != 3} == {
        i: text for i, text in alone.items() if i % VANISHING_EVERY != 3
    }
    worker = psutil.Process(server.worker_pids("gpt")[0])
    before = worker.memory_info().rss
    assert asyncio.run(all_at_once(server.port)) == first  # in another company, at other times
    assert worker.memory_info().rss - before < 40_000_000
    deadline = time.monotonic() + 30
    while blocks_used(server) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert blocks_used(server) == 0
