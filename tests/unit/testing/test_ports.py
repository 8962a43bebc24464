"""Ports of servers in tests."""

from __future__ import annotations

from flambeau.testing.server import PORTS, share_of


def test_workers_of_pytest_share_all_ports():
    names = [{"PYTEST_XDIST_WORKER": f"gw{i}", "PYTEST_XDIST_WORKER_COUNT": "3"} for i in range(3)]
    shares = [share_of(PORTS, name) for name in names]
    assert sorted(port for share in shares for port in share) == [*PORTS]


def test_single_process_has_all_ports():
    assert share_of(PORTS, {}) == PORTS
    assert share_of(PORTS, {"PYTEST_XDIST_WORKER": "master"}) == PORTS
