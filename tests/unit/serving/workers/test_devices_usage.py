"""How busy GPUs are, in the words of `describe`."""

from __future__ import annotations

from flambeau.metrics.system import parse_gpus
from flambeau.serving.workers import devices


def test_usage_is_told_in_torchserves_words(monkeypatch):
    table = "0, 17, 3, 1024\n1, 0, 0, 5\nodd line\n"
    monkeypatch.setattr(devices, "query_gpus", lambda *fields: parse_gpus(table, len(fields)))
    assert devices.gpu_usage() == {
        0: "gpuId::0 utilization.gpu::17 % utilization.memory::3 % memory.used::1024 MiB",
        1: "gpuId::1 utilization.gpu::0 % utilization.memory::0 % memory.used::5 MiB",
    }


def test_usage_is_empty_without_the_vendors_tool(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert devices.gpu_usage() == {}
