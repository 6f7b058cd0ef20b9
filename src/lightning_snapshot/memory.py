"""The staging memory of saves and loads: a few buffers that are used again and again, within a budget."""

import ctypes
import gc
import mmap
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

__all__ = [
    "UNLIMITED_BYTES",
    "Buffer",
    "BufferPool",
    "advise_huge_pages",
    "copy_memory",
    "memory_at",
    "no_garbage_collection",
]

UNLIMITED_BYTES = 2**62
_PAGE_BYTES = mmap.PAGESIZE
# Below this, huge pages do not pay.
_MIN_HUGE_BYTES = 4 * 1024 * 1024
# The first one gives other threads a chance, which costs more than a small copy takes.
_memmove_unlocked = ctypes.memmove
_memmove_locked = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ctypes.cast(ctypes.memmove, ctypes.c_void_p).value or 0
)
_SMALL_COPY_BYTES = 64 * 1024


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Keep the garbage collector from running, for a short piece of work that makes many objects and no cycles.

    Each of its full runs looks at every object of the program, which takes longer than the work itself.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def copy_memory(target: int, source: int, size_bytes: int) -> None:
    """Copy bytes from one address to another; both must be valid, on the CPU, for that many bytes."""
    move = _memmove_locked if size_bytes <= _SMALL_COPY_BYTES else _memmove_unlocked
    move(target, source, size_bytes)


def advise_huge_pages(tensor: torch.Tensor) -> None:
    """Ask for large pages behind a fresh tensor on the CPU: touching it for the first time is then much faster."""
    size_bytes = tensor.untyped_storage().nbytes()
    advice = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux only
    if advice is None or size_bytes < _MIN_HUGE_BYTES or tensor.device.type != "cpu":
        return
    begin = tensor.untyped_storage().data_ptr()
    first = -(-begin // _PAGE_BYTES) * _PAGE_BYTES
    # Only advice: a kernel without huge pages refuses, and nothing is lost.
    ctypes.CDLL(None).madvise(
        ctypes.c_void_p(first), ctypes.c_size_t((begin + size_bytes - first) // _PAGE_BYTES * _PAGE_BYTES), advice
    )


class Buffer:
    """One page-aligned block of staging memory.

    Attributes:
        view: As bytes.
        tensor: As a uint8 vector.
        address: Where it begins.
        unpin: Takes back what made the memory reachable for a GPU, if that was done.
    """

    __slots__ = ("address", "tensor", "unpin", "view")

    def __init__(self, size_bytes: int) -> None:
        # Private: a process that is forked must not find its parent's data appear in its own buffers.
        block = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.view = memoryview(block)
        self.tensor = torch.frombuffer(block, dtype=torch.uint8)
        self.address = self.tensor.data_ptr()
        self.unpin: Callable[[], object] | None = None
        advise_huge_pages(self.tensor)

    def __del__(self) -> None:
        unpin = getattr(self, "unpin", None)
        if unpin is not None:
            unpin()


def memory_at(address: int, size_bytes: int) -> memoryview:
    """The bytes at an address on the CPU; whoever owns the memory must keep it meanwhile."""
    return memoryview((ctypes.c_ubyte * size_bytes).from_address(address)).cast("B")


class BufferPool:
    """Buffers of one size. Any thread may take one; who finds none waits.

    Buffers are made when they are first needed, and kept for the next save or load until `release`.

    Args:
        budget_bytes: All buffers together stay below this, but there is always at least one.
        block_bytes: Size of a buffer.
    """

    def __init__(self, budget_bytes: int, block_bytes: int) -> None:
        self.block_bytes = block_bytes
        self._unmade = self._limit = max(1, budget_bytes // block_bytes)
        self._idle: list[Buffer] = []
        self._changed = threading.Condition()

    @property
    def limit_bytes(self) -> int:
        """Most memory that all buffers together can have."""
        return self._limit * self.block_bytes

    @property
    def reserved_bytes(self) -> int:
        """Memory of all buffers that exist now."""
        return (self._limit - self._unmade) * self.block_bytes

    @property
    def used_bytes(self) -> int:
        """Memory of the buffers that somebody has taken."""
        return self.reserved_bytes - len(self._idle) * self.block_bytes

    @contextmanager
    def buffer(self) -> Iterator[Buffer]:
        """Take a buffer for the duration of the ``with`` block. Its content is arbitrary."""
        buffer = self.take()
        try:
            yield buffer
        finally:
            self.give_back(buffer)

    def release(self) -> None:
        """Give back the memory of all buffers that nobody has taken. The pool can be used again."""
        with self._changed:
            self._unmade += len(self._idle)
            self._idle.clear()

    def give_back(self, buffer: Buffer) -> None:
        """Let others have a buffer that `take` gave."""
        with self._changed:
            self._idle.append(buffer)
            self._changed.notify()

    def take(self) -> Buffer:
        """A buffer until it is given back. Its content is arbitrary."""
        with self._changed:
            self._changed.wait_for(lambda: self._idle or self._unmade)
            if self._idle:
                return self._idle.pop()
            self._unmade -= 1
        try:
            return Buffer(self.block_bytes)
        except BaseException:
            # Who waits for this buffer has to try, and fail, as well.
            with self._changed:
                self._unmade += 1
                self._changed.notify()
            raise
