"""Router: finds the endpoint of a path, and turns its exceptions into responses."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Mapping
from functools import partial
from typing import Any, Protocol, runtime_checkable
from urllib.parse import parse_qsl, unquote

from flambeau.config.server import ErrorStyle
from flambeau.errors import BadRequest, FlambeauError, ForeignRequest
from flambeau.frontend.authorization import HostCheck
from flambeau.frontend.http.bodies import media_type_of
from flambeau.frontend.http.compressed_bodies import decode_body
from flambeau.frontend.http.errors import JSON_TYPE, NOT_ALLOWED, NOT_FOUND, error_body, respond_error
from flambeau.frontend.http.exchange import Exchange
from flambeau.frontend.http.idempotency import IdempotentExchange, IdempotentReplies
from flambeau.frontend.http.unknown_paths import missing_path

logger = logging.getLogger(__name__)

# An endpoint gets the exchange and the path's segments. It responds, or returns a coroutine that will.
Endpoint = Callable[[Exchange, list[str]], Coroutine[Any, Any, None] | None]


@runtime_checkable
class GuardedEndpoint(Protocol):
    """An endpoint that can check a caller's key before the body has arrived, or before it is called."""

    def __call__(self, exchange: Exchange, segments: list[str]) -> Coroutine[Any, Any, None] | None: ...

    def check(self, exchange: Exchange, segments: list[str]) -> None:
        """Note whose key the caller has sent; raise InvalidKey if it is not valid."""


class UnknownPath(Exception):
    """No endpoint has this path."""


LINKED_PAGES = ("", "docs")  # other sites may link to them
ANYTHING = "*"  # the route of every other path
RUN_ONCE = frozenset({"predictions", "explanations", "invocations", "v1", "v2"})  # with an Idempotency-Key
UPGRADE = "upgrade/"  # before the first segment of a path whose requests may change the protocol


class Router:
    """Routes by the first segment of the path; `""` is the root.

    Compressed bodies are decoded, up to `max_body_bytes`; without `decodes_all` only JSON and those of KServe's second
    protocol: handlers get others as they were sent.
    """

    def __init__(
        self,
        routes: Mapping[str, Endpoint],
        *,
        style: ErrorStyle,
        has_keys: bool = False,
        max_body_bytes: int = 1 << 20,
        decodes_all: bool = True,
        host_check: HostCheck | None = None,
        repeats: IdempotentReplies | None = None,
    ) -> None:
        self.routes = routes
        self.style = style
        self.has_keys = has_keys
        self._max_body_bytes = max_body_bytes
        self._decodes_all = decodes_all
        self._host_check = host_check
        self._known_hosts = host_check.known if host_check is not None else None
        self._repeats = repeats
        self._otherwise = routes[ANYTHING]

    def handle(self, exchange: Exchange) -> None:
        """Respond now, or later from a task of the exchange."""
        if exchange.content_encoding and exchange.body is not None and self._decodes(exchange):
            exchange.run(self._guard(exchange, self._handle_decoded(exchange)))
            return
        segments = segments_of(exchange.path)
        endpoint = self.routes.get(segments[0], self._otherwise)
        known = self._known_hosts
        try:
            # Every prediction comes through here: no call where a program sent the request.
            if known is not None and not (
                exchange.host in known and exchange.origin is None and not exchange.is_cross_site
            ):
                self._check_page(exchange, segments[0])
            if type(exchange) is IdempotentExchange:
                work = self._run_once(exchange, segments, endpoint)
            else:
                work = endpoint(exchange, segments)
        except Exception as error:
            self._respond_error(exchange, error)
            return
        if work is not None:
            exchange.run(self._guard(exchange, work))

    def _run_once(
        self, exchange: IdempotentExchange, segments: list[str], endpoint: Endpoint
    ) -> Coroutine[Any, Any, None] | None:
        """Of a request with an Idempotency-Key, which may have run already."""
        if self._repeats is None or exchange.method != "POST" or segments[0] not in RUN_ONCE:
            return endpoint(exchange, segments)
        if isinstance(endpoint, GuardedEndpoint):
            endpoint.check(exchange, segments)
        return self._repeats.run(exchange, partial(endpoint, exchange, segments), self)

    def _decodes(self, exchange: Exchange) -> bool:
        is_known = "json" in media_type_of(exchange) or exchange.path.startswith("/v2/")  # clients of KServe compress
        return self._decodes_all or is_known

    async def _handle_decoded(self, exchange: Exchange) -> None:
        self.admit(exchange)  # nothing is decompressed for a sender without a key
        await decode_body(exchange, self._max_body_bytes)
        self.handle(exchange)

    def upgrade(self, exchange: Exchange) -> bool:
        """Respond to a request for another protocol; False: this path has none, and the request is an ordinary one."""
        segments = segments_of(exchange.path)
        endpoint = self.routes.get(UPGRADE + segments[0])
        if endpoint is None:
            return False
        try:
            self._check_page(exchange, segments[0])
            endpoint(exchange, segments)
        except Exception as error:
            self._respond_error(exchange, error)
        return True

    def admit(self, exchange: Exchange) -> None:
        """Raise the error that rejects a large body: a missing key, a foreign page, or a path that takes no body."""
        segments = segments_of(exchange.path)
        self._check_page(exchange, segments[0])
        if not self.has_keys:
            return
        endpoint = self.routes.get(segments[0], self._otherwise)
        if not isinstance(endpoint, GuardedEndpoint):
            raise BadRequest("There is no use for a body here.")
        endpoint.check(exchange, segments)

    def _check_page(self, exchange: Exchange, root: str) -> None:
        """Raise ForeignRequest if a page of another site sent the request, and no key is asked for."""
        if self._host_check is None:
            return
        self._host_check.check(exchange.host, exchange.origin)
        # A link, a frame or an image carries no Origin.
        if exchange.is_cross_site and exchange.origin is None and root not in LINKED_PAGES:
            raise ForeignRequest(
                "A page of another site may not call this server. Open the address itself, or turn token "
                "authorization on."
            )

    def reject(self, exchange: Exchange, error: Exception) -> None:
        self._respond_error(exchange, error)

    def too_large(self, exchange: Exchange, limit: int) -> None:
        text = f"The request body is larger than {limit} bytes; the server's max_request_size sets this limit."
        respond_status(exchange, 413, "PayloadTooLargeException", text)

    def malformed(self, exchange: Exchange, reason: str) -> None:
        logger.info("Invalid HTTP message: %s", reason)
        body = error_body(exchange.path, 400, "BadRequestException", "Invalid HTTP message.", cause=reason)
        exchange.respond(400, body, (JSON_TYPE,))

    async def _guard(self, exchange: Exchange, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:
            self._respond_error(exchange, error)

    def _respond_error(self, exchange: Exchange, error: Exception) -> None:
        if exchange.is_started:
            exchange.abort()
            if isinstance(error, FlambeauError):  # usually the client has disconnected
                logger.info("request %s: %s", exchange.request_id, error, extra=exchange.log_fields)
                return
        elif isinstance(error, FlambeauError):
            respond_error(exchange, error, self.style)
            return
        elif isinstance(error, UnknownPath):
            segments = segments_of(exchange.path)
            text = missing_path(exchange.method, segments, self.routes) if self.style.is_plain else NOT_FOUND
            respond_status(exchange, 404, "ResourceNotFoundException", text)
            return
        else:
            respond_status(exchange, 500, "InternalServerException", "Internal server error.")
        text, extra = "request %s: %s %s failed", exchange.log_fields
        logger.error(text, exchange.request_id, exchange.method, exchange.path, exc_info=error, extra=extra)


def segments_of(path: str) -> list[str]:
    """The parts of a path between slashes, percent-decoded; never empty."""
    segments = path.strip("/").split("/")
    return [unquote(segment) for segment in segments] if "%" in path else segments


def query_of(exchange: Exchange) -> dict[str, str]:
    """The parameters of the query; of a repeated one, the first counts."""
    return dict(reversed(parse_qsl(exchange.query, keep_blank_values=True)))


def unknown_path(exchange: Exchange, segments: list[str]) -> None:
    not_found(exchange)


def not_found(exchange: Exchange) -> None:
    """Reject the path; the router knows what else there is."""
    raise UnknownPath


def not_allowed(exchange: Exchange) -> None:
    respond_status(exchange, 405, "MethodNotAllowedException", NOT_ALLOWED)


def respond_status(exchange: Exchange, status: int, kind: str, message: str) -> None:
    exchange.respond(status, error_body(exchange.path, status, kind, message), (JSON_TYPE,))
