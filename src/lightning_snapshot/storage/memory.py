"""Snapshots in the memory of this process: the contract of a storage without a disk, for tests."""

import errno
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field

from lightning_snapshot.errors import (
    DataError,
    MetadataError,
    MissingDataError,
    NotASnapshotError,
    SnapshotNotFoundError,
    StorageError,
)
from lightning_snapshot.manifest import decode
from lightning_snapshot.storage.base import DATA_FOLDER, METADATA_NAME
from lightning_snapshot.storage.locations import (
    check_save_id,
    data_locations,
    is_named,
    normalise_location,
    normalise_own_location,
)

__all__ = ["MemoryStorage"]


@dataclass(slots=True)
class _Place:
    files: dict[str, bytes] = field(default_factory=dict)
    saves: "dict[str, dict[str, _MemoryWriter]]" = field(default_factory=dict)


_PLACES: dict[str, _Place] = {}


class MemoryStorage:
    """See `lightning_snapshot.storage.base.Storage`. All objects with the same ``url`` share their content.

    Attributes:
        operations: What has been called through this object, in order: ``("write", ".data/a/0")``.
    """

    min_threads = 1

    def __init__(self, url: str) -> None:
        self._url = url
        self._place = _PLACES.setdefault(url, _Place())
        self.operations: list[tuple[str, str]] = []

    @property
    def url(self) -> str:
        """The name of the place."""
        return self._url

    @property
    def files(self) -> dict[str, bytes]:
        """Location → content, with the metadata, without files of saves that are not committed."""
        return self._place.files

    def is_snapshot(self) -> bool:
        """Whether there is a snapshot that can be read."""
        return METADATA_NAME in self.files

    def read_metadata(self) -> bytes:
        """Give the published metadata.

        Raises:
            SnapshotNotFoundError: There is nothing.
            NotASnapshotError: There are other files.
        """
        self.operations.append(("read_metadata", METADATA_NAME))
        files = self.files
        if METADATA_NAME in files:
            return files[METADATA_NAME]
        if files:
            msg = f"{self._url}: expected a snapshot, found {len(files)} files without {METADATA_NAME}"
            raise NotASnapshotError(msg)
        msg = f"{self._url}: expected a snapshot, found nothing"
        raise SnapshotNotFoundError(msg)

    def open(self, location: str) -> "_MemoryReader":
        """Open a file for reading.

        Raises:
            DataError: It is a folder.
            MetadataError: The location leads out of the snapshot.
            MissingDataError: There is no such file.
        """
        normalised = normalise_location(location, self._url)
        self.operations.append(("open", normalised))
        if normalised not in self.files:
            if any(name.startswith(f"{normalised}/") for name in self.files):
                msg = f"{self._url}: expected a file at {location!r}, found a folder"
                raise DataError(msg)
            msg = f"{self._url}: expected a data file at {location!r}, found nothing"
            raise MissingDataError(msg)
        return _MemoryReader(f"{self._url}/{normalised}", self.files[normalised], self.operations)

    def begin(self, save_id: str, *, claim: bool = False) -> "_MemoryTransaction":  # noqa: ARG002 - nobody lists places
        """Start a save.

        Raises:
            NotASnapshotError: There are other files.
            StorageError: The save id is not allowed.
        """
        check_save_id(save_id, self._url)
        self.operations.append(("begin", save_id))
        if self.files and METADATA_NAME not in self.files and not any(_save_of(name) for name in self.files):
            msg = f"{self._url}: expected a snapshot or nothing, found {len(self.files)} files without metadata"
            raise NotASnapshotError(msg)
        return _MemoryTransaction(self, save_id, self._place.saves.setdefault(save_id, {}))

    def join(self, save_id: str, invitation: str) -> "_MemoryTransaction":
        """Take part in a save that another rank has begun, in this process.

        Raises:
            StorageError: There is no such save.
        """
        self.operations.append(("join", save_id))
        if save_id not in self._place.saves:
            msg = f"{self._url}: expected the save {save_id}, which rank 0 has begun {invitation}, found none"
            raise StorageError(errno.ENOENT, msg)
        return _MemoryTransaction(self, save_id, self._place.saves[save_id], is_guest=True)

    def discard(self, locations: Iterable[str]) -> None:
        """Remove data files."""
        for location in locations:
            try:
                normalised = normalise_location(location, self._url)
            except MetadataError:
                self.operations.append(("refuse", location))
                continue
            self.operations.append(("discard", normalised))
            if normalised != METADATA_NAME:
                self.files.pop(normalised, None)

    def remove(self) -> None:
        """Remove the snapshot; files that it does not name are kept.

        Raises:
            NotASnapshotError: There are other files only.
        """
        self.operations.append(("remove", ""))
        metadata = self.files.get(METADATA_NAME)
        if metadata is None and self.files and not any(_save_of(name) for name in self.files):
            msg = f"{self._url}: expected a snapshot or nothing, found {len(self.files)} files without metadata"
            raise NotASnapshotError(msg)
        if metadata is not None:
            try:
                self.discard(data_locations(decode(metadata, source=self._url)))
            except MetadataError:
                self.operations.append(("refuse", METADATA_NAME))
        kept = {name: content for name, content in self.files.items() if name != METADATA_NAME and not _save_of(name)}
        self._place.files = kept
        if kept:
            warnings.warn(f"{self._url}: kept {', '.join(sorted(kept)[:5])}", UserWarning, stacklevel=2)

    def publish(self, save_id: str, metadata: bytes, written: dict[str, bytes]) -> None:
        """Replace the content in one step; called by the transaction."""
        old = {
            name: content
            for name, content in self.files.items()
            if not _save_of(name) or is_named(_save_of(name), metadata)
        }
        self._place.files = {**old, **written, METADATA_NAME: metadata}
        self.operations.append(("commit", save_id))

    def forget(self, save_id: str) -> None:
        """Nobody can join a save any more; called by the transaction."""
        self._place.saves.pop(save_id, None)


def _save_of(location: str) -> str:
    """The save that a data file belongs to; empty for files that another software has written."""
    folder, _, rest = location.partition("/")
    return rest.partition("/")[0] if folder == DATA_FOLDER else ""


class _MemoryReader:
    def __init__(self, name: str, content: bytes, operations: list[tuple[str, str]]) -> None:
        self._name = name
        self._content = content
        self._operations = operations

    @property
    def size_bytes(self) -> int:
        return len(self._content)

    def read_into(self, offset_bytes: int, buffer: memoryview) -> None:
        self._operations.append(("read", self._name))
        end = offset_bytes + buffer.nbytes
        if end > len(self._content):
            msg = f"{self._name}: expected at least {end} bytes, found a file of {len(self._content)} bytes"
            raise DataError(msg)
        buffer.cast("B")[:] = self._content[offset_bytes:end]

    def map(self) -> None:
        """No file, nothing to map."""

    def close(self) -> None:
        pass


class _MemoryWriter:
    def __init__(self, name: str, size_bytes: int, operations: list[tuple[str, str]]) -> None:
        self._name = name
        self._operations = operations
        self.content = bytearray(size_bytes)
        self.finished = False
        self._open = True

    def write(self, offset_bytes: int, buffer: memoryview) -> None:
        self._operations.append(("write", self._name))
        end = offset_bytes + buffer.nbytes
        if not self._open or offset_bytes < 0 or end > len(self.content):
            msg = f"could not write {buffer.nbytes} bytes at offset {offset_bytes} of {self._name}"
            raise StorageError(errno.EINVAL, msg)
        self.content[offset_bytes:end] = buffer.cast("B")

    def finish(self) -> None:
        self._operations.append(("finish", self._name))
        self.finished = True
        self._open = False

    def close(self) -> None:
        self._open = False


class _MemoryTransaction:
    invitation = "in memory"

    def __init__(
        self, storage: MemoryStorage, save_id: str, writers: "dict[str, _MemoryWriter]", *, is_guest: bool = False
    ) -> None:
        self._storage = storage
        self._save_id = save_id
        self._writers = writers
        self._is_guest = is_guest

    def adopt(self, location: str, size_bytes: int) -> None:
        writer = self._writers.get(normalise_own_location(location, self._save_id, self._storage.url))
        if writer is None or len(writer.content) != size_bytes:
            msg = f"{self._storage.url}: expected {size_bytes} bytes at {location}, which another rank has written"
            raise StorageError(errno.EIO, msg)

    def create(self, location: str, size_bytes: int) -> _MemoryWriter:
        normalised = normalise_own_location(location, self._save_id, self._storage.url)
        self._storage.operations.append(("create", normalised))
        if normalised in self._writers:
            msg = f"could not create {self._storage.url}/{normalised}: it exists"
            raise StorageError(errno.EEXIST, msg)
        writer = _MemoryWriter(normalised, size_bytes, self._storage.operations)
        self._writers[normalised] = writer
        return writer

    def commit(self, metadata: bytes) -> None:
        if self._is_guest:
            msg = f"{self._storage.url}: only the rank that has begun a save can publish it"
            raise StorageError(errno.EPERM, msg)
        if not all(writer.finished for writer in self._writers.values()):
            msg = f"{self._storage.url}: expected all data files to be finished, found open ones"
            raise StorageError(errno.EBUSY, msg)
        written = {location: bytes(writer.content) for location, writer in self._writers.items()}
        self._storage.publish(self._save_id, metadata, written)
        self._storage.forget(self._save_id)

    def abort(self) -> None:
        self._storage.operations.append(("abort", self._save_id))
        if not self._is_guest:
            self._writers.clear()
            self._storage.forget(self._save_id)
