"""Networks of the transformers package, for checkpoints that the engine's own network does not know."""
