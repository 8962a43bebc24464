"""Loads model files of all formats."""
