"""Where models come from: the store, URLs, and what else their code needs."""
