"""On the path of every process the tests start: lets a CPU build of torch import torchvision.

Such a build cannot load torchvision's compiled operators, so the two schemas that it asks for while it is imported are
declared here, just before. Nothing that the tests run calls them.
"""

from __future__ import annotations

import sys


class DeclareOperators:
    """Sees each import before the others do, and finds nothing itself."""

    libraries: list[object] = []  # noqa: RUF012  (a library that is forgotten takes its operators along)

    def find_spec(self, name, path=None, target=None):
        if name == "torchvision" and not self.libraries:
            import torch

            self.libraries.append(torch)
            if torch.version.cuda is not None:
                return
            library = torch.library.Library("torchvision", "DEF")
            self.libraries.append(library)
            for operator in ("nms", "qnms"):
                library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return


sys.meta_path.insert(0, DeclareOperators())
