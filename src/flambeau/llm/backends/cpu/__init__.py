"""The CPU backend: C++ kernels for plain networks, Inductor for others."""
