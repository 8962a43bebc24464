"""Files to a network, with no conversion step before."""
