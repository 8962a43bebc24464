"""What scripts import from `workflow_archiver.arg_parser`."""

from flambeau.torchserve.workflow_archiver import WorkflowArchiverArgParser

ArgParser = WorkflowArchiverArgParser
