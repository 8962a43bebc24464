"""A server of the engine with tiny networks, for the tests of a module."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flambeau.archive.pack import Recipe, pack
from support.language_models import ONE_THREAD
from support.running import RunningServer

LOADS_S = 300  # torch, and for some networks transformers, on a busy machine


@contextmanager
def serving_networks(folder: Path, networks: Mapping[str, Path], **settings: Any) -> Iterator[RunningServer]:
    """Serve each network under its name, with one worker; `settings` are options of its handler."""
    store = folder / "store"
    store.mkdir()
    for name, path in networks.items():
        handler = {"model_path": str(path), "compile": False, "max_num_seqs": 8, "num_blocks": 256, **settings}
        config = folder / f"{name}.yaml"  # JSON is YAML too
        config.write_text(json.dumps({"minWorkers": 1, "maxWorkers": 1, "handler": handler}))
        pack(Recipe(model_name=name, handler="gpt_handler", config_file=config), store, format="no-archive")
    running = RunningServer(folder / "log", str(store), env=ONE_THREAD)
    try:
        running.wait_listening()
        running.until(lambda: running.is_ready, timeout=LOADS_S)
        yield running
    finally:
        running.stop()
