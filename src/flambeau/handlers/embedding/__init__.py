"""The sentence_embedder handler: texts → vectors."""
