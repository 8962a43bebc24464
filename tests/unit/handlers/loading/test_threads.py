"""How many threads a worker's libraries may use."""

from __future__ import annotations

from flambeau.handlers.loading.threads import choose_threads


def test_threads_are_the_environments_else_the_cores(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert choose_threads() == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    cores = choose_threads()
    assert cores >= 1
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert choose_threads() == cores
