"""`flambeau doctor --cluster`: whether the machines of a cluster can run the workers of this server."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import platform
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as version_of

from flambeau import __version__
from flambeau.cli.doctor import Finding
from flambeau.config.server import ClusterConfig
from flambeau.config.value_types import ClusterManager
from flambeau.errors import ConfigError
from flambeau.serving.cluster.node_reports import NodeReport, survey


def examine_cluster(manager: str, worker_address: str = "") -> Iterator[Finding]:
    """Check the packages and the protection here, then the versions on every machine."""
    try:
        config = ClusterConfig(manager=ClusterManager().read(manager), worker_address=worker_address)
    except ValueError as error:
        expected = ClusterManager().expected
        raise ConfigError(f"--cluster is {manager!r}; it must be {expected}. {error}".rstrip(". ")) from None
    if config.kind == "ray":
        if importlib.util.find_spec("ray") is None:
            yield Finding("problem", "ray", "not installed here", "pip install 'flambeau[ray]'")
            return
        yield protection(os.environ)
    try:
        reports = asyncio.run(survey(config))
    except (TimeoutError, ConfigError) as error:
        yield Finding("problem", "cluster", f"{manager} cannot be reached: {error}")
        return
    own = own_versions()
    yield Finding("ok", "this machine", in_words(own))
    if not reports:
        yield Finding("problem", "cluster", "no machine has CPUs for workers")
    yield from (judge(report, own) for report in reports)


def protection(environment: Mapping[str, str]) -> Finding:
    if environment.get("RAY_AUTH_MODE") == "token":
        return Finding("ok", "tokens", "RAY_AUTH_MODE is token")
    text = "RAY_AUTH_MODE is not token: whoever reaches the ports of Ray can run code on every machine"
    return Finding("problem", "tokens", text, "export RAY_AUTH_MODE=token  # for Ray and for this server")


def own_versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "flambeau": __version__}
    try:
        found["torch"] = version_of("torch")
    except PackageNotFoundError:
        pass
    return found


def judge(report: NodeReport, own: Mapping[str, str]) -> Finding:
    """Flambeau must be the same; another Python or torch may answer differently."""
    what = f"node {report.node.host} ({report.node.id[:8]})"
    if report.problem:
        return Finding("problem", what, report.problem, "flambeau serve … --worker-address HOST:PORT")
    theirs = report.versions
    if theirs.get("flambeau") != own["flambeau"]:
        fix = f"pip install flambeau=={own['flambeau']}  # there"
        return Finding("problem", what, f"{in_words(theirs)}; this server has flambeau {own['flambeau']}", fix)
    if "torch" not in theirs and "torch" in own:
        return Finding("note", what, f"{in_words(theirs)}; torch is not installed there", "pip install torch  # there")
    others = [name for name in ("python", "torch") if minor(theirs.get(name, "")) != minor(own.get(name, ""))]
    if others:
        return Finding("note", what, f"{in_words(theirs)}; another {' and '.join(others)} than here")
    return Finding("ok", what, in_words(theirs))


def minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def in_words(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())
