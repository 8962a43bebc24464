"""`flambeau doctor --torchserve`: which parts of a TorchServe installation will work."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from flambeau.cli.doctor import Finding
from flambeau.errors import ConfigError
from flambeau.torchserve.doctor.configuration import check_config
from flambeau.torchserve.doctor.models import check_model


def examine_installation(config: Path, store: Path) -> Iterator[Finding]:
    """Check the configuration, then every model and workflow in the store."""
    if not store.is_dir():
        raise ConfigError(f"{store} is not a folder; name the model store after the configuration file")
    findings, server = check_config(config, store)
    yield from findings
    paths = [path for path in sorted(store.iterdir()) if is_model(path)]
    if not paths:
        yield Finding("note", str(store), "there are no models in it")
    num_problems = 0
    for path in paths:
        for finding in check_model(path, installs=server.install_dependencies):
            num_problems += finding.level == "problem"
            yield finding
    text = f"{len(paths)} model{'s' * (len(paths) != 1)}, {num_problems} problem{'s' * (num_problems != 1)}"
    yield Finding("note" if num_problems else "ok", str(store), text)


def is_model(path: Path) -> bool:
    """Whether an entry of a store is a model, by its name."""
    if path.name.startswith("."):
        return False
    return path.is_dir() or path.name.endswith((".mar", ".model", ".tar.gz"))
