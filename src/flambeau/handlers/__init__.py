"""Built-in handlers, and the base classes of user handlers."""
