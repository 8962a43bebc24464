"""The command line of `torch-model-archiver`."""

from __future__ import annotations

import argparse
import os

from flambeau.archive.manifest import RUNTIMES
from flambeau.archive.pack import SUFFIXES
from model_archiver.model_archiver_config import ModelArchiverConfig


class ArgParser:
    """Reads the command line."""

    @staticmethod
    def export_model_args_parser() -> ModelArchiverConfig:
        """What the command line asks for."""
        return ModelArchiverConfig.from_args(_parser().parse_args())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="torch-model-archiver", description="Pack a model into an archive.")
    add = parser.add_argument
    add("--model-name", required=True, help="name of the model, and of the archive")
    add("--serialized-file", help="weights, TorchScript, ONNX or an exported program")
    add("--model-file", help="Python file with the one class of an eager model")
    add("--handler", required=True, help="a built-in handler, dir/foo.py or dir/foo.py:function")
    add("--extra-files", help="files, folders and patterns, separated by commas")
    add("--runtime", default="python", choices=RUNTIMES, help="what runs the handler (default: python)")
    add("--export-path", default=os.getcwd(), help="folder to write to, made when missing (default: this one)")
    add("--archive-format", default="default", choices=[*SUFFIXES], help="default and zip-store write NAME.mar, tgz "
        "NAME.tar.gz, no-archive a folder NAME")  # fmt: skip
    add("-f", "--force", action="store_true", help="replace what is there")
    add("-v", "--version", default="1.0", help="version of the model; TorchServe's archiver insists on it")
    add("-r", "--requirements-file", help="pip requirements of the handler")
    add("-c", "--config-file", help="model-config.yaml")
    return parser
