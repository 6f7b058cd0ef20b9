"""The staging memory of saves and loads: a few buffers that are used again and again, within a budget."""

import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

__all__ = ["Buffer", "BufferPool"]


@dataclass(frozen=True, slots=True)
class Buffer:
    """One page-aligned block of staging memory, as bytes and as a uint8 vector."""

    view: memoryview
    tensor: torch.Tensor


class BufferPool:
    """Buffers of one size. Any thread may take one; who finds none waits.

    Args:
        budget_bytes: All buffers together stay below this, but there is always at least one.
        block_bytes: Size of a buffer.
    """

    def __init__(self, budget_bytes: int, block_bytes: int) -> None:
        self._block_bytes = block_bytes
        self._unmade = max(1, budget_bytes // block_bytes)
        self._idle: list[Buffer] = []
        self._changed = threading.Condition()

    @contextmanager
    def buffer(self) -> Iterator[Buffer]:
        """Take a buffer for the duration of the ``with`` block. Its content is arbitrary."""
        buffer = self._take()
        try:
            yield buffer
        finally:
            with self._changed:
                self._idle.append(buffer)
                self._changed.notify()

    def _take(self) -> Buffer:
        with self._changed:
            self._changed.wait_for(lambda: self._idle or self._unmade)
            if self._idle:
                return self._idle.pop()
            self._unmade -= 1
        try:
            block = mmap.mmap(-1, self._block_bytes)
        except BaseException:
            # Who waits for this buffer has to try, and fail, as well.
            with self._changed:
                self._unmade += 1
                self._changed.notify()
            raise
        return Buffer(memoryview(block), torch.frombuffer(block, dtype=torch.uint8))
