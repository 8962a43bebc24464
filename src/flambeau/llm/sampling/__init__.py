"""Logits → tokens, by each request's own settings."""
