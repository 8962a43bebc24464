"""PagesApi: the paths that people try first: /, /docs, /openapi.json and /health."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from flambeau import __version__
from flambeau.config.server import Address
from flambeau.errors import BadRequest, InvalidKey
from flambeau.frontend.authorization import Keys
from flambeau.frontend.http.api_descriptions import DescriptionApi
from flambeau.frontend.http.errors import JSON_TYPE, respond_json
from flambeau.frontend.http.exchange import Exchange, Header
from flambeau.frontend.http.openapi import OBJECT, Operation, document
from flambeau.frontend.http.router import Endpoint, not_allowed, not_found, query_of
from flambeau.frontend.key_file import Kind
from flambeau.serving.server import Server

STATIC = Path(__file__).parent / "static"
# A page may load only what this server sends, and run only that.
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' blob: data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
PAGE_HEADERS: tuple[Header, ...] = (
    ("content-security-policy", POLICY),
    ("referrer-policy", "no-referrer"),
)
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
FILES = ("docs.js", "docs.css")
READ = ("GET", "HEAD")
HEALTH = Operation(
    path="/health",
    method="get",
    id="health",
    summary="Whether every model can answer, and which cannot.",
    answers={200: ("Yes", OBJECT), 503: ("No", OBJECT)},
)
GROUPS = ("inference", "openai", "kserve", "management", "health", "metrics")
_KSERVE = re.compile(r"/v[12](/|$)")
_PROBES = ("/ping", "/livez", "/readyz", "/startupz", "/health")


def group_of(operation: Operation, openai: Sequence[Operation], own: str) -> str:
    """The API that an operation belongs to."""
    if operation in openai:
        return "openai"
    if operation.path == "/metrics":
        return "metrics"
    if operation.path in _PROBES:
        return "health"
    return "kserve" if _KSERVE.match(operation.path) else own


def grouped(operations: Mapping[Kind, Sequence[Operation]], openai: Sequence[Operation]) -> dict[str, list[Operation]]:
    """The operations of a listener by API, each once."""
    groups: dict[str, list[Operation]] = {group: [] for group in GROUPS}
    for kind, listed in operations.items():
        for operation in (HEALTH, *listed):
            group = groups[group_of(operation, openai, kind)]
            if operation not in group and operation.path != "/":
                group.append(operation)
    return {group: found for group, found in groups.items() if found}


def api_document(groups: Mapping[str, Sequence[Operation]], *, needs_key: bool) -> dict[str, Any]:
    """The OpenAPI document of a listener, with its operations tagged by API."""
    whole = document("Flambeau", [operation for group in groups.values() for operation in group], __version__)
    for group, operations in groups.items():
        for operation in operations:
            whole["paths"][operation.path][operation.method]["tags"] = [group]
    whole["tags"] = [{"name": group} for group in groups]
    if needs_key:
        whole["components"] = {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}}
        whole["security"] = [{"key": []}]
    return whole


class PagesApi:
    """What a browser or a curious client finds at the paths without a model."""

    def __init__(
        self,
        server: Server,
        operations: Mapping[Kind, Sequence[Operation]],
        openai: Sequence[Operation],
        keys: Keys | None,
        readiness: Endpoint,
        home: Endpoint | None = None,
    ) -> None:
        self._server = server
        self._health = readiness  # /health is the path that other servers have
        self._home = home  # the page at / for browsers, if it is not a list of links
        self._kinds = tuple(operations)
        self._keys = keys
        self._description = DescriptionApi([one for group in operations.values() for one in group])
        self._groups = grouped(operations, openai)
        config = server.config
        addresses = {config.inference if kind == "inference" else config.management for kind in operations}
        if config.metrics not in addresses:
            self._groups.pop("metrics", None)
        self._documents: dict[str, bytes] = {}  # made by the first request for each
        self._files = StaticFiles(STATIC)

    def routes(self) -> dict[str, Endpoint]:
        return {
            **self._description.routes(),
            "": self.root,
            "docs": self.docs,
            "openapi.json": self.openapi,
            "health": self._health,
            "favicon.ico": self.icon,
        }

    def root(self, exchange: Exchange, segments: list[str]) -> None:
        """A page for browsers, JSON for everybody else; OPTIONS describes the API."""
        if exchange.method == "OPTIONS":
            self._description.describe(exchange, segments)
        elif exchange.method not in READ:
            not_allowed(exchange)
        elif prefers_html(exchange.header("accept") or ""):
            self._home(exchange, segments) if self._home else self._send_links(exchange)
        else:
            respond_json(exchange, 200, self._overview(exchange))

    def icon(self, exchange: Exchange, segments: list[str]) -> None:
        """/favicon.ico, which browsers ask for without being told; its type says that it is SVG."""
        self._files.send(exchange, "flame.svg") if len(segments) == 1 else not_found(exchange)

    def docs(self, exchange: Exchange, segments: list[str]) -> None:
        """/docs: a page that shows /openapi.json and sends requests; it loads nothing from elsewhere."""
        if exchange.method not in READ:
            not_allowed(exchange)
        elif len(segments) == 1:
            self._files.send(exchange, "docs.html")
        elif len(segments) == 2 and segments[1] in FILES:
            self._files.send(exchange, segments[1])
        else:
            not_found(exchange)

    def openapi(self, exchange: Exchange, segments: list[str]) -> None:
        """/openapi.json[?api=…]: every API of this listener, or one of them."""
        if len(segments) > 1:
            not_found(exchange)
            return
        if exchange.method not in READ:
            not_allowed(exchange)
            return
        wanted = query_of(exchange).get("api", "")
        if wanted and wanted not in self._groups:
            raise BadRequest(f"api is {wanted[:80]!r}; this address has: {', '.join(self._groups)}")
        if wanted not in self._documents:
            groups = {wanted: self._groups[wanted]} if wanted else self._groups
            made = api_document(groups, needs_key=self._keys is not None)
            self._documents[wanted] = msgspec.json.format(msgspec.json.encode(made), indent=2) + b"\n"
        exchange.respond(200, self._documents[wanted], (JSON_TYPE,))

    def _overview(self, exchange: Exchange) -> dict[str, Any]:
        overview: dict[str, Any] = {"name": "flambeau", "version": __version__}
        if self._may_list(exchange):
            overview["models"] = [
                {"name": model.name, "version": model.version, "ready": model.pool.can_answer}
                for model in self._server.registry.defaults()
                if model.is_listed
            ]
        else:
            overview["key"] = "send Authorization: Bearer <key> to see the models"
        return {**overview, "links": self._links(exchange)}

    def _send_links(self, exchange: Exchange) -> None:
        console = other_address(self._server.config.management, exchange.host)
        self._files.send(exchange, "index.html", {"console": console or "/"})

    def _may_list(self, exchange: Exchange) -> bool:
        for kind in self._kinds:
            try:
                if self._keys is not None:
                    self._keys.check(kind, exchange.header("authorization"))
            except InvalidKey:
                continue
            return True
        return False

    def _links(self, exchange: Exchange) -> dict[str, str]:
        config, links = self._server.config, {"docs": "/docs", "openapi": "/openapi.json", "health": "/health"}
        if "inference" in self._kinds:
            links |= {"predictions": "/predictions/{model}", "openai": "/v1"}
        if "management" in self._kinds:
            links["management"] = "/models"
        elif found := other_address(config.management, exchange.host):
            links["management"] = found
        if config.metrics is not None:
            if config.metrics in (config.inference, config.management) and "inference" in self._kinds:
                links["metrics"] = "/metrics"
            elif found := other_address(config.metrics, exchange.host):
                links["metrics"] = f"{found}/metrics"
        return links


class StaticFiles:
    """The files of a page, read once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._contents: dict[str, bytes] = {}
        self.names = frozenset(path.name for path in folder.iterdir() if path.suffix in TYPES)

    def send(self, exchange: Exchange, name: str, values: Mapping[str, str] = MappingProxyType({})) -> None:
        """Send a file; in HTML, `{version}` and `values` are filled in by their names."""
        if exchange.method not in READ:
            not_allowed(exchange)
            return
        if name not in self._contents:
            self._contents[name] = (self._folder / name).read_bytes()
        content = self._contents[name]
        if name.endswith(".html"):
            for key, value in {"version": __version__, **values}.items():
                content = content.replace(b"{%b}" % key.encode(), escape(value).encode())
        exchange.respond(200, content, (("content-type", TYPES[Path(name).suffix]), *PAGE_HEADERS))


def prefers_html(accept: str) -> bool:
    """Whether a client asks for HTML by name, as browsers do; `*/*` does not."""
    return "text/html" in accept.lower()


def other_address(address: Address, host: str | None) -> str:
    """How the client of a request reaches another listener; empty if that is not known."""
    if address.path is not None or not address.port:
        return ""
    if address.host not in ("0.0.0.0", "::"):
        return str(address)
    own = (host or "").rpartition("]")[0] + "]" if (host or "").startswith("[") else (host or "").partition(":")[0]
    return f"{'https' if address.is_tls else 'http'}://{own or 'localhost'}:{address.port}"
