"""Ports of servers in tests."""

from __future__ import annotations

import pytest

from flambeau.testing.server import PORTS, ports_in, share_of


def test_workers_of_pytest_share_all_ports():
    names = [{"PYTEST_XDIST_WORKER": f"gw{i}", "PYTEST_XDIST_WORKER_COUNT": "3"} for i in range(3)]
    shares = [share_of(PORTS, name) for name in names]
    assert sorted(port for share in shares for port in share) == [*PORTS]


def test_single_process_has_all_ports():
    assert share_of(PORTS, {}) == PORTS
    assert share_of(PORTS, {"PYTEST_XDIST_WORKER": "master"}) == PORTS


def test_test_runs_side_by_side_may_have_ports_of_their_own():
    assert ports_in({}) == PORTS
    assert ports_in({"PYTEST_FLAMBEAU_PORTS": "12000-12009"}) == range(12000, 12010)
    for text in ("12000", "a-b", "9-8", "0-9", "1-70000"):
        with pytest.raises(ValueError, match="write two port numbers"):
            ports_in({"PYTEST_FLAMBEAU_PORTS": text})
