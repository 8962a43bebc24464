from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from flambeau.errors import HandlerError
from flambeau.handlers import device
from flambeau.handlers.device import choose_device, choose_threads, dtype_named, prepare


class Machine:
    """A machine with these devices, as torch would show it."""

    def __init__(self, monkeypatch):
        self.monkeypatch = monkeypatch
        self.has()

    def has(self, *, cuda=False, xpu=False, mps=False, capability=(9, 0)):
        patch = self.monkeypatch.setattr
        patch(torch.cuda, "is_available", lambda: cuda)
        patch(torch.cuda, "get_device_capability", lambda _: capability)
        patch(torch.cuda, "set_device", lambda chosen: setattr(self, "current", chosen))
        patch(torch.xpu, "is_available", lambda: xpu)
        patch(torch.backends.mps, "is_available", lambda: mps)
        return self


@pytest.fixture
def machine(monkeypatch):
    monkeypatch.delenv("TS_IPEX_GPU_ENABLE", raising=False)
    return Machine(monkeypatch)


def test_order_is_cuda_xpu_mps_cpu(machine, monkeypatch):
    monkeypatch.setenv("TS_IPEX_GPU_ENABLE", "true")
    machine.has(cuda=True, xpu=True, mps=True)
    assert choose_device(3) == (torch.device("cuda", 3), "cuda")
    machine.has(xpu=True, mps=True)
    assert choose_device(1) == (torch.device("xpu", 1), "xpu")
    machine.has(mps=True)
    assert choose_device(0) == (torch.device("mps"), "mps")
    machine.has()
    assert choose_device(0) == (torch.device("cpu"), "cpu")


def test_worker_without_a_gpu_number_stays_on_the_cpu(machine, monkeypatch):
    monkeypatch.setenv("TS_IPEX_GPU_ENABLE", "true")
    machine.has(cuda=True, xpu=True, mps=True)
    assert choose_device(None) == (torch.device("cpu"), "cpu")


def test_xpu_is_used_only_if_enabled(machine):
    machine.has(xpu=True)
    assert choose_device(0) == (torch.device("cpu"), "cpu")


def test_xla_comes_after_the_gpus_and_has_no_map_location(machine, monkeypatch):
    package, core, model = (ModuleType(name) for name in ("torch_xla", "torch_xla.core", "torch_xla.core.xla_model"))
    package.__spec__ = SimpleNamespace()
    model.xla_device = lambda: torch.device("meta")  # stands for the device that only torch_xla can make
    core.xla_model = model
    for module in (package, core, model):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    assert choose_device(None) == (torch.device("meta"), None)
    machine.has(cuda=True)
    assert choose_device(0) == (torch.device("cuda", 0), "cuda")


@pytest.mark.parametrize(("capability", "precision"), [((7, 5), "highest"), ((8, 0), "high"), ((9, 0), "high")])
def test_float32_products_are_quick_from_ampere_on(machine, monkeypatch, capability, precision):
    kept = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        machine.has(cuda=True, capability=capability)
        prepare(torch.device("cuda", 1))
        assert torch.get_float32_matmul_precision() == precision
        assert machine.current == torch.device("cuda", 1)
    finally:
        torch.set_float32_matmul_precision(kept)


def test_dtype_is_named():
    assert dtype_named("bfloat16") is torch.bfloat16
    with pytest.raises(HandlerError, match="float8 is not known; use one of float32"):
        dtype_named("float8")
    assert set(device.DTYPES) >= {"float16", "bfloat16", "float32"}


def test_threads_are_the_environments_else_the_cores(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert choose_threads() == 3
    monkeypatch.setenv("OMP_NUM_THREADS", "many")
    cores = choose_threads()
    assert cores >= 1
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert choose_threads() == cores
