"""Requirements of a model against the packages that it shares with the server."""

from __future__ import annotations

from pathlib import Path

import pytest

from flambeau.serving.model_sources.shared_packages import find_conflicts, shared_versions, without_lines

SHARED = {"torch": "2.11.0+cpu", "torchvision": "0.26.0"}


@pytest.mark.parametrize(
    "line",
    [
        "torch<2.2",
        "torch==2.1.0 # as trained",
        "Torch ~= 1.13",
        "torchvision<0.20",
        'torch==2.0; python_version > "3"',
        "torch[opt]==1.0",
    ],
)
def test_pin_of_another_version_is_a_conflict(line):
    [conflict] = find_conflicts(f"numpy\n{line}\n", SHARED)
    assert conflict.number == 2
    assert conflict.shared == SHARED[conflict.name.lower()]


@pytest.mark.parametrize(
    "line",
    [
        "",
        "# torch<2",
        "torch",
        "torch>=2",
        "torch==2.11.0",
        'torch<2; python_version < "3"',
        "torchmetrics<1",
        "numpy<2",
        "./torch-1.0-py3-none-any.whl",
        "-r more.txt",
        "--index-url https://torch<2",
    ],
)
def test_other_lines_are_not(line):
    assert find_conflicts(line, SHARED) == []


def test_conflict_names_the_line_and_both_versions():
    [conflict] = find_conflicts("torch<2.2", SHARED)
    assert str(conflict) == "line 1 wants torch<2.2, and models share torch 2.11.0+cpu with the server"


def test_shared_are_torch_and_what_belongs_to_it():
    installed = [("torch", "2"), ("nvidia_cublas_cu12", "12"), ("numpy", "2"), ("torchmetrics", "1")]
    assert shared_versions(installed) == {"torch": "2", "nvidia-cublas-cu12": "12"}


def test_lines_are_left_out_and_included_lists_are_found_from_elsewhere():
    text = without_lines("torch<2\nnumpy\n-r more.txt\n", [1], Path("/model"))
    assert text == "numpy\n-r /model/more.txt\n"
