"""The kernels, for tests that need them."""

from __future__ import annotations

import pytest

from support.cpu_kernels import need_cpu_kernels


@pytest.fixture(scope="package")
def loaded() -> None:
    """The kernels, built if need be."""
    need_cpu_kernels()
