"""Extensions: optional APIs with state of their own, which a server loads by import string."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

# The extensions of every server, as `module:factory`; a factory takes the server.
EXTENSIONS = ("flambeau.torchserve.workflows.http_api:WorkflowExtension",)

# By first path segment, as the HTTP frontend calls them: with the exchange and the other segments.
Routes = Mapping[str, Callable[..., Any]]


class Extension(Protocol):
    """What a server and its HTTP frontend need of an extension."""

    @property
    def num_running(self) -> int:
        """Requests in progress; a draining server waits for them."""

    def http_routes(self, api: Literal["inference", "management"]) -> Routes:
        """The paths it adds to one of the APIs."""

    async def close(self) -> None:
        """Release its files; the models of the server are closed by now."""
