"""The CUDA backend: Triton kernels for dense networks, Inductor for others, both as CUDA graphs."""

import os

# Triton 3.9 warns without this, and 3.10 is to compile multiplications and additions apart: slower, and not measured.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
