"""Text to tokens and back, exactly, while it is made; conversations to prompts."""
