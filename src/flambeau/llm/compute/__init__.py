"""From the tokens of a step to logits: plain, compiled, or on several ranks."""
