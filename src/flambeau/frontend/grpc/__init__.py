"""The gRPC APIs; loaded only where one of their ports is open, for it needs the extra `grpc`."""

from __future__ import annotations

import os

_FORKS = "GRPC_ENABLE_FORK_SUPPORT"

if _FORKS not in os.environ:
    # Workers are programs of their own, so gRPC need not survive a fork, nor complain of each; it looks at this once.
    os.environ[_FORKS] = "0"
    import grpc

    grpc.aio.init_grpc_aio()
    del os.environ[_FORKS]
