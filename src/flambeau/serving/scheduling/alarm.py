"""Alarm: calls somebody once, later."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Alarm:
    """Rings once after it was set; while it is set, setting it again changes nothing."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._timer: asyncio.TimerHandle | None = None

    def set(self, delay_s: float) -> None:
        """Ring after that time, unless it rings sooner anyway."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._on_time)

    def cancel(self) -> None:
        """Do not ring."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_time(self) -> None:
        self._timer = None
        self._ring()
