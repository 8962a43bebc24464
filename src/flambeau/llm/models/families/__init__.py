"""The supported families: a table of each kind."""
