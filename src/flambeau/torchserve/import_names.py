"""Old import names whose modules pass assignments on: a test that patches a name there reaches the code behind it."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any


class ForwardingModule(ModuleType):
    """A module of re-exports. What is set or deleted in it is set or deleted in `_module` too, as `mock.patch` expects.

    `_renamed` has the names that differ there.
    """

    _module: ModuleType
    _renamed: dict[str, str]

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if not name.startswith("_"):
            setattr(self._module, self._renamed.get(name, name), value)

    def __delattr__(self, name: str) -> None:
        super().__delattr__(name)
        if not name.startswith("_"):
            delattr(self._module, self._renamed.get(name, name))


def forward(name: str, module: ModuleType, **renamed: str) -> None:
    """Make the module of that name pass assignments on to `module`."""
    if name == "__main__":
        return
    here = sys.modules[name]
    here.__class__ = ForwardingModule
    vars(here).update(_module=module, _renamed=renamed)
