"""Envelopes: document formats around a handler's input and output."""
