"""What a worker asks of a machine, in words."""

from __future__ import annotations

import pytest

from flambeau.config.model import ModelConfig
from flambeau.serving.cluster.cluster import request_of
from flambeau.serving.cluster.resources import Demand, node_environment, waiting_in_words


@pytest.mark.parametrize(
    ("demand", "words"),
    [
        (Demand(gpus=1), "1 GPU"),
        (Demand(gpus=0.5, cpus=4), "0.5 GPU and 4 CPUs"),
        (Demand(), "1 CPU"),
        (Demand(cpus=0), "nothing in particular"),
        (Demand(gpus=8, resources={"H200": 0.001}), "8 GPUs and 0.001 H200"),
    ],
)
def test_demand_in_words(demand, words):
    assert str(demand) == words


def test_waiting_in_words():
    assert waiting_in_words(Demand(gpus=1), 1, 40.2) == "waiting for a node with 1 GPU, 40 s"
    assert waiting_in_words(Demand(gpus=8), 2, 3, "no Ray") == "waiting for 2 nodes with 8 GPUs each, 3 s: no Ray"


def test_only_some_variables_travel():
    given = {"NCCL_DEBUG": "1", "TS_X": "1", "PATH": "/bin", "FLAMBEAU_START_FOLDER": "/", "OMP_NUM_THREADS": "2"}
    assert node_environment(given) == {"NCCL_DEBUG": "1", "TS_X": "1", "OMP_NUM_THREADS": "2"}


def request(**options):
    return request_of("m", ModelConfig().with_options(options))


def test_model_without_settings_asks_for_a_cpu():
    asked = request()
    assert (asked.demand, asked.num_nodes, asked.pack) == (Demand(), 1, False)


def test_model_for_gpus_asks_for_one():
    assert request(deviceType="gpu").demand.gpus == 1
    assert request(deviceType="gpu", cluster={"gpus": 0.25}).demand.gpus == 0.25


def test_group_asks_for_the_gpus_of_all_its_processes_on_a_machine():
    asked = request(
        deviceType="gpu", parallelType="tp", torchrun={"nnodes": 2, "nproc-per-node": 8}, cluster={"spread": "pack"}
    )
    assert (asked.demand.gpus, asked.num_nodes, asked.ranks_per_node, asked.pack) == (8, 2, 8, True)
