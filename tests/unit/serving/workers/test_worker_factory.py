"""Where the slots of a model are."""

from __future__ import annotations

import itertools
import logging
from types import SimpleNamespace

import pytest

from flambeau.config.model import ModelConfig
from flambeau.config.placement import PlacementSettings
from flambeau.errors import ConfigError
from flambeau.serving.workers.worker_factory import WorkerFactory


def new_factory(config, cluster=None):
    host = SimpleNamespace(
        gpus=range(0),
        devices_in_use=lambda: (),
        rendezvous_ports=None,
        worker_ids=itertools.count(9000),
        cluster=cluster,
    )
    return WorkerFactory("m", "1.0", "handler.py", None, config, host)


def test_cluster_section_is_ignored_with_one_line_where_there_is_no_cluster(caplog):
    with caplog.at_level(logging.INFO):
        factory = new_factory(ModelConfig(cluster=PlacementSettings(gpus=1)))
    [record] = caplog.records
    assert "--cluster" in record.getMessage()
    assert factory.new_slot().placement is None


def test_slots_are_on_other_machines_apart_from_some():
    cluster = SimpleNamespace(new_placement=lambda name, config: "there")
    factory = new_factory(ModelConfig(cluster=PlacementSettings(here=1)), cluster)
    assert [factory.new_slot(number).placement for number in (0, 1, 2)] == [None, "there", "there"]


def test_group_over_several_machines_needs_a_cluster():
    config = ModelConfig(parallel_type="tp", parallel_level=2, torchrun={"nnodes": 2, "nproc-per-node": 2})
    with pytest.raises(ConfigError, match="--cluster ray"):
        new_factory(config)
    new_factory(config, SimpleNamespace())
    with pytest.raises(ConfigError, match="nnodes"):
        new_factory(ModelConfig(parallel_type="tp", parallel_level=2, torchrun={"nnodes": "1:4"}), SimpleNamespace())
