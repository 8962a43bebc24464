"""Imports inside `serving` point one way."""

from __future__ import annotations

import pytest

from support.package_imports import read_house

BOTTOM = {
    "flambeau.serving.job",
    "flambeau.serving.job_times",
    "flambeau.serving.slow_requests",
    "flambeau.serving.tenants",
    "flambeau.serving.scheduling.queue",
    "flambeau.serving.crash_recovery",
    "flambeau.serving.events",
}


@pytest.fixture(scope="module")
def imports():
    house = read_house()
    return {module.name: {target for target, _ in house.inner_imports(module)} for module in house.modules.values()}


def of_serving(targets):
    return {target for target in targets if target.startswith("flambeau.serving")}


def test_bottom_modules_import_only_each_other(imports):
    for name in BOTTOM:
        assert of_serving(imports[name]) <= BOTTOM, name


def test_scheduling_knows_workers_only_by_protocol(imports):
    allowed = ("flambeau.serving.scheduling", *BOTTOM)
    for name, targets in imports.items():
        if name.startswith("flambeau.serving.scheduling"):
            assert [target for target in of_serving(targets) if not target.startswith(allowed)] == [], name


def test_workers_do_not_know_models(imports):
    above = {"flambeau.serving.model", "flambeau.serving.server", "flambeau.serving.registry"}
    for name, targets in imports.items():
        if name.startswith("flambeau.serving.workers"):
            assert not targets & above, name
