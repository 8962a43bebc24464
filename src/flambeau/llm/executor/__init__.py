"""Runs a plan: builds the inputs, calls the backend, samples tokens.

backend.py declares what a backend must do; flambeau/llm/backends/ holds the backends.
"""
