"""Data files on a local disk."""

import errno
import logging
import mmap
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeAlias

from lightning_snapshot.errors import DataError, StorageError
from lightning_snapshot.storage.posix import Posix, storage_errors

__all__ = ["LocalReader", "LocalWriter"]


_logger = logging.getLogger("lightning_snapshot")

_Operation: TypeAlias = Callable[[int, memoryview, int], int]

# Offsets and lengths of direct access are multiples of this, which is enough for every file system.
_PAGE_BYTES = 4096
# Below this, opening the file twice costs more than the page cache.
_MIN_DIRECT_BYTES = 1024 * 1024


class _OpenFile:
    """A descriptor that is released once."""

    def __init__(self, posix: Posix, path: Path, descriptor: int) -> None:
        self._posix = posix
        self._path = path
        self._open: int | None = descriptor
        self._direct: int | None = None
        self._use_direct = False

    def close(self) -> None:
        """Release the file. Calling it twice is harmless.

        Raises:
            StorageError: The operating system reports that earlier operations failed. The file is released.
        """
        descriptors = (self._open, self._direct)
        self._use_direct, self._direct, self._open = False, None, None
        with storage_errors("close", self._path), ExitStack() as stack:
            for descriptor in descriptors:
                if descriptor is not None:
                    stack.callback(self._posix.close, descriptor)

    @contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        """Surrounds the rest of ``__init__``: who gets an exception from that has nothing to close."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def _open_direct(self, *, writable: bool) -> None:
        """Let `_move` go past the page cache, which halves the speed of large files, where the system allows it."""
        self._direct = self._posix.open_direct(self._path, writable=writable)
        self._use_direct = self._direct is not None

    def _move(self, operation: _Operation, buffer: memoryview, offset_bytes: int) -> int:
        """Read or write the beginning of ``buffer``, past the page cache where that is possible.

        Returns:
            How many bytes were moved; 0 at the end of the file.
        """
        whole = len(buffer) // _PAGE_BYTES * _PAGE_BYTES
        if self._use_direct and self._direct is not None and whole and offset_bytes % _PAGE_BYTES == 0:
            try:
                return operation(self._direct, buffer[:whole], offset_bytes)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                # The file system wants another alignment, or the buffer is not one of the pool's.
                _logger.debug("%s: no direct access (%s), using the page cache from now on", self._path, error)
                self._use_direct = False
        return operation(self._descriptor(), buffer, offset_bytes)

    def _descriptor(self) -> int:
        if self._open is None:
            raise StorageError(errno.EBADF, f"could not use {self._path}: it is closed")
        return self._open


class LocalReader(_OpenFile):
    """One open file; see `lightning_snapshot.storage.base.Reader`."""

    def __init__(self, posix: Posix, path: Path) -> None:
        super().__init__(posix, path, posix.open_file(path))
        with self._closed_on_error():
            status = os.fstat(self._descriptor())
            self._size_bytes = status.st_size
            if not stat.S_ISREG(status.st_mode):
                found = "a folder" if stat.S_ISDIR(status.st_mode) else "a device or pipe"
                msg = f"{path}: expected a file, found {found}"
                raise DataError(msg)
            if status.st_size >= _MIN_DIRECT_BYTES:
                self._open_direct(writable=False)

    @property
    def size_bytes(self) -> int:
        """Length of the file when it was opened."""
        return self._size_bytes

    def read_into(self, offset_bytes: int, buffer: memoryview) -> None:
        """Fill the whole of ``buffer`` with the bytes that start at ``offset_bytes``.

        Raises:
            DataError: The file ends before the buffer is full.
            StorageError: The operating system refused.
        """
        rest = buffer.cast("B")
        end = offset_bytes + len(rest)
        with storage_errors(f"read {len(rest)} bytes at offset {offset_bytes} of", self._path):
            while rest:
                count = self._move(self._posix.read, rest, end - len(rest))
                if count == 0:
                    found = os.fstat(self._descriptor()).st_size
                    msg = f"{self._path}: expected at least {end} bytes, found a file of {found} bytes"
                    raise DataError(msg)
                rest = rest[count:]

    def map(self) -> mmap.mmap | None:
        """Map the whole file, so that what is written to the memory does not reach the file.

        Raises:
            StorageError: The operating system refused.
        """
        if not self._size_bytes:
            return None
        with storage_errors("map", self._path):
            return self._posix.map(self._descriptor(), self._size_bytes)


class LocalWriter(_OpenFile):
    """One file that is being written; see `lightning_snapshot.storage.base.Writer`.

    Attributes:
        finished: Whether its content is durable.
    """

    def __init__(self, posix: Posix, path: Path, size_bytes: int) -> None:
        with storage_errors("create", path):
            super().__init__(posix, path, posix.create_file(path))
        self._size_bytes = size_bytes
        self.finished = False
        with self._closed_on_error(), storage_errors(f"reserve {size_bytes} bytes for", path):
            posix.allocate(self._descriptor(), size_bytes)
            if size_bytes >= _MIN_DIRECT_BYTES:
                self._open_direct(writable=True)

    def write(self, offset_bytes: int, buffer: memoryview) -> None:
        """Write the whole of ``buffer`` at ``offset_bytes``.

        Raises:
            StorageError: The operating system refused, or the range is not inside the file.
        """
        rest = buffer.cast("B")
        end = offset_bytes + len(rest)
        operation = f"write {len(rest)} bytes at offset {offset_bytes} of"
        if not 0 <= offset_bytes <= end <= self._size_bytes:
            raise StorageError(errno.EINVAL, f"could not {operation} {self._path}: its size is {self._size_bytes}")
        with storage_errors(operation, self._path):
            while rest:
                count = self._move(self._posix.write, rest, end - len(rest))
                if count == 0:
                    raise StorageError(errno.EIO, f"could not {operation} {self._path}: nothing was written")
                rest = rest[count:]

    def finish(self) -> None:
        """Make the content durable and release the file.

        Raises:
            StorageError: The operating system refused.
        """
        with storage_errors("make durable", self._path):
            self._posix.sync(self._descriptor())
            self.close()
        self.finished = True
