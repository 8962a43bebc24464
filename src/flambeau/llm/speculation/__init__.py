"""Speculative decoding: how many tokens are proposed, and which are accepted. executor/draft.py has the draft model."""
