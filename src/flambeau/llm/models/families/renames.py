"""Renames: patterns of names of tensors, and what replaces them."""

from __future__ import annotations

import re
from collections.abc import Callable

Renames = tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...]
