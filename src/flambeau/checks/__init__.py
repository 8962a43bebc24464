"""Checks of a handler on good and bad requests, for `flambeau check`."""
