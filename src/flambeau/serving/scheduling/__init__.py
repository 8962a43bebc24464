"""Which job runs next, on which worker and in which batch."""
