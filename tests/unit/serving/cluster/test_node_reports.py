"""A report of the machines of a cluster."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from flambeau.serving.cluster.node_reports import MAX_RESTARTS, _connected


async def test_a_placer_that_ends_again_and_again_is_not_waited_for():
    placer = SimpleNamespace(num_restarts=MAX_RESTARTS)
    cluster = SimpleNamespace(connection="", problem="there is no Ray", placer=placer)
    async with asyncio.timeout(10):
        with pytest.raises(TimeoutError, match="there is no Ray"):
            await _connected(cluster)
