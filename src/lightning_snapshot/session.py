"""What is kept from one save or load to the next: staging memory, the last plan, and the records."""

import os
import threading
from dataclasses import dataclass, field
from typing import Any

from lightning_snapshot.manifest import Manifest
from lightning_snapshot.memory import BufferPool
from lightning_snapshot.options import Options
from lightning_snapshot.stats import Stats
from lightning_snapshot.write_plan import Planner

__all__ = ["Heard", "Session"]


@dataclass(slots=True)
class Heard:
    """What the ranks have told each other in the last save that succeeded, so that they need not repeat it.

    Attributes:
        token: Of that save, if this rank remembers it.
        said: Digest of what this rank has said.
        told: What rank 0 has told it.
        contributions: On rank 0: digest → what was said.
        parts: On rank 0: digest of what each rank was told.
        remembering: On rank 0: whether each rank remembers.
    """

    token: str = ""
    said: bytes = b""
    told: bytes = b""
    contributions: dict[bytes, Any] = field(default_factory=dict)
    parts: list[bytes] = field(default_factory=list)
    remembering: list[bool] = field(default_factory=list)


class Session:
    """Kept by whoever saves or loads more than once. Any thread may use it.

    Attributes:
        planner: Remembers the last plan.
        heard: Remembers what other ranks have said.
        last_save: Record of the last save that succeeded.
        last_load: Record of the last load that succeeded.
        last_read: Digest of the last metadata that was read, and what it says.
    """

    def __init__(self) -> None:
        self.planner = Planner()
        self.heard = Heard()
        self.last_save: Stats | None = None
        self.last_load: Stats | None = None
        self.last_read: tuple[bytes, Manifest] | None = None
        self._pool: BufferPool | None = None
        self._copies: BufferPool | None = None
        self._budget_bytes = 0
        self._process = os.getpid()
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type["Session"], tuple[()]]:
        """A copy, in this process or another one, starts with nothing."""
        return Session, ()

    def pool(self, options: Options, block_bytes: int) -> BufferPool:
        """Staging buffers of ``block_bytes``: those of before, if they are right."""
        with self._lock:
            wanted = (options.memory_budget_bytes, block_bytes)
            # In a process that was forked during a save, the pool waits for threads that do not exist there.
            is_ours = self._process == os.getpid()
            if self._pool is None or not is_ours or (self._budget_bytes, self._pool.block_bytes) != wanted:
                self._pool, self._budget_bytes = BufferPool(*wanted), options.memory_budget_bytes
                self._process = os.getpid()
            return self._pool

    def copies(self, limit_bytes: int, block_bytes: int) -> BufferPool:
        """Memory for the copy of a state: that of before, if it is right.

        Args:
            limit_bytes: Most of it.
            block_bytes: In pieces of this size.
        """
        with self._lock:
            pool = self._copies
            if pool is None or (pool.limit_bytes, pool.block_bytes) != (limit_bytes, block_bytes):
                pool = self._copies = BufferPool(limit_bytes, block_bytes)
            return pool

    def release(self) -> None:
        """Give back the memory. The session can be used again."""
        with self._lock:
            for pool in (self._pool, self._copies):
                if pool is not None:
                    pool.release()
            self.planner = Planner()
            self.heard = Heard()
            self.last_read = None
