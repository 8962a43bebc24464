"""Checkpoint files → a network, and quantized checkpoints back to files."""
