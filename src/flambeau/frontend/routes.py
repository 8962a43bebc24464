"""Which API is served at which address, and with which key."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Literal

from flambeau.config.server import Address
from flambeau.frontend.anthropic.api import OPERATIONS as ANTHROPIC_OPERATIONS
from flambeau.frontend.anthropic.api import AnthropicApi
from flambeau.frontend.authorization import Keys
from flambeau.frontend.console.api import ConsoleApi
from flambeau.frontend.http.api_descriptions import INFERENCE, MANAGEMENT, DescriptionApi
from flambeau.frontend.http.exchange import Exchange
from flambeau.frontend.http.health import HealthApi, MetricsApi
from flambeau.frontend.http.inference import InferenceApi, is_invoke
from flambeau.frontend.http.kserve import KServeApi
from flambeau.frontend.http.management import AdapterApi, ManagementApi, TokenApi, guard, is_adapter_call
from flambeau.frontend.http.openapi import Operation
from flambeau.frontend.http.pages import PagesApi
from flambeau.frontend.http.router import Endpoint, GuardedEndpoint
from flambeau.frontend.http.traced_routes import traced
from flambeau.frontend.http.websocket_sessions import WebSocketApi
from flambeau.frontend.key_file import Kind
from flambeau.frontend.openai.api import OPERATIONS as OPENAI_OPERATIONS
from flambeau.frontend.openai.api import OpenAiApi
from flambeau.frontend.openai.audio import OPERATIONS as AUDIO_OPERATIONS
from flambeau.frontend.openai.audio import AudioApi
from flambeau.frontend.openai_batches.api import OPERATIONS as FILES_OPERATIONS
from flambeau.frontend.openai_batches.api import FilesApi
from flambeau.frontend.openai_responses.api import OPERATIONS as RESPONSES_OPERATIONS
from flambeau.frontend.openai_responses.api import ResponsesApi
from flambeau.serving.server import Server

OPENAI = [*OPENAI_OPERATIONS, *AUDIO_OPERATIONS, *RESPONSES_OPERATIONS, *FILES_OPERATIONS, *ANTHROPIC_OPERATIONS]


def routes_by_address(server: Server, keys: Keys | None) -> dict[Address, dict[str, Endpoint]]:
    """The routes of each listener. APIs at one address share its paths; each keeps its own key."""
    config = server.config
    kserve = KServeApi(server)
    openai = openai_api(server, keys, kserve)
    management, console = management_routes(server, keys, kserve, openai)
    inference = inference_routes(server, keys, kserve, openai)
    if config.management == config.inference:
        inference |= shared_routes(server, keys, inference, management, console)
    apis: defaultdict[Address, dict[str, Endpoint]] = defaultdict(dict)
    if config.metrics is not None:
        metrics = MetricsApi(server).routes()
        if config.keys.metrics_needs_key:
            metrics |= guard({"metrics": metrics["metrics"]}, keys, "inference", config)
        apis[config.metrics].update(metrics | HealthApi(server, keys, "management").probes())
    apis[config.management].update(management)
    apis[config.inference].update(inference)
    return apis


def openai_api(server: Server, keys: Keys | None, kserve: KServeApi) -> OpenAiApi:
    others: dict[str, Endpoint] = {
        "audio": AudioApi(server).v1,
        "messages": AnthropicApi(server).v1,
        "responses": ResponsesApi(server).v1,
    }
    openai = OpenAiApi(server, kserve.v1, others)
    files = FilesApi(server, keys, openai.v1, server.config.files_folder)
    others |= {"files": files.files, "batches": files.batches}
    files.start()
    return openai


def management_routes(
    server: Server, keys: Keys | None, kserve: KServeApi, openai: OpenAiApi
) -> tuple[dict[str, Endpoint], ConsoleApi | None]:
    """Those of the management API, and the console among them, if there is one."""
    routes: dict[str, Endpoint] = {
        **DescriptionApi(MANAGEMENT).routes(),
        **ManagementApi(server).routes(),
        **HealthApi(server, keys, "management").routes(),
        **AdapterApi(server, kserve.v1_models).routes(),
        **extension_routes(server, "management"),
        **TokenApi(keys).routes(),
    }
    console = None
    if server.config.pages:
        playground = {**InferenceApi(server).routes(), **openai.routes()}
        console = ConsoleApi(server, keys, {path: playground[path] for path in ("predictions", "explanations", "v1")})
        console.start()
        routes.update(console.routes())
        pages = PagesApi(server, {"management": MANAGEMENT}, OPENAI, keys, routes["readyz"], console.home)
        routes.update(pages.routes())
    return guard(routes, keys, "management", server.config), console


def inference_routes(server: Server, keys: Keys | None, kserve: KServeApi, openai: OpenAiApi) -> dict[str, Endpoint]:
    routes: dict[str, Endpoint] = {
        **DescriptionApi([*INFERENCE, *OPENAI]).routes(),
        **InferenceApi(server).routes(),
        **WebSocketApi(server, keys).routes(),
        **HealthApi(server, keys, "inference").routes(),
        **kserve.routes(),
        **openai.routes(),
        **extension_routes(server, "inference"),
    }
    if server.config.pages:
        own: Mapping[Kind, Sequence[Operation]] = {"inference": [*INFERENCE, *OPENAI]}
        routes.update(PagesApi(server, own, OPENAI, keys, routes["readyz"]).routes())
    return guard(traced(routes, server.tracing), keys, "inference", server.config)


def shared_routes(
    server: Server,
    keys: Keys | None,
    inference: Mapping[str, Endpoint],
    management: Mapping[str, Endpoint],
    console: ConsoleApi | None,
) -> dict[str, Endpoint]:
    """Those of paths that both APIs have, at an address that they share."""
    routes: dict[str, Endpoint] = {
        "models": SharedPath(inference["models"], management["models"], lambda path: not is_invoke(path)),
        "v1": SharedPath(inference["v1"], management["v1"], is_adapter_call),
        **DescriptionApi([*INFERENCE, *OPENAI, *MANAGEMENT]).routes(),
    }
    if console is not None:
        both: Mapping[Kind, Sequence[Operation]] = {"inference": [*INFERENCE, *OPENAI], "management": MANAGEMENT}
        pages = PagesApi(server, both, OPENAI, keys, inference["readyz"], console.home)
        routes |= {**pages.routes(), **console.routes()}
    return routes


def extension_routes(server: Server, api: Literal["inference", "management"]) -> dict[str, Endpoint]:
    return {path: route for extension in server.extensions for path, route in extension.http_routes(api).items()}


class SharedPath:
    """A first segment that both APIs have, at an address that they share; `manages` tells which paths manage.

    /models/{model}/invoke predicts, and other paths below /models manage. Adapters are managed below /v1.
    """

    __slots__ = ("_inference", "_management", "_manages")

    def __init__(self, inference: Endpoint, management: Endpoint, manages: Callable[[list[str]], bool]) -> None:
        self._inference = inference
        self._management = management
        self._manages = manages

    def __call__(self, exchange: Exchange, segments: list[str]) -> Coroutine[Any, Any, None] | None:
        return self._endpoint(segments)(exchange, segments)

    def check(self, exchange: Exchange, segments: list[str]) -> None:
        """Note whose key the caller has sent; raise InvalidKey if it is not valid."""
        if isinstance(endpoint := self._endpoint(segments), GuardedEndpoint):
            endpoint.check(exchange, segments)

    def _endpoint(self, segments: list[str]) -> Endpoint:
        return self._management if self._manages(segments) else self._inference
