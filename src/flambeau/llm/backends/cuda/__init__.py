"""The CUDA backend: Triton kernels for dense networks, Inductor for others, both as CUDA graphs."""
