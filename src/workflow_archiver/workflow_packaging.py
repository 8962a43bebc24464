"""`torch-workflow-archiver`, and what scripts import from `workflow_archiver.workflow_packaging`."""

from __future__ import annotations

import logging
import sys
from argparse import Namespace

from flambeau.errors import ArchiveError
from workflow_archiver.arg_parser import ArgParser
from workflow_archiver.workflow_packaging_utils import WorkflowExportUtils


def package_workflow(args: Namespace, manifest: str) -> None:
    """Pack a workflow with this manifest; a mistake is logged and ends the process."""
    try:
        WorkflowExportUtils.validate_inputs(args.workflow_name, args.export_path)
        export_path = WorkflowExportUtils.check_war_already_exists(args.workflow_name, args.export_path, args.force)
        WorkflowExportUtils.archive(export_path, args.workflow_name, args, manifest)
        logging.info("Successfully exported workflow %s to file %s", args.workflow_name, export_path)
    except ArchiveError as error:
        logging.error(error)
        sys.exit(1)
    finally:
        WorkflowExportUtils.clean_temp_files([])


def generate_workflow_archive() -> None:
    """Pack what the command line asks for."""
    logging.basicConfig(format="%(levelname)s - %(message)s")
    args = ArgParser.workflow_archiver_args_parser().parse_args()
    package_workflow(args, manifest=WorkflowExportUtils.generate_manifest_json(args))


if __name__ == "__main__":
    generate_workflow_archive()
