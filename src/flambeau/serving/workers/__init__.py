"""Worker processes: starting, supervising, scaling and talking to them."""
