"""The text_classifier handler."""
