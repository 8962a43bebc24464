"""Options and defaults that several commands share."""

from __future__ import annotations

from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Inference = Annotated[str, typer.Option("--url", envvar="FLAMBEAU_URL", help="Address of the inference API.")]
Management = Annotated[
    str, typer.Option("--url", envvar="FLAMBEAU_MANAGEMENT_URL", help="Address of the management API.")
]
Version = Annotated[str | None, typer.Option("--version", "-v", help="Model version; the default version if omitted.")]
Host = Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all interfaces.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port of the inference API; 0 for any free port.")]
ManagementPort = Annotated[int, typer.Option(min=0, max=65535, help="Port of the management API; 0 for any free port.")]
MetricsPort = Annotated[int, typer.Option(min=0, max=65535, help="Port of the metrics API; 0 disables it.")]
RequireToken = Annotated[
    bool | None,
    typer.Option("--require-token/--no-token", help="Require API keys. Default: unless the host is loopback."),
]
LogLevel = Annotated[str, typer.Option(help="debug, info, warning or error.")]
DEFAULT_INFERENCE, DEFAULT_MANAGEMENT = "http://127.0.0.1:8080", "http://127.0.0.1:8081"
