"""Example models that are served if no model is given."""
