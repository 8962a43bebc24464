"""`cluster:` of a model-config.yaml."""

from __future__ import annotations

import pytest

from flambeau.config.model import ModelConfig
from flambeau.config.placement import PlacementSettings
from flambeau.config.value_types import ClusterManager


def test_every_key_is_read():
    section = {"spread": "pack", "here": 1, "cpus": 2, "gpus": 0.5, "resources": {"a": 1}, "placementTimeout": 9}
    assert ModelConfig().with_options({"cluster": section}).cluster == PlacementSettings(
        spread="pack", here=1, cpus=2, gpus=0.5, resources={"a": 1}, timeout_s=9
    )


@pytest.mark.parametrize(
    ("section", "named"),
    [
        ("ray", "cluster"),
        ({"spread": "wide"}, "spread"),
        ({"here": 1.5}, "here"),
        ({"gpus": "one"}, "gpus"),
        ({"gpus": True}, "gpus"),
        ({"resources": ["a"]}, "resources"),
        ({"cpu": 1}, "cpu"),
    ],
)
def test_what_cannot_be_used_is_a_warning(section, named, caplog):
    assert ModelConfig().with_options({"cluster": section}).cluster == PlacementSettings()
    [record] = caplog.records
    assert named in record.getMessage()


@pytest.mark.parametrize("text", ["ray", "ray=head:6379", "local=2", "local=2x8x1"])
def test_manager_is_read(text):
    assert ClusterManager().read(text) == text


@pytest.mark.parametrize("text", ["ray://head:10001", "ray=ray://head:10001"])
def test_address_of_ray_client_is_answered_with_the_right_one(text):
    with pytest.raises(ValueError, match="ray=HOST:6379"):
        ClusterManager().read(text)


@pytest.mark.parametrize("text", ["slurm", "ray=", "ray=head", "local", ""])
def test_other_managers_are_refused(text):
    with pytest.raises(ValueError, match=r"^$"):
        ClusterManager().read(text)
