"""Texts → classes."""
