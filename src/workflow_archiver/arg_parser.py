"""The command line of `torch-workflow-archiver`."""

from __future__ import annotations

import argparse
import os


class ArgParser:
    """Knows the command line."""

    @staticmethod
    def workflow_archiver_args_parser() -> argparse.ArgumentParser:
        """The parser of the command line."""
        parser = argparse.ArgumentParser(prog="torch-workflow-archiver", description="Pack a workflow into an archive.")
        parser.add_argument("--workflow-name", required=True, help="name of the workflow, and of the archive")
        parser.add_argument("--spec-file", required=True, help="YAML file with the models and the graph")
        parser.add_argument("--handler", help="Python file with the functions of the graph")
        parser.add_argument("--extra-files", help="files, separated by commas")
        parser.add_argument("--export-path", default=os.getcwd(), help="folder to write to (default: this one)")
        parser.add_argument("-f", "--force", action="store_true", help="replace what is there")
        return parser
