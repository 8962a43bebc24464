"""The transformers handler: Hugging Face models by task."""
