"""Tales that the grammar of the shipped model made with a seed of their own: it has not learnt them."""

from pathlib import Path

TALES = Path(__file__).with_suffix(".txt").read_text()
