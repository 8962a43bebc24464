"""CUDA C++ is compiled without a CUDA toolkit; where PyTorch brings NVRTC, every text compiles without a GPU."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch

from flambeau.llm.backends.cuda import few_row_kernel, warpgroup_kernel
from flambeau.llm.backends.cuda.cuda_compiler import compile_kernel
from flambeau.llm.backends.cuda.few_row_kernel import BFLOAT16, BLOCKS, FP8, INT4, INT8, SOURCE, STREAM_BLOCKS
from flambeau.llm.backends.cuda.warpgroup_kernel import ProductAdapters, best_division, padded

cpp_extension = pytest.importorskip("torch.utils.cpp_extension", reason="PyTorch needs setuptools to compile")

SOURCES = [*SOURCE.parent.glob("*.cu*")]
H200 = 132
needs_nvrtc = pytest.mark.skipif(torch.version.cuda is None, reason="this PyTorch brings no NVRTC")


class Kernel:
    """What PyTorch gives, and how it was asked."""

    def __init__(self, source, name, **options):
        assert cpp_extension.include_paths("cuda")  # raises an error where there is no toolkit
        self.func, self.asked, self.shared_bytes = self, (source, name, options), 0

    def set_shared_memory_config(self, shared_bytes):
        self.shared_bytes = shared_bytes


@pytest.mark.parametrize("toolkit", [None, "/opt/cuda"])
def test_kernels_are_compiled_with_a_toolkit_and_without(toolkit, monkeypatch):
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", toolkit)
    monkeypatch.setattr(torch.cuda, "_compile_kernel", Kernel)
    found = compile_kernel("text", "few_rows", capability="90a", shared_bytes=1000)
    assert found.asked == ("text", "few_rows", {"compute_capability": "90a", "nvcc_options": ["-std=c++17"]})
    assert found.shared_bytes == 1000
    assert toolkit == cpp_extension.CUDA_HOME


def test_a_text_that_cannot_be_compiled_changes_nothing(monkeypatch):
    def fail(*args, **options):
        raise RuntimeError("Kernel compilation failed")

    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
    monkeypatch.setattr(torch.cuda, "_compile_kernel", fail)
    with pytest.raises(RuntimeError, match="compilation failed"):
        compile_kernel("text", "few_rows")
    assert cpp_extension.CUDA_HOME is None


def test_texts_need_no_headers():
    assert len(SOURCES) > 5
    for source in SOURCES:
        assert not re.search(r"^\s*#\s*include", source.read_text(), re.MULTILINE), source.name


def compiled(source, name, capability):
    """The machine code, by the NVRTC that PyTorch brings; there is no toolkit."""
    code, _ = torch.cuda._utils._nvrtc_compile(source, name, capability, None, ["-std=c++17"])
    assert code.startswith(b"\x7fELF")


@pytest.fixture
def _without_toolkit(monkeypatch):
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", None)
    monkeypatch.setattr(torch.cuda, "_compile_kernel", compile_text)


def compile_text(source, name, *, compute_capability, nvcc_options):
    compiled(source, name, compute_capability)
    return SimpleNamespace(func=None, set_shared_memory_config=lambda shared_bytes: None)


@pytest.mark.timeout(300)
@needs_nvrtc
@pytest.mark.usefixtures("_without_toolkit")
@pytest.mark.parametrize("kind", [INT8, FP8, INT4])
def test_products_of_a_few_quantized_rows_compile(kind):
    block = BLOCKS[8, kind][2]
    for options in ({}, {"scaled": True}):
        source = few_row_kernel.source_of(kind, block, 8, 64, gates=False, **options)
        compile_kernel(source, "few_rows")
    gated = few_row_kernel.source_of(kind, BLOCKS[32, kind][0], 32, 128, gates=True)
    compile_kernel(gated, "few_rows")
    stream = few_row_kernel.source_of(kind, STREAM_BLOCKS[kind], 8, 64, gates=False, stream=2)
    compile_kernel(stream, "few_rows")


@pytest.mark.timeout(300)
@needs_nvrtc
@pytest.mark.usefixtures("_without_toolkit")
@pytest.mark.parametrize(
    ("gates", "adapters"),
    [
        (False, ProductAdapters()),
        (True, ProductAdapters()),
        (True, ProductAdapters(inner=128, segments=2)),
        (False, ProductAdapters(inner=128, segments=3)),
        (False, ProductAdapters(shrunk=128)),
    ],
)
@pytest.mark.parametrize("rows", [2, 32])
def test_products_of_bfloat16_rows_compile(rows, gates, adapters):
    division = best_division(BFLOAT16, 6144, 4096, rows, H200, gates=gates, adapters=adapters)
    source = warpgroup_kernel.source_of(
        BFLOAT16,
        division.block,
        padded(rows),
        0,
        gates=gates,
        segments=adapters.segments,
        appends=adapters.shrunk > 0,
    )
    compile_kernel(source, "warpgroup_rows", capability="90a")


@pytest.mark.timeout(300)
@needs_nvrtc
@pytest.mark.usefixtures("_without_toolkit")
@pytest.mark.parametrize("kind", [INT8, FP8, INT4])
def test_products_of_many_quantized_rows_compile(kind):
    division = best_division(kind, 4096, 4096, 64, H200, gates=False)
    source = warpgroup_kernel.source_of(kind, division.block, 64, 128, gates=False)
    compile_kernel(source, "warpgroup_rows", capability="90a")
