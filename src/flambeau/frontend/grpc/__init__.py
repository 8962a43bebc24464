"""The gRPC APIs. They need the extra `grpc`, so they are imported only if a gRPC port is configured."""

from __future__ import annotations

import os

_FORKS = "GRPC_ENABLE_FORK_SUPPORT"

if _FORKS not in os.environ:
    # Workers are separate programs, so gRPC need not support forks or warn about them; it reads this once.
    os.environ[_FORKS] = "0"
    import grpc

    grpc.aio.init_grpc_aio()
    del os.environ[_FORKS]
