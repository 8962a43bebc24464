"""Text ↔ tokens, also while tokens are generated; conversations → prompts."""
