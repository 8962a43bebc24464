from __future__ import annotations

import asyncio

from flambeau.config.server import MetricsConfig, ServerConfig
from flambeau.serving.server import Server
from flambeau.serving.server_extensions import EXTENSIONS

CONFIG = ServerConfig(measure=MetricsConfig(system=False))


class Greetings:
    """An extension with one path, and a request in progress for a while."""

    def __init__(self, server):
        self.server = server
        self.num_running = 1
        self.is_closed = False

    def http_routes(self, api):
        return {"greet": print} if api == "inference" else {}

    async def close(self):
        self.is_closed = True


async def test_a_server_drains_and_closes_its_extensions():
    loop = asyncio.get_running_loop()
    async with Server(CONFIG, extensions=[f"{__name__}:Greetings"]) as server:
        [extension] = server.extensions
        loop.call_later(0.05, setattr, extension, "num_running", 0)
        await server.drain(loop.time() + 30)
        assert extension.num_running == 0
        assert not extension.is_closed
    assert extension.server is server
    assert extension.is_closed


def test_the_extensions_of_every_server_can_be_loaded():
    server = Server(CONFIG)
    assert len(server.extensions) == len(EXTENSIONS)
    assert {*server.extensions[0].http_routes("inference")} == {"wfpredict"}
    assert {*server.extensions[0].http_routes("management")} == {"workflows"}
