"""From logits to tokens, each row by its own settings."""
