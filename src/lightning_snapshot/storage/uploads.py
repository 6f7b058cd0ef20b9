"""Data files on their way to a bucket: blocks come from several threads, in about the order of the file."""

import errno
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator

from lightning_snapshot.errors import StorageError
from lightning_snapshot.storage.buckets import Bucket

__all__ = ["PartsWriter", "SmallWriter", "UploadWriter", "open_upload"]


class _AbandonedError(Exception):
    """Ends an upload that nobody wants any more."""


class UploadWriter(ABC):
    """See `lightning_snapshot.storage.base.Writer`."""

    def __init__(self, bucket: Bucket, key: str, size_bytes: int) -> None:
        self._bucket = bucket
        self._key = key
        self._size_bytes = size_bytes
        self._is_open = True
        self.finished = False

    @property
    def size_bytes(self) -> int:
        """Length of the file."""
        return self._size_bytes

    def write(self, offset_bytes: int, buffer: memoryview) -> None:
        """Take a copy of the buffer, which is uploaded when its turn comes.

        Raises:
            StorageError: The upload has failed, or the range is not inside the file.
        """
        if not self._is_open or offset_bytes < 0 or offset_bytes + buffer.nbytes > self._size_bytes:
            state = f"a file of {self._size_bytes} bytes" if self._is_open else "a file that is closed"
            msg = f"could not write {buffer.nbytes} bytes at offset {offset_bytes} of {self._place()}, {state}"
            raise StorageError(errno.EINVAL, msg)
        if buffer.nbytes:
            self._take(offset_bytes, buffer.cast("B"))

    def finish(self) -> None:
        """Wait until the whole file is in the bucket. What was not written is zero.

        Raises:
            StorageError: The upload has failed.
        """
        self._complete()
        self._is_open = False
        self.finished = True

    @abstractmethod
    def close(self) -> None:
        """End the upload; if it is not finished, nothing of it is left."""

    @abstractmethod
    def _take(self, offset_bytes: int, block: memoryview) -> None: ...

    @abstractmethod
    def _complete(self) -> None: ...

    def _place(self) -> str:
        return f"{self._bucket.name}/{self._key}"


class SmallWriter(UploadWriter):
    """A file that goes to the bucket in one request."""

    def __init__(self, bucket: Bucket, key: str, size_bytes: int) -> None:
        super().__init__(bucket, key, size_bytes)
        self._content = bytearray(size_bytes)

    def _take(self, offset_bytes: int, block: memoryview) -> None:
        self._content[offset_bytes : offset_bytes + len(block)] = block

    def _complete(self) -> None:
        self._bucket.put(self._key, self._content)
        self._content = bytearray()

    def close(self) -> None:
        """Forget the content."""
        self._is_open = False
        self._content = bytearray()


class PartsWriter(UploadWriter):
    """A file that goes to the bucket in parts, several at once, in a thread of its own.

    The parts are cut from a stream, so blocks have to be in order. Those that come too early wait, up to the size of a
    part; whoever brings more waits, unless the one that is next is not there yet: its thread may in its turn wait for
    one of those that would wait here.
    """

    def __init__(self, bucket: Bucket, key: str, size_bytes: int) -> None:
        super().__init__(bucket, key, size_bytes)
        self._changed = threading.Condition()
        self._early: dict[int, bytes] = {}
        self._early_bytes = 0
        self._uploaded_bytes = 0
        self._is_complete = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._upload, name="lightning-snapshot-upload")
        self._thread.start()

    def _take(self, offset_bytes: int, block: memoryview) -> None:
        with self._changed:
            self._changed.wait_for(self._has_room)
            self._raise_error()
            self._early_bytes += len(block)
        copy = bytes(block)  # outside of the lock, so that several threads copy at once
        with self._changed:
            self._early[offset_bytes] = copy
            self._changed.notify_all()

    def _has_room(self) -> bool:
        is_next_there = self._uploaded_bytes in self._early
        is_over = self._error is not None or not self._is_open
        return is_over or not is_next_there or self._early_bytes < self._bucket.part_bytes

    def _complete(self) -> None:
        with self._changed:
            self._is_complete = True
            self._changed.notify_all()
        self._thread.join()
        self._raise_error()

    def close(self) -> None:
        """End the upload; if it is not complete, its parts are given up."""
        with self._changed:
            self._is_open = False
            self._changed.notify_all()
        self._thread.join()
        self._early.clear()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _upload(self) -> None:
        try:
            self._bucket.upload(self._key, self._size_bytes, self._blocks())
        except _AbandonedError:
            pass
        except BaseException as error:  # noqa: BLE001  # raised in the threads that write
            self._error = error
        with self._changed:
            self._changed.notify_all()

    def _blocks(self) -> Iterator[bytes]:
        while self._uploaded_bytes < self._size_bytes:
            yield self._next_block()

    def _next_block(self) -> bytes:
        with self._changed:
            self._changed.wait_for(
                lambda: self._uploaded_bytes in self._early or self._is_complete or not self._is_open
            )
            if not self._is_open:
                raise _AbandonedError
            block = self._early.pop(self._uploaded_bytes, None)
            if block is None:  # nobody has written here
                end = min([*self._early, self._size_bytes])
                block = bytes(min(end - self._uploaded_bytes, self._bucket.part_bytes))
            else:
                self._early_bytes -= len(block)
            self._uploaded_bytes += len(block)
            self._changed.notify_all()
        return block


def open_upload(bucket: Bucket, key: str, size_bytes: int) -> UploadWriter:
    """Begin to write a data file."""
    kind = SmallWriter if size_bytes <= bucket.part_bytes else PartsWriter
    return kind(bucket, key, size_bytes)
