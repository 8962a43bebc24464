"""need_cpu_kernels: for tests of the C++ kernels, which are built where there is a compiler."""

from __future__ import annotations

import pytest

from flambeau.llm.backends.cpu.bindings import kernels
from flambeau.llm.backends.cpu.kernel_builds import find_compiler


def need_cpu_kernels() -> None:
    """Skip the test on a machine without a compiler. Elsewhere, kernels that cannot be built are a failure."""
    if kernels.load():
        return
    try:
        find_compiler()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    pytest.fail("the CPU kernels could not be built or loaded; the log says why")
