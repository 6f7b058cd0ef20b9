"""Snapshots in a bucket: an object store, or whatever else fsspec reaches."""

import errno
import warnings
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone

from lightning_snapshot.errors import (
    DataError,
    MissingDataError,
    NotASnapshotError,
    SnapshotNotFoundError,
    StorageError,
)
from lightning_snapshot.manifest import decode
from lightning_snapshot.storage.base import METADATA_NAME
from lightning_snapshot.storage.buckets import Bucket, Item
from lightning_snapshot.storage.folders import REMOVED_NAME, Found, refuse, warn_only
from lightning_snapshot.storage.listing import list_published
from lightning_snapshot.storage.locations import check_save_id, data_locations, normalise_location
from lightning_snapshot.storage.remote_place import Place
from lightning_snapshot.storage.remote_save import RemoteTransaction

__all__ = ["BucketListing", "RemoteReader", "RemoteStorage"]

_MAX_NAMES = 5


class RemoteReader:
    """See `lightning_snapshot.storage.base.Reader`."""

    def __init__(self, bucket: Bucket, item: Item, name: str) -> None:
        self._bucket = bucket
        self._item = item
        self._name = name

    @property
    def size_bytes(self) -> int:
        """Length of the file."""
        return self._item.size_bytes

    def read_into(self, offset_bytes: int, buffer: memoryview) -> None:
        """Fill a buffer with the bytes from an offset on.

        Raises:
            DataError: The file ends before the buffer is full.
            MissingDataError: The file was removed since it was opened.
            StorageError: The bucket failed.
        """
        end = offset_bytes + buffer.nbytes
        found = 0
        if buffer.nbytes and end <= self.size_bytes:
            try:
                found = self._bucket.read_into(self._item.key, offset_bytes, buffer.cast("B"))
            except FileNotFoundError:
                msg = f"{self._name}: expected a data file, found none; it was removed while it was read"
                raise MissingDataError(msg) from None
        if found != buffer.nbytes:
            size_bytes = self.size_bytes if end > self.size_bytes else offset_bytes + found
            msg = f"{self._name}: expected at least {end} bytes, found a file of {size_bytes} bytes"
            raise DataError(msg)

    def map(self) -> None:
        """Nothing that could be mapped."""

    def close(self) -> None:
        """Nothing is held."""


class RemoteStorage:
    """See `lightning_snapshot.storage.base.Storage`."""

    def __init__(self, bucket: Bucket, folder: str, url: str) -> None:
        """Name the snapshot; nothing is asked.

        Args:
            bucket: Where it is.
            folder: The beginning of its keys, without a slash at the end.
            url: The place as the user wrote it.
        """
        self._place = Place(bucket, folder, url)
        self._files: dict[str, Item] | None = None

    @property
    def url(self) -> str:
        """The place as the user wrote it."""
        return self._place.url

    @property
    def place(self) -> Place:
        """What there is besides the snapshot."""
        return self._place

    @property
    def min_threads(self) -> int:
        """How many reads at once make the bucket as fast as it can be."""
        return self._place.bucket.concurrency

    def is_snapshot(self) -> bool:
        """Whether there is a snapshot that can be read."""
        try:
            self._place.bucket.head(self._place.key(METADATA_NAME))
        except FileNotFoundError:
            return False
        return True

    def read_metadata(self) -> bytes:
        """Read ``.snapshot_metadata``.

        Raises:
            SnapshotNotFoundError: There is nothing.
            NotASnapshotError: There is something else.
            MetadataError: It is too large to be true.
            StorageError: The bucket failed.
        """
        self._files = None  # whoever reads metadata wants to know what is there now
        try:
            return self._place.read()
        except FileNotFoundError:
            found = self._place.look()
        if found is Found.NOTHING:
            msg = f"{self.url}: expected a snapshot, found nothing"
            raise SnapshotNotFoundError(msg)
        msg = f"{self.url}: expected a snapshot, which is a folder with {METADATA_NAME}, found {found.value}"
        raise NotASnapshotError(msg + self._hint(found))

    def _hint(self, found: Found) -> str:
        inside = list_published(self._place.key(""), BucketListing(self._place.bucket)) if found is Found.FOLDER else []
        return f"; the newest snapshot in it is {self.url.rstrip('/')}/{inside[0].name}" if inside else ""

    def open(self, location: str) -> RemoteReader:
        """Open a data file for reading.

        Raises:
            DataError: It is a folder.
            MetadataError: The location leads out of the snapshot.
            MissingDataError: There is no such file.
            StorageError: The bucket failed.
        """
        normalised = normalise_location(location, self.url)
        if self._files is None:
            self._files = self._place.files()  # one request instead of one for each file
        item = self._files.get(normalised) or self._look_for(normalised, location)
        return RemoteReader(self._place.bucket, item, f"{self.url}/{normalised}")

    def _look_for(self, normalised: str, location: str) -> Item:
        """A file that was not there when the files were listed."""
        try:
            return self._place.bucket.head(self._place.key(normalised))
        except FileNotFoundError:
            folders, items = self._place.bucket.list_folder(self._place.key(normalised))
        if folders or items:
            msg = f"{self.url}: expected a file at {location!r}, found a folder"
            raise DataError(msg)
        msg = f"{self.url}: expected a data file at {location!r}, found none; the snapshot is incomplete"
        raise MissingDataError(msg)

    def begin(self, save_id: str, *, claim: bool = False) -> RemoteTransaction:  # noqa: ARG002  # a save is always seen
        """Start a save, after removing what dead saves have left here.

        Raises:
            NotASnapshotError: There is something that must not be lost.
            StorageError: The bucket failed.
        """
        check_save_id(save_id, self.url)
        names = self._place.names()
        found = self._place.look(names)
        if found in (Found.CHECKPOINT, Found.FOLDER):
            raise refuse(self.url, found)
        if found in (Found.SNAPSHOT, Found.UNFINISHED):
            with warn_only(f"clean up in {self.url}"):
                if found is Found.UNFINISHED:
                    self._place.finish_removal()
                self._place.delete(self._place.dead_files(self._place.read() if found is Found.SNAPSHOT else b""))
        replaced = [""] if found is Found.FILE else [REMOVED_NAME] if REMOVED_NAME in names else []
        transaction = RemoteTransaction(self._place, save_id, replaced)
        try:
            transaction.start()
        except BaseException:
            transaction.abort()
            raise
        return transaction

    def join(self, save_id: str, invitation: str) -> RemoteTransaction:  # noqa: ARG002  # there is only one way
        """Take part in a save that another rank has begun.

        Raises:
            StorageError: The bucket failed, or the save is not there.
        """
        check_save_id(save_id, self.url)
        transaction = RemoteTransaction(self._place, save_id, is_guest=True)
        transaction.join()
        return transaction

    def discard(self, locations: Iterable[str]) -> None:
        """Remove data files. Failures are logged."""
        with warn_only(f"remove unused files of {self.url}"):
            self._place.delete(self._place.inside(locations))

    def remove(self) -> None:
        """Remove what is there: a snapshot, a file, or a sharded checkpoint.

        Raises:
            NotASnapshotError: It is a folder of another kind.
            StorageError: The bucket failed.
        """
        found = self._place.look()
        if found is Found.FOLDER:
            raise refuse(self.url, found)
        if found is Found.CHECKPOINT:
            self._place.delete(self._place.files())
        elif found is Found.FILE:
            self._place.delete([""])
        elif found is not Found.NOTHING:
            self._place.delete_snapshot()
            self._warn_about_kept_files()

    def _warn_about_kept_files(self) -> None:
        kept = sorted(self._place.files())
        if kept:
            names = ", ".join(kept[:_MAX_NAMES])
            more = f" and {len(kept) - _MAX_NAMES} more" if len(kept) > _MAX_NAMES else ""
            msg = f"{self.url}: removed the snapshot, but kept the files that it does not name: {names}{more}"
            warnings.warn(msg, UserWarning, stacklevel=3)

    def copy_from(self, source: "RemoteStorage") -> None:
        """Become a copy of another snapshot in the same bucket, without moving its content through this machine.

        Raises:
            NotASnapshotError: There is something here that must not be lost.
            SnapshotError: The source cannot be read.
            StorageError: The bucket failed, or the source is in another one. What was here is still here.
        """
        if source.place.bucket.name != self._place.bucket.name:
            raise StorageError(errno.EXDEV, f"{self.url}: expected a snapshot in the same bucket, found {source.url}")
        metadata = source.read_metadata()
        found = self._place.look()
        if found in (Found.CHECKPOINT, Found.FOLDER):
            raise refuse(self.url, found)
        self._copy_data(source, data_locations(decode(metadata, source=source.url)))
        self._place.bucket.put(self._place.key(METADATA_NAME), metadata)
        with warn_only(f"remove what is unused in {self.url}"):
            self._place.delete([*self._place.dead_files(metadata), *([""] if found is Found.FILE else [])])

    def _copy_data(self, source: "RemoteStorage", locations: list[str]) -> None:
        bucket = self._place.bucket

        def copy(location: str) -> None:
            try:
                bucket.copy(source.place.key(location), self._place.key(location))
            except FileNotFoundError:
                msg = f"{source.url}: expected a data file at {location!r}, found none"
                raise MissingDataError(msg) from None

        with ThreadPoolExecutor(bucket.concurrency, thread_name_prefix="lightning-snapshot-copy") as executor:
            list(executor.map(copy, [normalise_location(location, source.url) for location in locations]))


class BucketListing:
    """What `lightning_snapshot.storage.listing` asks of a file system."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    def ls(self, path: str, *, detail: bool) -> list[str]:  # noqa: ARG002  # as fsspec has it
        """Paths of what is in a folder."""
        folder = path.strip("/")
        folders, items = self._bucket.list_folder(folder)
        return [f"{folder}/{name}".lstrip("/") for name in folders] + [item.key for item in items]

    def modified(self, path: str) -> datetime:
        """When an object was written."""
        return self._bucket.head(path).modified or datetime.fromtimestamp(0, timezone.utc)

    def cat_file(self, path: str) -> bytes:
        """The content of an object."""
        return self._bucket.get(path, 2**63)
