"""Several models and functions run as one graph."""
