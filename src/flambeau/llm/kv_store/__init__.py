"""Blocks of the KV cache outside of it: in host memory and on disk."""
