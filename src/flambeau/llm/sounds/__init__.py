"""Sounds in chats: samples → embeddings, kept by content."""
