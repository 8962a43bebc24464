"""Benchmarks of a GPU begin with whether there is one, and keep what they have measured if something fails."""

from __future__ import annotations

import importlib.util
import json
import runpy
import sys
import types
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).parents[3] / "benchmarks" / "llm"
WITHOUT_TRITON = ("gpu", "gpu_quality")
WITH_TRITON = (
    *("decode_attention", "experts", "gpu_adapters", "gpu_families", "group_scaled"),
    *("one_row_step", "persistent_step", "sampling"),
)
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="there is no Triton here")


def test_a_missing_device_is_named(monkeypatch):
    names = WITHOUT_TRITON + (WITH_TRITON if importlib.util.find_spec("triton") else ())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "path", [str(SCRIPTS), *sys.path])
    before = set(sys.modules)
    try:
        for name in names:
            monkeypatch.setattr(sys, "argv", [f"{name}.py"])
            with pytest.raises(SystemExit, match="needs a CUDA device"):
                runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")
    finally:
        for name in set(sys.modules) - before:
            if "/benchmarks/" in str(getattr(sys.modules[name], "__file__", None) or ""):
                del sys.modules[name]


@pytest.fixture
def scripts(monkeypatch):
    """The benchmarks' modules can be imported, and are forgotten afterwards."""
    monkeypatch.setattr(sys, "path", [str(SCRIPTS), str(SCRIPTS / "candidates"), *sys.path])
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if "/benchmarks/" in str(getattr(sys.modules[name], "__file__", None) or ""):
            del sys.modules[name]


def kept_figures(kept):
    return json.loads(kept.file.read_text())


@pytest.mark.usefixtures("scripts")
def test_figures_are_kept_though_a_part_fails(tmp_path, capsys):
    from kept_results import KeptResults

    kept = KeptResults(tmp_path / "new", "llm-gpu", {"command": "gpu.py", "kinds": {}})
    assert kept_figures(kept)["command"] == "gpu.py"
    with kept.part("int8"):
        kept.figures["kinds"]["int8"] = {"ms": 3.2}
        raise torch.OutOfMemoryError("no memory " * 200)
    with kept.part("int4"):
        kept.figures["kinds"]["int4"] = {"ms": 2.1}
    found = kept_figures(kept)
    assert found["kinds"] == {"int8": {"ms": 3.2}, "int4": {"ms": 2.1}}
    assert list(found["errors"]) == ["int8"]
    assert found["errors"]["int8"].startswith("OutOfMemoryError: no memory")
    assert kept.has_errors
    assert "int8 failed" in capsys.readouterr().err


@pytest.mark.usefixtures("scripts")
def test_a_run_that_is_interrupted_leaves_what_it_has_found(tmp_path):
    from kept_results import KeptResults

    kept = KeptResults(tmp_path, "llm-gpu", {})
    kept.figures["read_gb_per_s"] = 4300.0
    kept.save()
    with pytest.raises(KeyboardInterrupt), kept.part("int8"):
        raise KeyboardInterrupt
    assert kept_figures(kept)["read_gb_per_s"] == 4300.0
    assert KeptResults(None, "llm-gpu", {}).file is None


@needs_triton
@pytest.mark.usefixtures("scripts")
def test_a_variant_that_fails_leaves_the_others(tmp_path, monkeypatch, capsys):
    import persistent_step
    from kept_results import KeptResults

    class Step:
        def __init__(self, model, cache, defines=None):
            if defines and "NB" in defines:
                raise RuntimeError("Kernel compilation failed")
            self.run = lambda inputs: torch.ones(1, 4)

    given = types.SimpleNamespace(block_tables_SB=torch.ones(1, 1))
    for name, value in {
        "CandidateStep": Step,
        "CudaNetwork": Step,
        "inputs_of": lambda *_: given,
        "random_cache": lambda *_: None,
        "quantized_network": lambda *_: types.SimpleNamespace(arch=None),
        "replay_ms": lambda *_: 2.0,
        "start_thread": lambda: None,
    }.items():
        monkeypatch.setattr(persistent_step, name, value)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    kept = KeptResults(tmp_path, "llm-persistent-step", {})
    names = ["present", "128 blocks", "direct"]
    persistent_step.print_variants(None, names, ["int8", "fp8"], 200, kept)
    found = kept_figures(kept)
    one = {"present": "2.000 (0.0000)", "128 blocks": "failed", "direct": "2.000 (0.0000)"}
    assert found["variants"] == {"int8": one, "fp8": one}
    assert set(found["errors"]) == {"int8 128 blocks", "fp8 128 blocks"}
    assert "128 blocks" in capsys.readouterr().out
