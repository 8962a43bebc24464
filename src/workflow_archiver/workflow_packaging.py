"""TorchServe's import name for the `torch-workflow-archiver` command."""

from flambeau.torchserve import import_names, workflow_archiver
from flambeau.torchserve.workflow_archiver import WorkflowArchiverArgParser
from flambeau.torchserve.workflow_archiver import WorkflowExportUtils as WorkflowExportUtils
from flambeau.torchserve.workflow_archiver import generate_workflow_archive as generate_workflow_archive
from flambeau.torchserve.workflow_archiver import package_workflow as package_workflow

ArgParser = WorkflowArchiverArgParser

import_names.forward(__name__, workflow_archiver, ArgParser="WorkflowArchiverArgParser")

if __name__ == "__main__":
    generate_workflow_archive()
