"""Options that several commands have."""

from __future__ import annotations

from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Inference = Annotated[str, typer.Option("--url", envvar="FLAMBEAU_URL", help="The inference address.")]
Management = Annotated[str, typer.Option("--url", envvar="FLAMBEAU_MANAGEMENT_URL", help="The management address.")]
Version = Annotated[str | None, typer.Option("--version", "-v", help="A version; else the default one.")]
DEFAULT_INFERENCE, DEFAULT_MANAGEMENT = "http://127.0.0.1:8080", "http://127.0.0.1:8081"
