"""Worker processes: how many there are, where they run, and what becomes of them."""
