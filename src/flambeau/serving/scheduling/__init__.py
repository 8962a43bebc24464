"""Which job goes next, to which worker, and in whose company."""
