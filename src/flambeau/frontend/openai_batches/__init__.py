"""OpenAI's files and batches: requests in a file, answered at low priority beside live traffic."""
