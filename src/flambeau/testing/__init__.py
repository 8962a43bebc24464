"""Tools for tests of handlers: a pytest plugin with the fixtures `model_server` and `handler_context`."""
