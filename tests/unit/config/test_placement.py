"""`cluster:` of a model-config.yaml."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from flambeau.config.model import ModelConfig
from flambeau.config.placement import PlacementSettings
from flambeau.config.server import ClusterConfig, ServerConfig, check_cluster
from flambeau.config.value_types import ClusterManager
from flambeau.errors import ConfigError


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


@pytest.mark.parametrize("text", ["ray", "ray=head:6379", "join", "local=2", "local=2x8x1"])
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


@pytest.fixture
def with_ray(monkeypatch):
    monkeypatch.setattr("flambeau.config.server.importlib.util.find_spec", lambda name: object())
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)


RAY = ServerConfig(cluster=ClusterConfig(manager="ray"))


def test_ray_cluster_without_tokens_is_refused_unless_allowed(with_ray, monkeypatch, caplog):
    with pytest.raises(ConfigError, match="RAY_AUTH_MODE=token"):
        check_cluster(RAY)
    check_cluster(replace(RAY, allow_unprotected=True))
    assert "without tokens" in caplog.text
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    check_cluster(RAY)


def test_ray_that_is_not_installed_is_named_with_its_remedy(monkeypatch):
    monkeypatch.setattr("flambeau.config.server.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=re.escape("pip install 'flambeau[ray]'")):
        check_cluster(RAY)


@pytest.mark.parametrize("secret", [None, "short"])
def test_machines_join_only_with_a_long_secret(secret, monkeypatch):
    monkeypatch.delenv("FLAMBEAU_CLUSTER_SECRET", raising=False)
    if secret is not None:
        monkeypatch.setenv("FLAMBEAU_CLUSTER_SECRET", secret)
    with pytest.raises(ConfigError, match="FLAMBEAU_CLUSTER_SECRET"):
        check_cluster(ServerConfig(cluster=ClusterConfig(manager="join")))
