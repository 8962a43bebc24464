"""ServerConfig: the settings of one server process."""

from __future__ import annotations

import importlib.util
import ipaddress
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, TypeVar
from urllib.parse import urlsplit

from flambeau.errors import ConfigError

logger = logging.getLogger(__name__)

T = TypeVar("T")
LOOPBACK = "127.0.0.1"
ANY_VERSION = ""  # in `models`
MAX_HOST = 253  # characters, of DNS
MAX_SOCKET_PATH_BYTES = 107  # of Linux
MAX_SHOWN = 80  # characters of an invalid value in its error message
# The variables with the keys of the APIs. Processes that run the code of models inherit none of SECRET_VARIABLES.
KEY_VARIABLES = {
    "management": "FLAMBEAU_MANAGEMENT_KEY",
    "inference": "FLAMBEAU_INFERENCE_KEY",
    "API": "FLAMBEAU_API_KEY",
}
CLUSTER_SECRET = "FLAMBEAU_CLUSTER_SECRET"
MIN_SECRET = 32  # characters
SECRET_VARIABLES = frozenset(
    {*KEY_VARIABLES.values(), "FLAMBEAU_KEY", "FLAMBEAU_KEYSTORE_PASS", CLUSTER_SECRET, "RAY_AUTH_TOKEN"}
)


def is_host(text: str) -> bool:
    """Whether a text can name a host: an IP address, or a name of letters, digits, dots and dashes."""
    try:
        return bool(ipaddress.ip_address(text))
    except ValueError:
        pass
    try:
        text.encode("idna")  # what name resolution does first; it limits the length of each part
    except UnicodeError:
        return False
    return len(text) <= MAX_HOST and re.fullmatch(r"[\w.-]+", text) is not None


def check_socket_path(path: str) -> str:
    """Return the path of a unix socket if the system can open it."""
    size_bytes = len(path.encode("utf-8", "surrogateescape"))
    if not path or "\0" in path or size_bytes > MAX_SOCKET_PATH_BYTES:
        raise ConfigError(f"{brief(path)} is not a path of 1 to {MAX_SOCKET_PATH_BYTES} bytes; write unix:/path")
    return path


def brief(text: str) -> str:
    """A value in an error message."""
    return repr(text) if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]!r}…"


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a listener: host and port, or a unix socket."""

    host: str = LOOPBACK
    port: int = 0
    path: str | None = None
    is_tls: bool = False

    def __post_init__(self) -> None:
        if self.path is None and not is_host(self.host):
            raise ConfigError(f"{brief(self.host)} is not a host; write an IP address, or a name")

    @classmethod
    def parse(cls, text: str, *, default_port: int) -> Address:
        """Read `http://host[:port]`, `https://host[:port]`, `host:port` or `unix:/path`."""
        if text.startswith("unix:"):
            return cls(path=check_socket_path(text.removeprefix("unix:")))
        try:
            url = urlsplit(text if "://" in text else f"http://{text}")
            host, port = url.hostname, url.port or default_port
        except ValueError as error:
            raise ConfigError(f"{brief(text)} is not an address: {str(error)[:MAX_SHOWN]}") from None
        is_plain = not (url.path.strip("/") or url.query or url.fragment or "@" in url.netloc)
        if url.scheme not in ("http", "https") or not is_plain or not is_host(host or ""):
            raise ConfigError(
                f"{brief(text)} is not an address; write http://host:port, https://host:port or unix:/path"
            )
        return cls(host or "", port, is_tls=url.scheme == "https")

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can connect."""
        if self.path is not None or self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False

    def __str__(self) -> str:
        if self.path is not None:
            return f"unix:{self.path}"
        scheme = "https" if self.is_tls else "http"
        return f"{scheme}://[{self.host}]:{self.port}" if ":" in self.host else f"{scheme}://{self.host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """The certificate and its key: two PEM files, or a key store. Whose certificates clients must have, if any."""

    certificate_file: Path | None = None
    private_key_file: Path | None = None
    keystore: Path | None = None
    keystore_pass: str = "changeit"
    keystore_type: str = "PKCS12"
    client_ca_file: Path | None = None  # authorities; clients without a certificate of theirs are refused


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcConfig:
    """The gRPC listeners; one without an address is not opened."""

    inference: Address | None = None
    management: Address | None = None
    # Without grpcio, optional listeners stay closed; others are an error.
    is_optional: bool = field(default=False, compare=False)
    is_tls: bool = False
    inference_max_age_s: float | None = None
    inference_max_age_grace_s: float | None = None
    management_max_age_s: float | None = None
    management_max_age_grace_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KeysConfig:
    """Token authorization: three keys in a file, and those that `flambeau keys` adds to it."""

    is_on: bool | None = None  # None: off on a loopback bind, on otherwise
    expiry_s: float | None = None  # of the inference and the management key; None: valid until they are revoked
    file: Path = Path("key_file.json")
    ping_needs_key: bool = True  # False lets load balancers and probes through
    metrics_needs_key: bool = False  # True: that of inference; scrapers often have none


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsConfig:
    """Which metrics are collected, and whether they go to the endpoint, the metrics logs, or both."""

    mode: Literal["both", "log", "prometheus", "legacy"] = "prometheus"
    file: Path | None = None  # a metrics.yaml; None: the bundled one
    auto_detect: bool = False  # accept metrics of handlers that the file does not define
    system: bool = True  # read the host's metrics every `interval_s`
    system_command: str = ""
    interval_s: float = 60
    vllm_names: bool = False  # metrics of generating models under vLLM's names as well


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingConfig:
    """Whether requests are traced with OpenTelemetry; its OTEL_* variables say where the spans go."""

    is_on: bool = False
    sampling: float = 1.0  # the share of requests that are traced, of those without a traceparent header


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceHeaders:
    """The names of the headers that tie requests into a sequence."""

    id: str = "ts_request_sequence_id"
    start: str = "ts_request_sequence_start"
    end: str = "ts_request_sequence_end"


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorStyle:
    """What clients see of an error."""

    has_details: bool = False  # tracebacks, and the last output of a worker
    # Messages hold the cause, and types fit the status; else both are those that existing clients match.
    is_plain: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """The other machines of a server."""

    manager: str = ""  # ray, ray=HOST:PORT, join or local=NUMBER; empty: there are none
    worker_address: str = ""  # HOST:PORT, where their workers connect; empty: the address that reaches the cluster
    heartbeat_s: float = 3  # after which a silent machine counts as lost

    @property
    def kind(self) -> str:
        return self.manager.partition("=")[0]

    @property
    def address(self) -> str:
        return self.manager.partition("=")[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Addresses, limits and paths of one server."""

    inference: Address = Address(port=8080)
    management: Address = Address(port=8081)
    metrics: Address | None = Address(port=8082)
    grpc: GrpcConfig = GrpcConfig()
    tls: Tls = Tls()
    cluster: ClusterConfig = ClusterConfig()
    cors: tuple[tuple[str, str], ...] = ()  # headers added to every response
    keys: KeysConfig = KeysConfig()
    # Names of the server, `*.example.com` or `*`: where no key is needed, other Host names are refused, apart from
    # addresses, the machine's own name and names that are not public.
    allowed_hosts: tuple[str, ...] = ()
    allow_unprotected: bool = False  # allows public listeners without authorization
    model_api: bool = True  # models may be registered and unregistered over the APIs
    open_inference: bool = True  # serve the Open Inference Protocol's health and metadata calls
    # False: calls are read as existing clients send them. Parameters that are not understood count as absent, KServe
    # paths pass other bodies on to the handler, and answers have the old codes and order.
    strict_calls: bool = True
    model_store: Path | None = None
    allow_missing: bool = False  # the server is ready without startup models that cannot be loaded
    workflow_store: Path | None = None  # None: the model store
    allowed_urls: tuple[str, ...] = ()  # regular expressions; other URLs are rejected
    files_from_urls: bool = True  # files in chats may come from allowed_urls; False: those are for models alone
    allow_uploads: bool = False  # clients with the management key may put archives, and so code, into the model store
    allow_private_urls: bool = False  # allows URLs that resolve to loopback, link-local or private addresses
    min_download_rate: float = 10_000  # bytes per second over 30 s; slower downloads are aborted
    job_queue_size: int = 100
    max_request_bytes: int = 6_553_500
    max_response_bytes: int = 6_553_500
    max_workers_per_model: int = 1000
    default_workers: int = 0  # for a model registered over the API without a number
    default_response_timeout_s: float = 120
    default_startup_timeout_s: float = 120
    unregister_timeout_s: float = 120
    drain_timeout_s: float = 30
    idempotency_cache_mb: int = 0  # of responses to requests with an Idempotency-Key; 0: the header has no effect
    idempotency_cache_s: float = 600  # that each is kept
    keep_alive_s: float = 75
    request_read_timeout_s: float = 60
    max_connections_per_address: int = 0  # to the HTTP ports together; 0: no limit, since a proxy has one address
    response_read_timeout_s: float = 60  # for a client to read 1 MB of a response, or all of it
    first_worker_id: int = 9000
    number_of_gpus: int | None = None
    default_handler: str | None = None
    service_envelope: str = ""  # of every handler, unless its model names another
    decode_input_request: bool = True
    limit_max_image_pixels: bool = True
    weights_only: bool = True  # loading weights runs no code; a model's setting overrides it
    safe_weights: bool = False  # reject model files of formats that can run code; no model can override it
    worker_transport: Literal["unix", "tcp"] = "unix"
    shared_memory_from_bytes: int = 128 * 1024
    pages: bool = False  # GET / answers, and there are /docs, /openapi.json and /health
    suggests_names: bool = False  # an error for an unknown model ends with a similar name
    server_name: str = "flambeau"  # in KServe's metadata
    names_json: bool = False  # whole replies that are JSON values have that content type
    plain_errors: bool = False  # see ErrorStyle
    exact_paths: bool = False  # a path in a register call is that path, not only the name of a file in the store
    full_access_log: bool = False  # with request ids and sizes, written when the response ends
    error_details: bool | None = None  # None: only if every listener is on loopback
    install_dependencies: bool = False  # install the requirements of archives
    ignore_shared_pins: bool = False  # … without lines that want other versions of packages that models share
    first_distribution_port: int = 29500  # for workers that are groups of processes
    sequence_headers: SequenceHeaders = SequenceHeaders()
    measure: MetricsConfig = MetricsConfig()
    tracing: TracingConfig = TracingConfig()
    log_folder: Path | None = None  # None: everything goes to stderr
    log_format: Literal["text", "json"] = "text"
    access_log: bool | None = None  # None: if there is a log folder
    metrics_log_folder: Path | None = None  # None: as log_folder
    crash_folder: Path | None = None  # of crash bundles; None: below log_folder, or a temporary folder
    crash_bundles: int = 20  # so many are kept; 0: none
    crash_payloads: bool = False  # … with the requests that the worker held
    files_folder: Path | None = None  # of /v1/files and /v1/batches; None: there are none
    watch: bool = False  # reload handlers whose code changes
    hidden_env: str = ""  # workers do not inherit variables whose full name matches
    models: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)  # settings by name and version

    def settings_of_model(self, name: str, version: str) -> Mapping[str, Any]:
        """What `models` has for a model; empty if nothing."""
        versions = self.models.get(name, {})
        return versions.get(version) or versions.get(ANY_VERSION, {})

    @property
    def public(self) -> tuple[Address, ...]:
        """The listeners that other machines can reach and that keys protect; metrics show no inputs."""
        listeners = (self.inference, self.management, self.grpc.inference, self.grpc.management)
        return tuple(dict.fromkeys(address for address in listeners if address and not address.is_loopback))

    @property
    def needs_keys(self) -> bool:
        return bool(self.public) if self.keys.is_on is None else self.keys.is_on

    @property
    def shows_error_details(self) -> bool:
        """Whether error responses may include tracebacks and the last output of a worker."""
        if self.error_details is not None:
            return self.error_details
        return not self.public and (self.metrics is None or self.metrics.is_loopback)

    @property
    def error_style(self) -> ErrorStyle:
        return ErrorStyle(has_details=self.shows_error_details, is_plain=self.plain_errors)


def with_field(config: T, field_path: str, value: object) -> T:
    """Return the config with a field set; `field_path` may be nested: `grpc.inference.port`."""
    outer, _, inner = field_path.partition(".")
    if inner:
        value = with_field(getattr(config, outer) or Address(), inner, value)
    return replace(config, **{outer: value})  # type: ignore[type-var]


def check_pattern(name: str, text: str) -> str:
    """Return `text` if it is a regular expression; `name` is the setting in the error."""
    try:
        re.compile(text)
    except (re.error, RecursionError, OverflowError) as error:
        raise ConfigError(f"{name} is {brief(text)}; it must be a regular expression ({error})") from None
    return text


def check_protection(config: ServerConfig) -> None:
    """Raise unless public listeners are protected by keys, or unprotected ones are explicitly allowed, and unless every
    listener can ask for the certificates that clients must have.
    """
    check_client_certificates(config)
    if not config.public or config.needs_keys:
        return
    where = ", ".join(map(str, config.public))
    if not config.allow_unprotected:
        raise ConfigError(
            f"{where} can be reached from other machines, and authorization is off: every client could run code. "
            "Turn authorization on, or allow this with --allow-unprotected (allow_unprotected=true)"
        )
    logger.warning("%s can be reached from other machines without a key; restrict access to this network", where)


def check_client_certificates(config: ServerConfig) -> None:
    """Raise if clients must have certificates and a TCP port has no TLS, so that it would answer without."""
    if config.tls.client_ca_file is None:
        return
    grpc = () if config.grpc.is_tls else (config.grpc.inference, config.grpc.management)
    http = (config.inference, config.management, config.metrics)
    plain = [each for each in http if each is not None and not each.is_tls and each.path is None]
    if plain := [*plain, *filter(None, grpc)]:
        raise ConfigError(
            f"client_ca_file is set, but {', '.join(map(str, dict.fromkeys(plain)))} would answer clients without a "
            "certificate. Use TLS there (certificate_file and private_key_file; for gRPC also grpc_tls, which is "
            "enable_grpc_ssl in config.properties), or close the port"
        )


def check_cluster(config: ServerConfig) -> None:
    """Raise unless a Ray cluster asks for tokens: whoever reaches it otherwise can run code on every machine."""
    if config.cluster.kind == "join":
        read_secret(os.environ)
    if config.cluster.kind == "ray" and importlib.util.find_spec("ray") is None:
        raise ConfigError("--cluster ray needs the package ray: pip install 'flambeau[ray]'")
    if config.cluster.kind != "ray" or os.environ.get("RAY_AUTH_MODE") == "token":
        return
    if not config.allow_unprotected:
        raise ConfigError(
            "the Ray cluster is not protected: whoever reaches its ports can run code on every machine. Start Ray and "
            "this server with RAY_AUTH_MODE=token, or allow this with --allow-unprotected"
        )
    logger.warning("the Ray cluster is used without tokens (RAY_AUTH_MODE); restrict access to its network")


def read_secret(environment: Mapping[str, str]) -> str:
    """The secret that a server and the machines that join it share."""
    secret = environment.get(CLUSTER_SECRET, "")
    if len(secret) < MIN_SECRET:
        raise ConfigError(
            f"machines that join need a secret of at least {MIN_SECRET} characters in {CLUSTER_SECRET}, the same on "
            "all of them; make one: openssl rand -hex 32"
        )
    return secret
