"""RoutedApp: finds the endpoint of a path, and turns what it raises into an answer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Protocol, runtime_checkable
from urllib.parse import parse_qsl, unquote

from flambeau.errors import BadRequest, FlambeauError
from flambeau.frontend.http.exchange import Exchange
from flambeau.frontend.http.problems import JSON_TYPE, NOT_ALLOWED, NOT_FOUND, problem, respond_problem

logger = logging.getLogger(__name__)

# An endpoint gets the exchange and the path's segments. It answers, or returns the work that will.
Endpoint = Callable[[Exchange, list[str]], Coroutine[Any, Any, None] | None]


@runtime_checkable
class Guarded(Protocol):
    """An endpoint that can tell who may come in before the body has."""

    def __call__(self, exchange: Exchange, segments: list[str]) -> Coroutine[Any, Any, None] | None:
        """Answer, or return the work that will."""

    def check(self, exchange: Exchange, segments: list[str]) -> None:
        """Raise InvalidKey unless the caller may come in."""


ANYTHING = "*"  # the route of every path that has no other


class RoutedApp:
    """Routes by the first segment of the path; `""` is the root."""

    def __init__(self, routes: Mapping[str, Endpoint], *, details: bool, has_keys: bool = False) -> None:
        self.routes = routes
        self.details = details
        self.has_keys = has_keys
        self._otherwise = routes[ANYTHING]

    def handle(self, exchange: Exchange) -> None:
        """Answer an exchange."""
        segments = segments_of(exchange.path)
        endpoint = self.routes.get(segments[0], self._otherwise)
        try:
            work = endpoint(exchange, segments)
        except Exception as error:
            self._answer_error(exchange, error)
            return
        if work is not None:
            exchange.run(self._guard(exchange, work))

    def admit(self, exchange: Exchange) -> None:
        """Raise what keeps a large body out: a key that is missing, or a path that is open to all and takes none."""
        if not self.has_keys:
            return
        segments = segments_of(exchange.path)
        endpoint = self.routes.get(segments[0], self._otherwise)
        if not isinstance(endpoint, Guarded):
            raise BadRequest("There is no use for a body here.")
        endpoint.check(exchange, segments)

    def refuse(self, exchange: Exchange, error: Exception) -> None:
        """Answer a request that was not admitted."""
        self._answer_error(exchange, error)

    def too_large(self, exchange: Exchange, limit: int) -> None:
        """Answer a request whose body is over the limit."""
        text = f"The request body is larger than {limit} bytes; the server's max_request_size sets this limit."
        respond_plainly(exchange, 413, "PayloadTooLargeException", text)

    def malformed(self, exchange: Exchange, reason: str) -> None:
        """Answer bytes that are not HTTP."""
        logger.info("Invalid HTTP message: %s", reason)
        respond_plainly(exchange, 400, "BadRequestException", "Invalid HTTP message.")

    async def _guard(self, exchange: Exchange, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except Exception as error:
            self._answer_error(exchange, error)

    def _answer_error(self, exchange: Exchange, error: Exception) -> None:
        if exchange.is_started:
            exchange.abort()
        elif isinstance(error, FlambeauError):
            respond_problem(exchange, error, details=self.details)
            return
        else:
            respond_plainly(exchange, 500, "InternalServerException", "Internal server error.")
        logger.error("request %s: %s %s failed", exchange.request_id, exchange.method, exchange.path, exc_info=error)


def segments_of(path: str) -> list[str]:
    """The parts of a path between slashes, percent-decoded; never empty."""
    segments = path.strip("/").split("/")
    return [unquote(segment) for segment in segments] if "%" in path else segments


def query_of(exchange: Exchange) -> dict[str, str]:
    """The query's parameters; of a repeated one, the first counts."""
    return dict(reversed(parse_qsl(exchange.query, keep_blank_values=True)))


def nothing_here(exchange: Exchange, segments: list[str]) -> None:
    """The endpoint of paths that lead nowhere."""
    not_found(exchange)


def not_found(exchange: Exchange) -> None:
    """Answer that there is nothing at this path."""
    respond_plainly(exchange, 404, "ResourceNotFoundException", NOT_FOUND)


def not_allowed(exchange: Exchange) -> None:
    """Answer that this path does not take this method."""
    respond_plainly(exchange, 405, "MethodNotAllowedException", NOT_ALLOWED)


def respond_plainly(exchange: Exchange, status: int, kind: str, message: str) -> None:
    """Answer with an error that is no exception."""
    exchange.respond(status, problem(exchange.path, status, kind, message), (JSON_TYPE,))
