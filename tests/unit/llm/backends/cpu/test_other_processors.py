"""The whole step of the kernels on other processors: AVX2 here, NEON in an emulator; each against this processor's."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from flambeau.llm.backends.cpu import kernel_builds

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
]  # a compiler runs for a minute or more, perhaps beside others

PROGRAM = Path(__file__).parent / "tiny_network.cpp"
CROSS_COMPILER = "aarch64-linux-gnu-g++"
EMULATORS = ("qemu-aarch64-static", "qemu-aarch64")
INTEGER_KINDS = ("4", "5", "7", "10")  # of weights, and int8 of the cache: numbers of csrc/matrix.h
Logits = dict[str, np.ndarray]  # by kinds of weights and cache, or by that of a recurrence


def run_program(folder: Path, compiler: str, flags: str, emulator: tuple[str, ...] = ()) -> tuple[str, Logits]:
    """The instructions that were used, and what the network gives."""
    program = folder / "tiny_network"
    little = [flag.replace("-O3", "-O0") for flag in kernel_builds.COMMON_FLAGS]  # compiles in a third of the time
    # One unit, so that what all include is read once.
    sources = [PROGRAM, *sorted(kernel_builds.SOURCES.glob("attention_*.cpp"))]
    unit = folder / "all.cpp"
    unit.write_text("".join(f'#include "{source}"\n' for source in sources))
    command = [compiler, *little, *flags.split(), f"-I{kernel_builds.SOURCES}", str(unit), "-o", str(program)]
    subprocess.run(["nice", "-n", "15", *command], check=True)
    done = subprocess.run([*emulator, str(program)], capture_output=True, text=True, check=True)
    first, *lines = done.stdout.splitlines()
    name, _, failed = first.partition(": ")
    assert failed == "0"
    found = {" ".join(line.split()[:2]): np.array(line.split()[2:], dtype=float) for line in lines}
    assert len(found) == 36
    return name, found


def assert_same(found: Logits, expected: Logits) -> None:
    for kinds, logits in expected.items():
        assert np.isfinite(logits).all()
        # Where inputs are rounded, another order of a sum may give the next step.
        allowed = 0.03 if set(kinds.split()) & set(INTEGER_KINDS) else 2e-2 if "6" in kinds or "2" in kinds else 1e-3
        assert np.abs(found[kinds] - logits).max() <= allowed * np.abs(logits).max(), kinds


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Logits:
    """By this processor without any of its newer instructions."""
    try:
        compiler = kernel_builds.find_compiler()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    return run_program(tmp_path_factory.mktemp("plain"), compiler, "-pthread")[1]


def test_avx2_gives_the_same(plain, tmp_path):
    needed = next(each for each in kernel_builds.VARIANTS["x86_64"] if each.name == "x86-64-v3")
    if platform.machine() != "x86_64" or not needed.features <= set(kernel_builds.processor_features().split()):
        pytest.skip("this processor does not execute AVX2")
    name, found = run_program(tmp_path, kernel_builds.find_compiler(), "-pthread " + " ".join(needed.flags))
    assert name == "AVX2"
    assert_same(found, plain)


def test_neon_gives_the_same(plain, tmp_path):
    emulator = next(filter(None, map(shutil.which, EMULATORS)), None)
    if platform.machine() == "aarch64":
        pytest.skip("this processor has NEON: the other tests use it")
    if shutil.which(CROSS_COMPILER) is None or emulator is None:
        pytest.skip(f"needs {CROSS_COMPILER} and {EMULATORS[0]}")
    flags = kernel_builds.VARIANTS["aarch64"][0].flags  # without dot products, the code is that of `plain`
    name, found = run_program(tmp_path, CROSS_COMPILER, "-static -pthread " + " ".join(flags), (emulator,))
    assert name == "NEON with sdot"
    assert_same(found, plain)
