"""Speculation: tokens are proposed cheaply, and the network verifies several at a time; nothing is lost by it."""
