"""Who runs, how many tokens of it, and in which blocks; without tensors."""
