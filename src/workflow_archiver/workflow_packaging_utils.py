"""What scripts import from `workflow_archiver.workflow_packaging_utils`."""

from __future__ import annotations

import logging
import os
import tempfile
from argparse import Namespace
from collections.abc import Iterable, Sequence
from pathlib import Path

from flambeau.archive.pack import check_name, files_below, is_skipped
from flambeau.errors import ArchiveError, MissingFile
from flambeau.torchserve.workflows.archive_file import write_workflow
from workflow_archiver.manifest_components.manifest import Manifest
from workflow_archiver.manifest_components.workflow import Workflow
from workflow_archiver.workflow_archiver_error import WorkflowArchiverError


class WorkflowExportUtils:
    """The steps of packing a workflow, one by one."""

    @staticmethod
    def get_archive_export_path(export_file_path: str, workflow_name: str) -> str:
        """Where the archive goes."""
        return os.path.join(export_file_path, f"{workflow_name}.war")

    @staticmethod
    def check_war_already_exists(workflow_name: str, export_file_path: str | None, overwrite: bool) -> str:
        """The folder to write to; what is there already may be in the way."""
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
    def generate_workflow(workflow_args: Namespace) -> Workflow:
        """What the manifest says of the workflow."""
        return Workflow(workflow_args.workflow_name, workflow_args.spec_file, workflow_args.handler)

    @staticmethod
    def generate_manifest_json(args: Namespace) -> str:
        """The manifest as it is written."""
        return str(Manifest(WorkflowExportUtils.generate_workflow(args)))

    @staticmethod
    def copy_artifacts(workflow_name: str, artifact_files: Sequence[str | None]) -> str:
        """Lay out files in a new folder below the temporary one, as links; the caller removes it."""
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
    def clean_temp_files(temp_files: Iterable[str]) -> None:
        """Remove files."""
        for file in temp_files:
            os.remove(file)

    @staticmethod
    def make_dir(d: str) -> None:
        """Make a folder, unless it is there."""
        os.makedirs(d, exist_ok=True)

    @staticmethod
    def directory_filter(directory: str, unwanted_dirs: Iterable[str]) -> bool:
        """Whether a folder goes into an archive."""
        return directory not in unwanted_dirs and not is_skipped(directory)

    @staticmethod
    def file_filter(current_file: str, files_to_exclude: Iterable[str]) -> bool:
        """Whether a file is none of those that nobody wants."""
        unwanted = {*files_to_exclude, "MANIFEST.json"}
        return current_file not in unwanted and not current_file.endswith((".pyc", ".DS_Store", ".war"))

    @staticmethod
    def check_workflow_name_regex_or_exit(workflow_name: str) -> None:
        """Refuse a name with characters that are not allowed."""
        try:
            check_name(workflow_name, "Workflow")
        except ArchiveError as error:
            raise WorkflowArchiverError(str(error)) from None

    @staticmethod
    def validate_inputs(workflow_name: str, export_path: str) -> None:
        """Refuse a bad name, and a place that is no folder."""
        WorkflowExportUtils.check_workflow_name_regex_or_exit(workflow_name)
        if not os.path.isdir(os.path.abspath(export_path)):
            raise WorkflowArchiverError(f"Given export-path {export_path} is not a directory. Name a folder.")
