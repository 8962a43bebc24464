"""The CPU backend: C++ kernels for the networks that they know, Inductor for others."""
