"""The engine: text generation with PyTorch, step by step. It knows nothing of servers."""
