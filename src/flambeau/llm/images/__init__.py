"""Images in prompts: their files → pixels → the embeddings that the decoder reads."""
