"""`flambeau` whose placer, and so its agents and workers, are in the network namespace FLAMBEAU_TEST_NETNS."""

from __future__ import annotations

import os
from typing import Any

from flambeau.cli.main import main
from flambeau.serving.cluster.placer_process import PlacerProcess

start = PlacerProcess.__init__


def start_in_namespace(self: PlacerProcess, command: Any, *arguments: Any, **options: Any) -> None:
    prefix = ("ip", "netns", "exec", os.environ["FLAMBEAU_TEST_NETNS"])
    start(self, (*prefix, *command), *arguments, **options)


if __name__ == "__main__":
    PlacerProcess.__init__ = start_in_namespace  # type: ignore[method-assign]
    main()
