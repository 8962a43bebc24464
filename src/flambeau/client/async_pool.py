"""Connections of the client for the tasks of an event loop, which are kept for its next calls."""

from __future__ import annotations

import asyncio
import ssl
from typing import Self

from flambeau.client.transport import (
    MAX_IDLE,
    MAX_RESPONSE_BYTES,
    READ_BYTES,
    ResponseParser,
    ServerAddress,
    WireRequest,
    no_server,
    time_left,
)
from flambeau.errors import CallTimedOut, NoConnection
from flambeau.http_client import HttpReply, tls_context


class AsyncConnection:
    """One connection on an asyncio stream."""

    def __init__(
        self,
        address: ServerAddress,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        max_response_bytes: int = MAX_RESPONSE_BYTES,
    ) -> None:
        self._address = address
        self._reader = reader
        self._writer = writer
        self.max_response_bytes = max_response_bytes
        self._parser = ResponseParser(max_response_bytes)

    @classmethod
    async def open(
        cls,
        address: ServerAddress,
        tls: ssl.SSLContext | None,
        deadline: float | None,
        max_response_bytes: int = MAX_RESPONSE_BYTES,
    ) -> Self:
        try:
            async with asyncio.timeout(time_left(deadline)):
                if address.path:
                    reader, writer = await asyncio.open_unix_connection(address.path)
                else:
                    context = (tls or tls_context()) if address.is_tls else None
                    reader, writer = await asyncio.open_connection(address.host, address.port, ssl=context)
        except TimeoutError:
            raise CallTimedOut(f"{address} did not accept a connection in time") from None
        except OSError as error:
            raise no_server(address, error) from None
        return cls(address, reader, writer, max_response_bytes)

    async def send(self, request: WireRequest, deadline: float | None) -> None:
        self._parser = ResponseParser(self.max_response_bytes)
        try:
            await self.send_bytes(request.encode(self._address), deadline)
        except NoConnection:
            pass  # it may have answered before it closed

    async def send_bytes(self, data: bytes, deadline: float | None) -> None:
        self._writer.write(data)
        try:
            async with asyncio.timeout(time_left(deadline)):
                await self._writer.drain()
        except TimeoutError:
            raise CallTimedOut("the server did not take the request in time") from None
        except OSError as error:
            raise self._broken(error) from None

    async def read_raw(self, deadline: float | None) -> bytes:
        """Bytes of the protocol that follows the response; empty if the server has closed."""
        if self._parser.is_upgraded and (data := self._parser.take()):
            return data
        while True:
            try:
                async with asyncio.timeout(time_left(deadline)):
                    return await self._reader.read(READ_BYTES)
            except TimeoutError:
                time_left(deadline)
            except OSError as error:
                raise self._broken(error) from None

    def _broken(self, error: OSError) -> NoConnection:
        return NoConnection(f"the connection to {self._address} broke: {error.strerror or error}")

    async def read_head(self, deadline: float | None) -> HttpReply:
        while not self._parser.has_head:
            await self._receive(deadline)
        return HttpReply(self._parser.status, self._parser.headers, b"")

    async def read(self, deadline: float | None) -> bytes:
        """More of the body; empty at its end."""
        while True:
            if data := self._parser.take():
                return data
            if self._parser.is_complete:
                return b""
            await self._receive(deadline)

    async def read_whole(self, deadline: float | None) -> HttpReply:
        head = await self.read_head(deadline)
        self._parser.check_head()
        while not self._parser.is_complete:
            await self._receive(deadline)
        return HttpReply(head.status, head.headers, self._parser.take())

    async def _receive(self, deadline: float | None) -> None:
        self._parser.feed(await self.read_raw(deadline))

    @property
    def is_reusable(self) -> bool:
        return self._parser.is_complete and self._parser.keeps_alive and not self._parser.is_upgraded

    @property
    def is_stale(self) -> bool:
        return self._reader.at_eof() or self._writer.is_closing()

    def close(self) -> None:
        self._writer.close()

    async def wait_closed(self) -> None:
        self.close()
        try:
            await self._writer.wait_closed()
        except OSError:
            pass


class AsyncPool:
    """Connections to one server, for the tasks of one event loop."""

    def __init__(
        self, url: str, tls: ssl.SSLContext | None = None, max_response_bytes: int = MAX_RESPONSE_BYTES
    ) -> None:
        self.address = ServerAddress.parse(url)
        self._tls = tls
        self._max_response_bytes = max_response_bytes
        self._idle: list[AsyncConnection] = []

    async def take(self, deadline: float | None) -> AsyncConnection:
        while self._idle:
            connection = self._idle.pop()
            if not connection.is_stale:
                return connection
            connection.close()
        return await AsyncConnection.open(self.address, self._tls, deadline, self._max_response_bytes)

    def give_back(self, connection: AsyncConnection) -> None:
        if connection.is_reusable and len(self._idle) < MAX_IDLE:
            self._idle.append(connection)
        else:
            connection.close()

    async def close(self) -> None:
        idle, self._idle = self._idle, []
        for connection in idle:
            await connection.wait_closed()
