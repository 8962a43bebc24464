"""ServerConfig: what one server process is told before it starts."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from flambeau.errors import ConfigError

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Address:
    """Where a listener waits: a host and port, or a unix socket."""

    host: str = LOOPBACK
    port: int = 0
    path: str | None = None

    @classmethod
    def parse(cls, text: str, *, default_port: int) -> Address:
        """Read `http://host[:port]`, `host:port` or `unix:/path`."""
        if text.startswith("unix:"):
            return cls(path=text.removeprefix("unix:"))
        url = urlsplit(text if "://" in text else f"http://{text}")
        try:
            host, port = url.hostname, url.port or default_port
        except ValueError as error:
            raise ConfigError(f"{text!r} is not an address: {error}") from None
        if url.scheme != "http" or not host:
            raise ConfigError(f"{text!r} is not an address; write http://host:port or unix:/path")
        return cls(host, port)

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
        return f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Ports, limits and paths of one server; TorchServe's defaults where it had one."""

    inference: Address = Address(port=8080)
    management: Address = Address(port=8081)
    metrics: Address | None = Address(port=8082)
    model_store: Path | None = None
    job_queue_size: int = 100
    max_request_bytes: int = 6_553_500
    max_response_bytes: int = 6_553_500
    default_workers: int = 0  # of a model registered over the API that names no number
    default_response_timeout_s: float = 120
    default_startup_timeout_s: float = 120
    unregister_timeout_s: float = 120
    drain_timeout_s: float = 30
    keep_alive_s: float = 75
    request_read_timeout_s: float = 60
    first_worker_id: int = 9000
    number_of_gpus: int | None = None
    default_handler: str | None = None
    service_envelope: str = ""  # around every handler, unless its model names another
    decode_input_request: bool = True
    limit_max_image_pixels: bool = True
    worker_transport: Literal["unix", "tcp"] = "unix"
    shared_memory_from_bytes: int = 128 * 1024
    error_details: bool | None = None  # None: only on a loopback bind
    watch: bool = False  # reload handlers whose code changes
    hidden_env: str = ""  # variables whose whole name matches are kept from workers

    @property
    def tells_details(self) -> bool:
        """Whether error answers may carry tracebacks and a worker's last words."""
        return self.inference.is_loopback if self.error_details is None else self.error_details
