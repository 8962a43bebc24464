"""Free ports for servers in tests."""

from __future__ import annotations

import itertools
import os
import random
import socket
from collections.abc import Mapping, Sequence

# Below the ports of outgoing connections (32768 and up on Linux, 49152 elsewhere) and of torch's rendezvous (29500).
PORTS = range(12_000, 29_000)


def share_of(ports: Sequence[int], environment: Mapping[str, str]) -> Sequence[int]:
    """The ports of this process. Each worker of pytest-xdist has its own, so that a server can restart on its port."""
    number = environment.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    count = environment.get("PYTEST_XDIST_WORKER_COUNT", "")
    return ports[int(number) :: int(count)] if number.isdecimal() and count.isdecimal() else ports


# In random order; a port is used again only after all others.
_OWN = share_of(PORTS, os.environ)
_CANDIDATES = itertools.cycle(random.SystemRandom().sample(_OWN, len(_OWN)))


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens on at this moment."""
    return list(itertools.islice(filter(_is_free, _CANDIDATES), count))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As servers do, so that a connection in TIME_WAIT does not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
