"""Threads fill tensors from files: here on the CPU, where the same code copies."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import flambeau.examples
from flambeau.llm.checkpoints import parameter_filler, staged_copies
from flambeau.llm.checkpoints.checkpoint import load_model
from flambeau.llm.checkpoints.staged_copies import StagedCopies
from flambeau.llm.checkpoints.weight_files import SafetensorsFile
from flambeau.llm.errors import CheckpointError

MODEL = Path(flambeau.examples.__file__).parent / "storyteller" / "draft"


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch) -> None:
    """Most tensors take several, and the last is not full."""
    monkeypatch.setattr(staged_copies, "CHUNK_BYTES", 1000)


def test_tensors_have_the_bytes_of_the_file(tmp_path: Path):
    numbers = {f"{i}": torch.randn(i, 50).bfloat16() for i in (1, 10, 40)}
    save_file(numbers, tmp_path / "x.safetensors", metadata={"format": "pt"})
    file, found = SafetensorsFile(tmp_path / "x.safetensors"), {}
    with StagedCopies(torch.device("cpu")) as copies:
        started = []
        for name, tensor in numbers.items():
            found[name] = torch.empty_like(tensor)
            started.append(copies.start(file.path, file.offset(name), found[name]))
        for each in started:
            each.result()
    assert all(torch.equal(found[name], tensor) for name, tensor in numbers.items())


def test_a_network_is_the_same_as_one_that_is_placed_tensor_by_tensor(monkeypatch):
    expected, arrived = load_model(MODEL).state_dict(), []
    monkeypatch.setattr(parameter_filler, "place_one_by_one", parameter_filler.place_by_threads)
    model = load_model(MODEL, arrived=lambda name, module: arrived.append(name))
    assert model.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())
    assert len(arrived) == len(set(arrived)) > 0


def test_a_file_that_ends_too_soon_is_named(tmp_path: Path):
    (tmp_path / "x").write_bytes(b"short")
    with StagedCopies(torch.device("cpu")) as copies:
        copied = copies.start(tmp_path / "x", 2, torch.empty(4))
        with pytest.raises(CheckpointError, match="x ends at 5 bytes"):
            parameter_filler.finished(None, copied)  # type: ignore[arg-type]
