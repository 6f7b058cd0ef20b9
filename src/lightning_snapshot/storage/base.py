"""What the engine needs from a place that holds snapshots.

A `Storage` is rooted at one snapshot: a folder on a disk, or in a bucket. Locations are relative, with
``/`` between their parts, and are ``str`` because ``pathlib.Path`` would turn ``s3://`` into ``s3:/``.

Order of calls for a save: ``begin`` → ``create`` / ``write`` / ``finish`` per data file → ``commit``. Until ``commit``
returns, readers see what was there before; from then on they see the new snapshot; there is no state in between.
"""

from collections.abc import Iterable
from mmap import mmap
from typing import Protocol

__all__ = ["DATA_FOLDER", "METADATA_NAME", "Reader", "Storage", "Transaction", "Writer"]

METADATA_NAME = ".snapshot_metadata"
"""The file whose presence makes a snapshot (FORMAT: commit protocol of torchsnapshot)."""

DATA_FOLDER = ".data"
"""All data files of a save lie in ``.data/<save id>/``, so that two saves to one path never share a file."""


class Reader(Protocol):
    """One open data file. May be used by several threads at once."""

    @property
    def size_bytes(self) -> int:
        """Length of the file."""
        ...

    def read_into(self, offset_bytes: int, buffer: memoryview) -> None:
        """Fill the whole of ``buffer`` with the bytes that start at ``offset_bytes``.

        Raises:
            DataError: The file ends before the buffer is full.
            StorageError: The storage failed.
        """
        ...

    def map(self) -> mmap | None:
        """The whole file as memory that is read when it is looked at; ``None`` where that cannot be had.

        What is written to it stays in memory. It outlives the reader, and the file.
        """
        ...

    def close(self) -> None:
        """Release the file. Calling it twice is harmless."""
        ...


class Writer(Protocol):
    """One data file that is being written. Several threads may call ``write`` for ranges that do not overlap."""

    def write(self, offset_bytes: int, buffer: memoryview) -> None:
        """Write the whole of ``buffer`` at ``offset_bytes``.

        Raises:
            StorageError: The storage failed, or the range is not inside the size that the file was created with.
        """
        ...

    def finish(self) -> None:
        """Make the content durable and release the file.

        Raises:
            StorageError: The storage failed.
        """
        ...

    def close(self) -> None:
        """Release the file without promising anything about its content. Harmless after ``finish``."""
        ...


class Transaction(Protocol):
    """One save that has begun. Ends with a ``commit`` that returns, or with ``abort``, also after a failed ``commit``.

    Used by one thread, except for ``create``, which several may call.
    """

    def create(self, location: str, size_bytes: int) -> Writer:
        """Start a data file of ``size_bytes`` bytes at ``location``, which starts with ``.data/<save id>/``.

        Raises:
            MetadataError: The location is anywhere else.
            StorageError: The storage failed, has no space for the file, or the file exists.
        """
        ...

    @property
    def invitation(self) -> str:
        """What other ranks need to know to `Storage.join` this save."""
        ...

    def adopt(self, location: str, size_bytes: int) -> None:
        """Take in a data file that another rank has finished.

        Raises:
            MetadataError: The location is none of this save.
            StorageError: The file is not there, or has another size: the ranks do not write to one place.
        """
        ...

    def commit(self, metadata: bytes) -> None:
        """Publish ``metadata`` and with it all finished data files, durably and in one step.

        When it returns, the new snapshot is there, also after a power cut. When it raises, the snapshot that was there
        before is still there, with one exception, which the message tells: the new one is in place, but the storage
        refuses to say that a power cut cannot undo that. Data of dead or replaced saves in ``.data`` is removed
        afterwards; a failure to remove is logged, never raised, because the save itself has succeeded. Other files of
        a replaced snapshot are left to `Storage.discard`.

        Raises:
            NotASnapshotError: Since ``begin``, something has come to the place that must not be lost.
            StorageError: The storage failed, or a data file is not finished.
        """
        ...

    def abort(self) -> None:
        """Remove what the save has written, unless it is published.

        Never raises: it runs while another error is on its way up. Calling it twice, or after ``commit``, is harmless.
        """
        ...


class Storage(Protocol):
    """A place that holds one snapshot, or nothing yet."""

    @property
    def url(self) -> str:
        """The place, as users write it; for messages."""
        ...

    @property
    def min_threads(self) -> int:
        """How many blocks must be read at once, at least, for the storage to be as fast as it can be."""
        ...

    def is_snapshot(self) -> bool:
        """Whether a published snapshot is there. A stock checkpoint, which is a file, is none."""
        ...

    def read_metadata(self) -> bytes:
        """The content of ``.snapshot_metadata``.

        Raises:
            SnapshotNotFoundError: There is nothing at this place.
            NotASnapshotError: There is something else: a file, a folder of another kind, an unfinished save.
            MetadataError: The metadata is no file, or too large to be metadata.
            StorageError: The storage failed.
        """
        ...

    def open(self, location: str) -> Reader:
        """Open a data file for reading.

        Raises:
            MetadataError: The location leads out of the snapshot.
            DataError: There is something at the location that is no file.
            MissingDataError: There is no such file.
            StorageError: The storage failed.
        """
        ...

    def begin(self, save_id: str, *, claim: bool = False) -> Transaction:
        """Start a save. Removes leftovers of dead saves to this place.

        Args:
            save_id: Unique name of the save: letters, digits, ``_`` and ``-``, but no ``ckpt_``, for which Lightning's
                scans of a folder look.
            claim: Let the place exist from now on, if nothing is there, so that nobody takes the name.

        Raises:
            NotASnapshotError: The place holds something that must not be overwritten.
            StorageError: The storage failed.
        """
        ...

    def join(self, save_id: str, invitation: str) -> Transaction:
        """Take part in a save that another rank has begun: create data files, or abort.

        Only the rank that has begun the save commits it, or removes it.

        Args:
            save_id: The save.
            invitation: What `Transaction.invitation` says on the other rank.

        Raises:
            StorageError: The storage failed, or the save is not there: the ranks do not share this place.
        """
        ...

    def discard(self, locations: Iterable[str]) -> None:
        """Remove data files that no metadata names any more, and folders that become empty.

        A failure is logged, never raised: the files are only garbage.
        """
        ...

    def remove(self) -> None:
        """Remove the snapshot: first its metadata, so that it stops being one, then its data.

        Files that the snapshot does not name are kept, with a warning that tells which. A file or link is removed too,
        and so is an unfinished save and a sharded checkpoint of Lightning's own strategies. Nothing there: no error.

        Raises:
            NotASnapshotError: The place holds something that this package must not remove.
            StorageError: The storage failed.
        """
        ...
