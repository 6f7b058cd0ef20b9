"""A plugin whose writes wait or fail when a test says so."""

import errno
import os
import threading
from collections.abc import Collection
from pathlib import Path
from typing import Any

from lightning_snapshot import SnapshotCheckpointIO
from lightning_snapshot.storage.local import LocalStorage
from tests.edges.faulty_posix import FaultyPosix

PATIENCE_SECONDS = 60


class Gate:
    """Stands before each file that is created.

    Attributes:
        failing: Numbers of saves, from 1 on, that fail there.
        reached: Set when somebody waits.
    """

    def __init__(self, *, is_open: bool = True, failing: Collection[int] = ()) -> None:
        self.failing = failing
        self.reached = threading.Event()
        self._open = threading.Event()
        if is_open:
            self.open()

    def open(self) -> None:
        self._open.set()

    def close(self) -> None:
        self.reached.clear()
        self._open.clear()

    def pass_through(self, number: int) -> None:
        if number in self.failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.reached.set()
        assert self._open.wait(PATIENCE_SECONDS)


class GatedCheckpointIO(SnapshotCheckpointIO):
    """Saves behind training, through a gate."""

    def __init__(self, gate: Gate, **arguments: Any) -> None:
        super().__init__(**{"async_save": True, **arguments})
        self.gate = gate
        self.saves = 0

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self.saves += 1
        super().save_checkpoint(*args, **kwargs)

    def save_on_all_ranks(self, *args: Any, **kwargs: Any) -> None:
        self.saves += 1
        super().save_on_all_ranks(*args, **kwargs)

    def _open(self, path: Any, storage_options: Any = None) -> LocalStorage:
        number = self.saves
        posix = FaultyPosix(before={"create_file": lambda *_: self.gate.pass_through(number)})
        return LocalStorage(Path(os.path.realpath(path)), os.fspath(path), posix)
