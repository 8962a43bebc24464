"""OpenAI's API for the models of this server: chat, completions, embeddings, models."""
