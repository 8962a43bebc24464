"""For tests of handlers: a pytest plugin with `model_server` and `handler_context`."""
