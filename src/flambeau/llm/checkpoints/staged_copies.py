"""StagedCopies: bytes of files go to a GPU through pinned memory, read by several threads.

A mapped file is copied by one thread that waits for each page, at a few GB/s even from the system's page cache.
"""

from __future__ import annotations

import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

NUM_THREADS = 8
CHUNK_BYTES = 8 << 20
NUM_CHUNKS = 2  # of each thread: one is read while the other is copied to the device


class PinnedChunks:
    """The chunks of one thread, and the stream that copies them to the device."""

    def __init__(self, device: torch.device) -> None:
        self.is_cuda = device.type == "cuda"
        self.chunks = [torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=self.is_cuda) for _ in range(NUM_CHUNKS)]
        self.stream: Any = torch.cuda.Stream(device) if self.is_cuda else None  # type: ignore[no-untyped-call]
        self._copied: list[Any] = [None] * NUM_CHUNKS  # events

    def copy(self, turn: int, num_bytes: int, target: Tensor) -> None:
        """Start to copy what a chunk holds."""
        part = self.chunks[turn][:num_bytes]
        if not self.is_cuda:
            target.copy_(part)
            return
        with torch.cuda.stream(self.stream):
            target.copy_(part, non_blocking=True)
            self._copied[turn] = self.stream.record_event()

    def wait(self, turn: int) -> None:
        """Wait until a chunk may be overwritten."""
        if self._copied[turn] is not None:
            self._copied[turn].synchronize()


class StagedCopies:
    """A pool of threads that copy parts of files to tensors on a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._threads = ThreadPoolExecutor(min(NUM_THREADS, os.cpu_count() or 1), thread_name_prefix="reading")
        self._of_thread = threading.local()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._threads.shutdown(cancel_futures=True)

    def start(self, path: Path, offset: int, target: Tensor) -> Future[None]:
        """Fill a contiguous tensor from a place in a file; the result raises OSError if the file ends before."""
        is_free = None
        if self._device.type == "cuda":
            # The tensor's memory may be that of a freed one, which the device still computes with.
            is_free = torch.cuda.current_stream(self._device).record_event()
        return self._threads.submit(self._copy, path, offset, target.view(-1).view(torch.uint8), is_free)

    def _copy(self, path: Path, offset: int, target: Tensor, is_free: Any) -> None:
        stage: PinnedChunks | None = getattr(self._of_thread, "stage", None)
        if stage is None:
            stage = self._of_thread.stage = PinnedChunks(self._device)
        if is_free is not None:
            stage.stream.wait_event(is_free)
        file = os.open(path, os.O_RDONLY)
        try:
            for number, start in enumerate(range(0, len(target), CHUNK_BYTES)):
                turn, num_bytes = number % NUM_CHUNKS, min(CHUNK_BYTES, len(target) - start)
                stage.wait(turn)
                read_fully(file, offset + start, stage.chunks[turn].numpy().data[:num_bytes], path)
                stage.copy(turn, num_bytes, target[start : start + num_bytes])
        finally:
            os.close(file)
        for turn in range(NUM_CHUNKS):
            stage.wait(turn)


def read_fully(file: int, offset: int, into: memoryview, path: Path) -> None:
    """Fill the memory; OSError if the file ends before."""
    done = 0
    while done < len(into):
        count = os.preadv(file, [into[done:]], offset + done)
        if not count:
            raise OSError(f"{path} ends at {offset + done} bytes; download it again")
        done += count
