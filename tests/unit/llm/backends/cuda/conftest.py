"""Triton's interpreter with current versions of NumPy."""

from __future__ import annotations

import os

if os.environ.get("TRITON_INTERPRET") == "1":
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_numbers(tensor, scope):
        """Triton 3.6 keeps numbers as arrays of one element, which NumPy 2.4 no longer takes for whole numbers."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_numbers
