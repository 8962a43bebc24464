from __future__ import annotations

import socket
import sys

import pytest

from flambeau.config.model import ModelConfig
from flambeau.errors import ConfigError
from flambeau.serving.workers.ranks import RankLayout, RendezvousPorts
from support.log_records import logged


def ranks_of(**options):
    return RankLayout.of(ModelConfig().with_options(options))


def test_how_many_processes_a_worker_is():
    assert ranks_of() is None
    assert ranks_of(parallelType="custom", parallelLevel=4) is None
    assert ranks_of(torchrun={"nproc-per-node": 4}) is None  # nothing without a parallelType
    assert ranks_of(parallelType="tp", torchrun={"nproc-per-node": 4}).count == 4
    assert ranks_of(parallelType="pptp", parallelLevel=2).count == 2  # no torchrun section: nothing is missing
    assert ranks_of(parallelType="tp", torchrun={"nproc-per-node": 2, "OMP_NUMBER_THREADS": 3}).threads == 3


@pytest.mark.parametrize(("kind", "keeps_step"), [("tp", True), ("pptp", True), ("pp", False)])
def test_who_gets_the_batches(kind, keeps_step):
    assert ranks_of(parallelType=kind, torchrun={"nproc-per-node": 2}).keeps_step is keeps_step


@pytest.mark.parametrize("nodes", [2, "1:4"])
def test_several_machines_are_refused(nodes):
    with pytest.raises(ConfigError, match="nnodes: 1"):
        ranks_of(parallelType="tp", torchrun={"nproc-per-node": 2, "nnodes": nodes})


def test_settings_that_mean_nothing_on_one_machine_are_taken(caplog):
    torchrun = {"nproc-per-node": 2, "nnodes": 1, "rdzv-backend": "c10d", "rdzv-endpoint": "localhost:0", "oops": 1}
    assert ranks_of(parallelType="tp", torchrun=torchrun).count == 2
    assert [unknown for unknown, _ in logged(caplog, "flambeau.serving.workers.ranks")] == ["oops"]


def test_ports_are_given_once_and_only_while_they_are_free():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        points = RendezvousPorts(port)
        number = points.take_id(2)
        assert number == port
        first = points.take_port(number)
        assert first > port + 1  # the next ones belong to the worker's other ranks
        assert points.take_port(number) > first


def test_free_port_of_a_worker_costs_no_number():
    points = RendezvousPorts(29500)
    number = points.take_id(2)
    if points.take_port(number) == number:
        assert points.take_id(2) == 29502


@pytest.mark.skipif(sys.platform != "linux", reason="names without a file are Linux's own")
def test_two_servers_choose_different_ports_though_nobody_listens_yet():
    ours, theirs = RendezvousPorts(29500), RendezvousPorts(29500)
    port = ours.take_port(ours.take_id(2))
    assert theirs.take_port(port) != port
    assert ours.take_port(port) == port  # the worker may start anew where it was
    del ours
    assert theirs.take_port(port) == port
