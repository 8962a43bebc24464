"""Models too large for one device, split by libraries of their own."""
