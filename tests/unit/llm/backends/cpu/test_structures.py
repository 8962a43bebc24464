"""The structures of the C++ kernels have the fields of their Python twins, in the same order."""

from __future__ import annotations

import ctypes
import re

import pytest

from flambeau.llm.backends.cpu import bindings
from flambeau.llm.backends.cpu.kernel_builds import SOURCES

STRUCTURES: dict[str, tuple[type[ctypes.Structure], str]] = {
    "PagedStep": (bindings.CPagedStep, "paged_step.h"),
    "Matrix": (bindings.CMatrix, "matrix.h"),
    "Norm": (bindings.CNorm, "norms.h"),
    "Experts": (bindings.CExperts, "experts.h"),
    "Recurrence": (bindings.CRecurrence, "recurrent.h"),
    "Indexer": (bindings.CIndexer, "sparse_attention.h"),
    "LatentAttention": (bindings.CLatentAttention, "latent_attention.h"),
    "AltUp": (bindings.CAltUp, "altup.h"),
    "SharedBlock": (bindings.CSharedBlock, "shared_block.h"),
    "Layer": (bindings.CLayer, "network.h"),
    "Network": (bindings.CNetwork, "network.h"),
    "Tokens": (bindings.CTokens, "network.h"),
    "LoraPart": (bindings.CLoraPart, "lora.h"),
    "LoraLayer": (bindings.CLoraLayer, "lora.h"),
}
XIELU = ["positive", "negative", "beta", "epsilon"]  # a structure within Layer


def fields_of(structure: str, file: str) -> list[str]:
    """The names of the fields, which come before all functions."""
    text = re.sub(r"//.*", "", (SOURCES / file).read_text())
    found = re.search(rf"struct {structure} \{{(.*?)^\}};", text, re.DOTALL | re.MULTILINE)
    assert found is not None
    names: list[str] = []
    for statement in re.sub(r"\{\}", "", found[1]).split(";"):
        if "(" in statement:
            break
        declared = re.sub(r"=\s*[^,]+", "", statement)
        names += [re.findall(r"\w+", one)[-1] for one in declared.split(",") if one.strip()]
    return names


@pytest.mark.parametrize("structure", STRUCTURES)
def test_fields_have_the_same_order(structure):
    twin, file = STRUCTURES[structure]
    expected = [name.rstrip("_") for name, *_ in twin._fields_]
    found = [own for name in fields_of(structure, file) for own in (XIELU if name == "xielu" else [name])]
    assert found == expected
    assert fields_of("Xielu", "activations.h") == XIELU
