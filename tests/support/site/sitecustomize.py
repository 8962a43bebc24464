"""On the path of every process the tests start: lets a CPU build of torch import torchvision, and sooner.

Such a build cannot load torchvision's compiled operators, so the two schemas that it asks for while it is imported are
declared here, just before. Nothing that the tests run calls them.

One of torchvision's modules imports the whole of torch._dynamo, a second of CPU time in dozens of processes, for one
function, which it calls only to compile an operator. Here the function imports torch._dynamo when it is called.

Torch ends its import with what thousands of operators say of tensors without data, 0.4 s of CPU time in each worker. In
the processes that tests start it comes with the first module that computes with such tensors. Without it, an operator
of a tensor without data raises NotImplementedError.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType

FOR_ONE_FUNCTION = "torchvision.ops.roi_align"
DYNAMO = ("torch._dynamo", "torch._dynamo.utils")
OF_TENSORS_WITHOUT_DATA = "torch._meta_registrations"
# Also torch.export and Inductor, which import sympy.
NEED_IT = ("sympy", "torch._decomp", "torch._dynamo", "torch._prims", "torch._refs", "transformers")


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


class Present:
    """Loads the module that is there, or one without contents."""

    def create_module(self, spec):
        return sys.modules.get(spec.name)

    def exec_module(self, module):
        pass


class Postpone:
    """Sees each import before the others do, and has a module imported that torch would import at once."""

    is_postponed = False

    def find_spec(self, name, path=None, target=None):
        if not self.is_postponed:
            self.is_postponed = name == OF_TENSORS_WITHOUT_DATA
            return ModuleSpec(name, Present()) if self.is_postponed else None
        module = sys.modules.get(OF_TENSORS_WITHOUT_DATA)
        if module is not None and module.__spec__.origin is None:
            del sys.modules[OF_TENSORS_WITHOUT_DATA]  # whoever imports it now gets it
        if name in NEED_IT:
            sys.meta_path.remove(self)
            import_module(OF_TENSORS_WITHOUT_DATA)
            if name in sys.modules:  # it has imported this one, which must not run again
                sys.modules[name].__spec__ = ModuleSpec(name, Present())
                return sys.modules[name].__spec__
        return None


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
if __name__ == "sitecustomize":  # not in the process of the tests, nor in forks of one that has imported torch
    sys.meta_path.insert(0, Postpone())
