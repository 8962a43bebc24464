"""From a model's files to something to call, on the right device."""
