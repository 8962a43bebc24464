"""What tests of handlers import from `ts.torch_handler.unit_tests.test_utils.model_dir`."""

from flambeau.torchserve.handlers.mock_context import copy_files as copy_files
from flambeau.torchserve.handlers.mock_context import download_model as download_model
