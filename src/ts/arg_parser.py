"""TorchServe's name for the command line's parsers."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from flambeau.torchserve.flags import parser, worker_parser


class ArgParser:
    """The parsers of the `torchserve` command and of its workers."""

    @staticmethod
    def ts_parser() -> argparse.ArgumentParser:
        """The flags of `torchserve`."""
        return parser()

    @staticmethod
    def model_service_worker_args() -> argparse.ArgumentParser:
        """The flags of a worker."""
        return worker_parser()

    @staticmethod
    def extract_args(args: Sequence[str] | None = None) -> argparse.Namespace:
        """Parse these words, or those of this process."""
        return parser().parse_args(args or None)
