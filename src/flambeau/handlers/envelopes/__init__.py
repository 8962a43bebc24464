"""Documents around a handler's input and output."""
