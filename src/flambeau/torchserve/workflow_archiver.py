"""`torch-workflow-archiver`: its command line and the steps of packing (`workflow_archiver`)."""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
import sys
import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flambeau.archive.pack import check_name, files_below
from flambeau.errors import ArchiveError, MissingFile
from flambeau.torchserve.model_archiver import ExportUtils
from flambeau.torchserve.workflows.source import WorkflowManifest, write_workflow


class WorkflowArchiverError(ArchiveError):
    """The workflow cannot be packed like this."""


class WorkflowDescription:
    """The workflow's entry in the manifest; files are base names."""

    def __init__(self, workflow_name: str, spec_file: str, handler: str | None = None) -> None:
        self.described = WorkflowManifest(
            name=workflow_name, spec_file=Path(spec_file).name, handler=Path(handler).name if handler else ""
        )
        self.workflow_name = self.described.name
        self.spec_file = self.described.spec_file
        self.handler = self.described.handler


class WorkflowArchiveManifest:
    """The manifest of an archive; its text is what is written."""

    def __init__(self, workflow: WorkflowDescription) -> None:
        self.workflow = workflow
        self.manifest_dict: dict[str, Any] = workflow.described.to_dict()

    def __str__(self) -> str:
        return json.dumps(self.manifest_dict, indent=2)

    __repr__ = __str__


class WorkflowArchiverArgParser:
    @staticmethod
    def workflow_archiver_args_parser() -> argparse.ArgumentParser:
        parser = argparse.ArgumentParser(prog="torch-workflow-archiver", description="Pack a workflow into an archive.")
        parser.add_argument("--workflow-name", required=True, help="name of the workflow, and of the archive")
        parser.add_argument("--spec-file", required=True, help="YAML file with the models and the graph")
        parser.add_argument("--handler", help="Python file with the functions of the graph")
        parser.add_argument("--extra-files", help="files, separated by commas")
        parser.add_argument("--export-path", default=os.getcwd(), help="folder to write to (default: this one)")
        parser.add_argument("-f", "--force", action="store_true", help="replace an existing archive")
        return parser


class WorkflowExportUtils(ExportUtils):
    """The steps of packing a workflow."""

    _suffix = ".war"

    @staticmethod
    def get_archive_export_path(export_file_path: str, workflow_name: str) -> str:
        return os.path.join(export_file_path, f"{workflow_name}.war")

    @staticmethod
    def check_war_already_exists(workflow_name: str, export_file_path: str | None, overwrite: bool) -> str:
        """Return the folder to write to; raise if the archive exists and may not be replaced."""
        folder = os.getcwd() if export_file_path is None else export_file_path
        target = WorkflowExportUtils.get_archive_export_path(folder, workflow_name)
        if os.path.exists(target):
            if not overwrite:
                raise WorkflowArchiverError(
                    f"{target} already exists.\nUse --force to replace it, or choose another --export-path."
                )
            logging.warning("Overwriting %s ...", target)
        return folder

    @staticmethod
    def generate_workflow(workflow_args: Namespace) -> WorkflowDescription:
        return describe(workflow_args)

    @staticmethod
    def generate_manifest_json(args: Namespace) -> str:
        return str(WorkflowArchiveManifest(describe(args)))

    @staticmethod
    def copy_artifacts(workflow_name: str, artifact_files: Sequence[str | None]) -> str:
        """Link files into a new temporary folder, which the caller removes."""
        named = [Path(part.strip()) for files in artifact_files for part in (files or "").split(",") if part.strip()]
        for file in named:
            if not file.is_file():
                raise MissingFile(f"File does not exist: {file}")
        folder = Path(tempfile.mkdtemp(prefix=f"{workflow_name}-"))
        for file in named:
            (folder / file.name).unlink(missing_ok=True)
            (folder / file.name).symlink_to(file.resolve())
        return str(folder)

    @staticmethod
    def archive(export_file: str, workflow_name: str, workflow_path: str, manifest: str) -> None:
        """Write the files of a folder and a manifest as an archive."""
        target = Path(WorkflowExportUtils.get_archive_export_path(export_file, workflow_name))
        write_workflow(target, files_below(Path(workflow_path), target), manifest.encode())

    @staticmethod
    def check_workflow_name_regex_or_exit(workflow_name: str) -> None:
        """Raise for a name with invalid characters."""
        try:
            check_name(workflow_name, "Workflow")
        except ArchiveError as error:
            raise WorkflowArchiverError(str(error)) from None

    @staticmethod
    def validate_inputs(workflow_name: str, export_path: str) -> None:
        """Raise for an invalid name or an export path that is not a folder."""
        WorkflowExportUtils.check_workflow_name_regex_or_exit(workflow_name)
        if not os.path.isdir(os.path.abspath(export_path)):
            raise WorkflowArchiverError(f"Given export-path {export_path} is not a directory. Name a folder.")


def describe(args: Namespace) -> WorkflowDescription:
    return WorkflowDescription(args.workflow_name, args.spec_file, args.handler)


def package_workflow(args: Namespace, manifest: str) -> None:
    """Pack a workflow with this manifest; an error is logged and ends the process with status 1."""
    try:
        WorkflowExportUtils.validate_inputs(args.workflow_name, args.export_path)
        export_path = WorkflowExportUtils.check_war_already_exists(args.workflow_name, args.export_path, args.force)
        files = [args.spec_file, args.handler, args.extra_files]
        workflow_path = WorkflowExportUtils.copy_artifacts(args.workflow_name, files)
        try:
            WorkflowExportUtils.archive(export_path, args.workflow_name, workflow_path, manifest)
        finally:
            shutil.rmtree(workflow_path, ignore_errors=True)
        logging.info("Successfully exported workflow %s to file %s", args.workflow_name, export_path)
    except ArchiveError as error:
        logging.error(error)
        sys.exit(1)


def generate_workflow_archive() -> None:
    """Pack the workflow that the command line describes."""
    logging.basicConfig(format="%(levelname)s - %(message)s")
    args = WorkflowArchiverArgParser.workflow_archiver_args_parser().parse_args()
    package_workflow(args, manifest=WorkflowExportUtils.generate_manifest_json(args))
