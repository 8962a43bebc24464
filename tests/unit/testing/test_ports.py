"""Ports of servers in tests."""

from __future__ import annotations

from flambeau.testing.ports import PORTS, share_of


def test_workers_of_pytest_have_ports_of_their_own_which_are_all_together():
    names = [{"PYTEST_XDIST_WORKER": f"gw{i}", "PYTEST_XDIST_WORKER_COUNT": "3"} for i in range(3)]
    shares = [share_of(PORTS, name) for name in names]
    assert sorted(port for share in shares for port in share) == [*PORTS]


def test_a_single_process_has_all_of_them():
    assert share_of(PORTS, {}) == PORTS
    assert share_of(PORTS, {"PYTEST_XDIST_WORKER": "master"}) == PORTS
