"""`flambeau cluster …`: calls the management API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flambeau.cli.api_client import call
from flambeau.cli.output import print_json, print_table
from flambeau.errors import ConfigError


def nodes(url: str, *, as_json: bool) -> None:
    document = call(url, "GET", "/cluster")
    if as_json:
        print_json(document)
        return
    print(f"{document['connection'] or 'not connected'}; workers connect to {document['workerAddress']}")
    if problem := document.get("problem"):
        raise ConfigError(problem)
    rows = [
        [node["host"], node["address"], "alive" if node["alive"] else "lost", str(node["workers"]), amounts(node)]
        for node in document["nodes"]
    ]
    print_table(["NODE", "ADDRESS", "STATE", "WORKERS", "RESOURCES"], rows)


def amounts(node: Mapping[str, Any]) -> str:
    """The resources of a machine; those that managers count for themselves are left out."""
    known = {name: amount for name, amount in node["resources"].items() if ":" not in name and "memory" not in name}
    return ", ".join(f"{amount:g} {name}" for name, amount in known.items() if amount)


def why(url: str, model: str, *, as_json: bool) -> None:
    workers = [worker for worker in call(url, "GET", "/cluster")["workers"] if worker["model"] == model]
    if as_json:
        print_json(workers)
        return
    if not workers:
        raise ConfigError(f"there is no worker of a model {model}; flambeau models ls has the models")
    for worker in workers:
        place = f" on {worker['node']}" if worker["node"] else ""
        print(f"worker {worker['id']}: {worker['state']}{place}")
        if failure := worker.get("lastFailure"):
            print(f"    the one before: {failure['reason']}")
