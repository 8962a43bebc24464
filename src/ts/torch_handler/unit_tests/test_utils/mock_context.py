"""What tests of handlers import from `ts.torch_handler.unit_tests.test_utils.mock_context`."""

from flambeau.torchserve.handlers.mock_context import MockContext as MockContext
