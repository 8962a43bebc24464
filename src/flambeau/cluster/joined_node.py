"""A machine that joins a server by itself and starts agents for it: `flambeau cluster join HOST:PORT`."""

from __future__ import annotations

import asyncio
import hmac
import logging
import os
import socket

import msgspec

from flambeau.cluster.local_placer import LocalPlacer
from flambeau.serving.workers.host_resources import count_cores, count_gpus
from flambeau.wire.cluster_messages import ControlChannel, NodeInfo, Nodes, ToPlacer, Welcome, to_placer_decoder
from flambeau.wire.tls import (
    CONNECT_S,
    HEARTBEAT_S,
    WrongServer,
    client_context,
    fingerprint_of,
    keep_alive,
    proof_of,
    split_address,
)

logger = logging.getLogger(__name__)

DELAYS_S = (0.5, 1.0, 2.0, 5.0)


def own_node() -> NodeInfo:
    """This machine. A pod has a name of its own, which is also its host name."""
    host = socket.gethostname()
    resources = {"CPU": float(count_cores()), "GPU": float(count_gpus())}
    return NodeInfo(f"{host}-{os.getpid()}", host, "", True, resources)


class JoinedMachine(LocalPlacer):
    """Places agents on this machine alone, for a server that it has dialed."""

    def __init__(self, address: str, secret: str) -> None:
        super().__init__([own_node()])
        self._address = address
        self._secret = secret
        self._is_welcome = False

    async def run_once(self) -> None:
        """Serve until the connection ends; raises WrongServer, OSError or TimeoutError."""
        loop = asyncio.get_running_loop()
        self._closed: asyncio.Future[str] = loop.create_future()
        self._channel = ControlChannel(to_placer_decoder, self._on_first, self._closed.set_result)
        self._is_welcome = False
        host, port = split_address(self._address)
        async with asyncio.timeout(CONNECT_S):
            transport, _ = await loop.create_connection(asyncio.Protocol, host, port, ssl=client_context())
        certificate = transport.get_extra_info("ssl_object").getpeercert(binary_form=True)
        self._fingerprint = fingerprint_of(certificate)
        keep_alive(transport.get_extra_info("socket"), HEARTBEAT_S)
        transport.set_protocol(self._channel)
        self._channel.connection_made(transport)
        transport.write(proof_of(self._secret, "join", self._fingerprint).encode())
        watch = loop.create_task(self._watch())
        try:
            await self._closed
        finally:
            watch.cancel()
            self.remove_all()
        if not self._is_welcome:
            raise WrongServer("the server has another secret, or is another server")

    def _on_first(self, message: ToPlacer) -> None:
        """Nothing is done for a server that has not shown that it knows the secret."""
        if isinstance(message, Welcome):
            expected = proof_of(self._secret, "welcome", self._fingerprint)
            if hmac.compare_digest(message.proof, expected):
                self._is_welcome = True
                self._channel.send(Nodes(0, self._nodes))
                logger.info("joined %s", self._address)
                return
        if not self._is_welcome:
            self._channel.close()
            return
        if hasattr(message, "address"):  # as this machine reaches it, by a name of a service perhaps
            message = msgspec.structs.replace(message, address=self._address)
        self._on_message(message)


async def join(address: str, secret: str) -> None:
    """Join a server, and again whenever it is gone."""
    failures = 0
    while True:
        machine = JoinedMachine(address, secret)
        try:
            await machine.run_once()
            failures = 0
            logger.warning("%s has closed the connection", address)
        except (OSError, TimeoutError, WrongServer) as error:
            if not failures:
                logger.warning("%s cannot be joined and is tried again: %s", address, error or "no answer")
            failures += 1
        await asyncio.sleep(DELAYS_S[min(failures, len(DELAYS_S) - 1)])
