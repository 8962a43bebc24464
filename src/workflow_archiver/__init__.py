"""TorchServe's import name; what it does is in `flambeau.archive`."""
