"""Handlers that come with the server, and what user handlers build on."""
