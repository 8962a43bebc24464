"""The `flambeau` command."""
