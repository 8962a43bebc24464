"""Which sequences run, how many tokens each, and when they end: no torch, no numpy."""
