"""What scripts import from `workflow_archiver.arg_parser`."""
