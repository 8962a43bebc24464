"""The Python face: clients of a running server, and servers started from a script or a notebook."""
