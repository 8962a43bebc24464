"""Cannot be loaded; what it lacks may come back, so it is tried again."""

raise ConnectionError("a_database_that_nobody_has is not reachable")
