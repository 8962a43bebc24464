"""UpgradeExchange: a request to speak WebSocket instead of HTTP."""

from __future__ import annotations

from collections.abc import Callable

from flambeau import websocket_frames as frames
from flambeau.errors import BadRequest
from flambeau.frontend.http.exchange import Exchange
from flambeau.frontend.http.websocket_connection import SocketSession
from flambeau.serving.traffic_split import VERSION_HEADER

PROTOCOL = "flambeau"
KEY_PROTOCOL = "flambeau.key."  # a page cannot send headers, so it offers its key as a protocol
VERSION = "13"


class UpgradeExchange(Exchange):
    """A request to speak WebSocket. It is answered by `accept`, or like any other request."""

    __slots__ = ("_on_accept",)

    def __init__(
        self,
        exchange: Exchange,
        on_accept: Callable[[UpgradeExchange, SocketSession], None],
    ) -> None:
        super().__init__(
            exchange._connection, exchange.method, exchange.path, exchange.headers, exchange.version, exchange.arrived
        )
        self.query = exchange.query
        self.request_id = exchange.request_id
        self.priority, self.timeout = exchange.priority, exchange.timeout
        self.host, self.origin = exchange.host, exchange.origin
        self.keeps_alive = False
        self._on_accept = on_accept
        offered = [name.strip() for name in (self.header("sec-websocket-protocol") or "").split(",")]
        key = next((name.removeprefix(KEY_PROTOCOL) for name in offered if name.startswith(KEY_PROTOCOL)), "")
        if key and self.header("authorization") is None:
            self.headers = [*self.headers, ("authorization", f"Bearer {key}")]

    def accept(self, session: SocketSession) -> None:
        """Switch protocols; the session gets the messages from now on."""
        self._on_accept(self, session)

    def check_handshake(self) -> None:
        """Raise BadRequest unless this is a handshake of the only version there is."""
        if self.header("sec-websocket-version") != VERSION:
            raise BadRequest(f"The WebSocket version must be {VERSION} (Sec-WebSocket-Version).")
        if self.version == "1.0":
            raise BadRequest("A WebSocket needs HTTP/1.1, and the request is HTTP/1.0.")
        names = [name.lower() for name, _ in self.headers]
        if "transfer-encoding" in names or (self.header("content-length") or "0").strip("0"):
            raise BadRequest("The request for a WebSocket must have no body (Content-Length, Transfer-Encoding).")
        if names.count("sec-websocket-key") > 1:
            raise BadRequest("There are two Sec-WebSocket-Key headers; send one.")
        if not frames.is_key(self.header("sec-websocket-key") or ""):
            raise BadRequest("Sec-WebSocket-Key must be 16 bytes in base64.")

    def head(self) -> bytes:
        """The response that switches protocols."""
        lines = [
            "HTTP/1.1 101 Switching Protocols",
            "upgrade: websocket",
            "connection: Upgrade",
            f"sec-websocket-accept: {frames.accept_key(self.header('sec-websocket-key') or '')}",
            f"x-request-id: {self.request_id}",
            *([f"{VERSION_HEADER}: {self.model_version}"] if self.model_version else ()),
        ]
        offered = (self.header("sec-websocket-protocol") or "").split(",")
        if PROTOCOL in map(str.strip, offered):
            lines.append(f"sec-websocket-protocol: {PROTOCOL}")
        return "\r\n".join([*lines, "", ""]).encode("latin-1", "replace")


def is_websocket(exchange: Exchange) -> bool:
    """Whether a request to change the protocol means this one."""
    return exchange.method == "GET" and (exchange.header("upgrade") or "").lower() == "websocket"
