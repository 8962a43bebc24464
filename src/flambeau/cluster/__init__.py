"""The processes of a cluster besides server and workers: the placer, and an agent on each machine."""
