"""On the path of every process the tests start: lets a CPU build of torch import torchvision, and sooner.

Such a build cannot load torchvision's compiled operators, so the two schemas that it asks for while it is imported are
declared here, just before. Nothing that the tests run calls them.

One of torchvision's modules imports the whole of torch._dynamo, a second of CPU time in dozens of processes, for one
function, which it calls only to compile an operator. Here the function imports torch._dynamo when it is called.
"""

from __future__ import annotations

import sys
from importlib.machinery import PathFinder, SourceFileLoader
from types import ModuleType

FOR_ONE_FUNCTION = "torchvision.ops.roi_align"
DYNAMO = ("torch._dynamo", "torch._dynamo.utils")


def is_compile_supported(device_type):
    from torch._dynamo.utils import is_compile_supported

    return is_compile_supported(device_type)


class WithoutDynamo(SourceFileLoader):
    """Runs a module while modules that hold only the function stand for torch._dynamo."""

    def exec_module(self, module):
        if DYNAMO[0] in sys.modules:
            super().exec_module(module)
            return
        for name in DYNAMO:
            sys.modules[name] = ModuleType(name)
            sys.modules[name].is_compile_supported = is_compile_supported
        try:
            super().exec_module(module)
        finally:
            for name in DYNAMO:
                del sys.modules[name]


class DeclareOperators:
    """Sees each import before the others do."""

    libraries: list[object] = []  # noqa: RUF012  (a library that is forgotten takes its operators along)

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision" and not self.libraries:
            import torch

            self.libraries.append(torch)
            if torch.version.cuda is not None:
                return None
            library = torch.library.Library("torchvision", "DEF")
            self.libraries.append(library)
            for operator in ("nms", "qnms"):
                library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        if name == FOR_ONE_FUNCTION and (spec := PathFinder.find_spec(name, path)) is not None:
            spec.loader = WithoutDynamo(name, spec.origin)
            return spec
        return None


sys.meta_path.insert(0, DeclareOperators())
