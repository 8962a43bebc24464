"""What scripts import from `model_archiver.arg_parser`."""
