"""Programs that use this server as their packages' own documentation shows; run with the address of a server."""
