"""A storage that tells a test of each operation before it happens, so that the test can look around or make it fail."""

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lightning_snapshot.storage import Reader, Storage, Transaction, Writer


@dataclass(frozen=True)
class Operation:
    """What is about to be done; of a read or write also where in the file, and where in memory."""

    name: str
    location: str = ""
    begin_bytes: int = 0
    end_bytes: int = 0
    address: int = 0


class WatchedStorage:
    """Around another storage.

    Attributes:
        operations: All that were begun, in order.
        open_files: How many readers and writers are not closed.
    """

    def __init__(self, inner: Storage, hook: Callable[[Operation], None] = lambda _: None) -> None:
        self.inner = inner
        self.hook = hook
        self.operations: list[Operation] = []
        self.open_files = 0
        self.lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def tell(self, name: str, *details: Any) -> None:
        operation = Operation(name, *details)
        with self.lock:
            self.operations.append(operation)
        self.hook(operation)

    def count(self, change: int) -> None:
        with self.lock:
            self.open_files += change

    def open(self, location: str) -> Reader:
        self.tell("open", location)
        return _WatchedFile(self, location, self.inner.open(location))

    def begin(self, save_id: str, **arguments: Any) -> Transaction:
        self.tell("begin")
        return _WatchedTransaction(self, self.inner.begin(save_id, **arguments))


@dataclass
class _WatchedTransaction:
    storage: WatchedStorage
    inner: Transaction

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def create(self, location: str, size_bytes: int) -> Writer:
        self.storage.tell("create", location)
        return _WatchedFile(self.storage, location, self.inner.create(location, size_bytes))

    def commit(self, metadata: bytes) -> None:
        self.storage.tell("commit")
        self.inner.commit(metadata)


class _WatchedFile:
    """A reader or a writer."""

    def __init__(self, storage: WatchedStorage, location: str, inner: Any) -> None:
        self.storage = storage
        self.location = location
        self.inner = inner
        self.is_open = True
        storage.count(1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def read_into(self, offset_bytes: int, buffer: memoryview) -> None:
        self._tell("read", offset_bytes, buffer)
        self.inner.read_into(offset_bytes, buffer)

    def write(self, offset_bytes: int, buffer: memoryview) -> None:
        self._tell("write", offset_bytes, buffer)
        self.inner.write(offset_bytes, buffer)

    def finish(self) -> None:
        self.storage.tell("finish", self.location)
        self.inner.finish()
        self.close()

    def close(self) -> None:
        self.inner.close()
        if self.is_open:
            self.is_open = False
            self.storage.count(-1)

    def _tell(self, name: str, offset_bytes: int, buffer: memoryview) -> None:
        address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
        self.storage.tell(name, self.location, offset_bytes, offset_bytes + buffer.nbytes, address)
