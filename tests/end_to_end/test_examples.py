"""Every example is used as its README says, on a real server: only the ports are others."""

from __future__ import annotations

import shutil

import pytest

from support.pages import Reader
from support.snippets import ROOT

NAMES = ("batching", "chat", "hugging_face", "image_classifier", "metrics", "onnx", "sessions", "streaming")
ELSEWHERE = ("large_models", "vad")  # test_gpt_handler.py, test_vad_example.py


def test_every_example_is_tested():
    folders = {path.name for path in (ROOT / "examples").iterdir() if path.is_dir()}
    assert folders == {*NAMES, *ELSEWHERE}


@pytest.mark.slow
@pytest.mark.timeout(600)  # a busy machine is no failure
@pytest.mark.parametrize("name", NAMES)
def test_example_works_as_its_readme_says(name, tmp_path):
    folder = tmp_path / name
    shutil.copytree(ROOT / "examples" / name, folder)
    with Reader(folder) as reader:
        reader.follow(folder / "README.md")
    assert reader.comparisons > 0
