"""The system calls of the local storage, one method each: the seam at which tests count, fail and drop them."""

import ctypes
import errno
import fcntl
import functools
import mmap
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_snapshot.errors import SnapshotError, raise_storage_error

__all__ = ["NO_EXCHANGE", "Posix", "storage_errors"]

_NOT_SUPPORTED = frozenset((errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP))
# NFS turns flock into a lock that needs a writable descriptor, which a folder cannot have: EBADF.
_NO_LOCK = _NOT_SUPPORTED | {errno.EAGAIN, errno.EBADF, errno.ENOLCK}

NO_EXCHANGE = _NOT_SUPPORTED
"""``errno`` of `Posix.exchange` where two names cannot be exchanged in one step."""

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


@contextmanager
def storage_errors(operation: str, path: Path) -> Iterator[None]:
    """Turn errors of the operating system into those of this package.

    Args:
        operation: What is tried, as a verb phrase.
        path: The file or folder.

    Raises:
        StorageError: The operating system refused.
    """
    try:
        yield
    except SnapshotError:
        raise
    except OSError as error:
        raise_storage_error(operation, str(path), error)


@functools.cache
def _renameat2() -> Callable[..., int] | None:
    function = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None) if sys.platform == "linux" else None
    if function is not None:
        function.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
        function.restype = ctypes.c_int
    return function


class Posix:
    """The real system calls. Every method raises `OSError` as the operating system does."""

    def make_folder(self, path: Path) -> None:
        """Create a folder whose parent exists, with the rights that the umask leaves."""
        path.mkdir()

    def open_folder(self, path: Path) -> int:
        """Open a folder, to lock it. A link is refused."""
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)

    def create_file(self, path: Path) -> int:
        """Create a file that does not exist yet, with the rights that the umask leaves, and open it for writing."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)

    def open_file(self, path: Path) -> int:
        """Open a file for reading. A pipe in its place does not block."""
        return os.open(path, os.O_RDONLY | os.O_NONBLOCK)

    def open_direct(self, path: Path, *, writable: bool) -> int | None:
        """Open a file once more, past the page cache; ``None`` where the system or the file system cannot do that."""
        flag = getattr(os, "O_DIRECT", 0)
        if not flag:
            return None
        try:
            return os.open(path, flag | (os.O_RDWR if writable else os.O_RDONLY | os.O_NONBLOCK))
        except OSError as error:
            if error.errno not in _NOT_SUPPORTED:
                raise
            return None

    def close(self, descriptor: int) -> None:
        """Release a descriptor."""
        os.close(descriptor)

    def allocate(self, descriptor: int, size_bytes: int) -> None:
        """Give an empty file its length, and its place on the disk where the system can promise that."""
        if size_bytes and sys.platform != "darwin":
            try:
                os.posix_fallocate(descriptor, 0, size_bytes)
            except OSError as error:
                if error.errno not in _NOT_SUPPORTED:
                    raise
            else:
                return
        os.ftruncate(descriptor, size_bytes)

    def write(self, descriptor: int, buffer: memoryview, offset_bytes: int) -> int:
        """Write the beginning of ``buffer`` at an offset; returns how many bytes were taken."""
        return os.pwrite(descriptor, buffer, offset_bytes)

    def read(self, descriptor: int, buffer: memoryview, offset_bytes: int) -> int:
        """Fill the beginning of ``buffer`` from an offset; returns how many bytes there were, 0 at the end."""
        if hasattr(os, "preadv"):
            return os.preadv(descriptor, [buffer], offset_bytes)
        data = os.pread(descriptor, len(buffer), offset_bytes)
        buffer[: len(data)] = data
        return len(data)

    def map(self, descriptor: int, size_bytes: int) -> mmap.mmap:
        """The content of a file as memory; what is written to that memory does not reach the file."""
        return mmap.mmap(descriptor, size_bytes, access=mmap.ACCESS_COPY)

    def sync(self, descriptor: int) -> None:
        """Make the content of a file durable."""
        if sys.platform == "darwin":
            try:
                # There, fsync leaves the data in the cache of the drive.
                fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
            except OSError as error:
                if error.errno not in _NOT_SUPPORTED | {errno.ENOTTY}:
                    raise
            else:
                return
        os.fsync(descriptor)

    def sync_folder(self, path: Path) -> None:
        """Make the names in a folder durable."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            # Some network file systems keep names durable all the time and refuse to be asked.
            if error.errno not in _NOT_SUPPORTED:
                raise
        finally:
            os.close(descriptor)

    def lock(self, descriptor: int, *, wait: bool) -> bool:
        """Take the exclusive lock of a folder, which ends with this process at the latest.

        Returns:
            Whether it is taken. If not, another one has it, or the file system knows no locks.
        """
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except OSError as error:
            if error.errno not in _NO_LOCK:
                raise
            return False
        return True

    def unlock(self, descriptor: int) -> None:
        """Give the lock back, also on behalf of child processes that were forked while it was held."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        except OSError as error:
            if error.errno not in _NO_LOCK:
                raise

    def rename(self, source: Path, target: Path) -> None:
        """Give a file or folder another name in one step, in place of a file or an empty folder of that name."""
        source.replace(target)

    def exchange(self, first: Path, second: Path) -> None:
        """Exchange what two names stand for, in one step. ``errno`` is in `NO_EXCHANGE` where that is unknown."""
        function = _renameat2()
        if function is None:
            raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), str(first))
        if function(_AT_FDCWD, os.fsencode(first), _AT_FDCWD, os.fsencode(second), _RENAME_EXCHANGE):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(first))

    def unlink(self, path: Path) -> None:
        """Remove a file or a link."""
        path.unlink()

    def remove_folder(self, path: Path) -> None:
        """Remove an empty folder."""
        path.rmdir()

    def list_folder(self, path: Path) -> list[str]:
        """Names in a folder, sorted."""
        return sorted(entry.name for entry in path.iterdir())

    def set_times(self, path: Path, accessed_ns: int, modified_ns: int) -> None:
        """Set the times of a folder, in nanoseconds since the epoch."""
        os.utime(path, ns=(accessed_ns, modified_ns))
