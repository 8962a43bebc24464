"""The arguments of `flambeau cluster …`."""

from __future__ import annotations

from typing import Annotated

import typer

from flambeau.cli.options import DEFAULT_MANAGEMENT, Json, Management, ModelName

cluster_app = typer.Typer(
    help="Show the machines of a running server's cluster.", no_args_is_help=True, rich_markup_mode=None
)


@cluster_app.command("nodes")
def cluster_nodes(as_json: Json = False, url: Management = DEFAULT_MANAGEMENT) -> None:
    """List the machines and how many workers each has."""
    from flambeau.cli import cluster_client as work

    work.nodes(url, as_json=as_json)


@cluster_app.command("why")
def cluster_why(model: ModelName, as_json: Json = False, url: Management = DEFAULT_MANAGEMENT) -> None:
    """Show where each worker of a model runs.

    Also what it waits for, and why the last one ended.
    """
    from flambeau.cli import cluster_client as work

    work.why(url, model, as_json=as_json)


@cluster_app.command("join")
def cluster_join(
    address: Annotated[str, typer.Argument(metavar="HOST:PORT", help="Worker address of the server.")],
) -> None:
    """Offer this machine to a server, until it is stopped.

    The server is started with --cluster join. Both need the same secret in FLAMBEAU_CLUSTER_SECRET.
    """
    import asyncio
    import logging
    import os

    from flambeau.config.server import read_secret
    from flambeau.errors import ConfigError

    secret = read_secret(os.environ)
    if not address.rpartition(":")[2].isdecimal():
        raise ConfigError(f"{address} has no port; give HOST:PORT, the worker address of the server")
    from flambeau.cluster.joined_node import join

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    asyncio.run(join(address, secret))
