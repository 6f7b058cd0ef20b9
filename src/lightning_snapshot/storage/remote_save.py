"""A save to a bucket, where nothing can be renamed or locked.

Data goes to ``.data/<save id>/``, which no metadata names yet. One request that writes ``.snapshot_metadata`` publishes
it. Then what the new metadata does not name is removed.
"""

import errno
from collections.abc import Mapping, Sequence
from threading import Lock

from lightning_snapshot.errors import StorageError
from lightning_snapshot.storage.base import DATA_FOLDER, METADATA_NAME
from lightning_snapshot.storage.buckets import Item
from lightning_snapshot.storage.folders import warn_only
from lightning_snapshot.storage.locations import normalise_own_location
from lightning_snapshot.storage.remote_place import SAVING_SUFFIX, Place
from lightning_snapshot.storage.uploads import UploadWriter, open_upload

__all__ = ["RemoteTransaction"]


class RemoteTransaction:
    """See `lightning_snapshot.storage.base.Transaction`."""

    invitation = "in the bucket"

    def __init__(self, place: Place, save_id: str, replaced: Sequence[str] = (), *, is_guest: bool = False) -> None:
        """Name the save; nothing is asked.

        Args:
            place: Where it goes.
            save_id: The save.
            replaced: Locations of what goes when the save is published, besides data that nobody names.
            is_guest: Whether another rank has begun the save.
        """
        self._place = place
        self._url = place.url
        self._save_id = save_id
        self._replaced = replaced
        self._is_guest = is_guest
        self._lock = Lock()
        self._writers: dict[str, UploadWriter] = {}
        self._sizes: dict[str, int] = {}
        self._is_published = False

    @property
    def _marker(self) -> str:
        return f"{DATA_FOLDER}/{self._save_id}{SAVING_SUFFIX}"

    def start(self) -> None:
        """Tell that the save has begun.

        Raises:
            StorageError: The bucket failed.
        """
        self._place.keep_alive(self._save_id)
        self._place.bucket.put(self._place.key(self._marker), b"saving")

    def join(self) -> None:
        """Look whether the save of rank 0 is here.

        Raises:
            StorageError: It is not, or the bucket failed.
        """
        try:
            self._place.bucket.head(self._place.key(self._marker))
        except FileNotFoundError:
            msg = f"{self._url}: expected the save {self._save_id}, which rank 0 has begun, found none; do all ranks "
            raise StorageError(errno.ENOENT, msg + "use the same bucket?") from None

    def create(self, location: str, size_bytes: int) -> UploadWriter:
        """Start a data file in the folder of the save.

        Raises:
            MetadataError: The location is not in the folder of the save.
            StorageError: The file exists.
        """
        normalised = normalise_own_location(location, self._save_id, self._url)
        with self._lock:
            if normalised in self._writers:
                raise StorageError(errno.EEXIST, f"could not create {self._url}/{normalised}: it exists")
            writer = open_upload(self._place.bucket, self._place.key(normalised), size_bytes)
            self._writers[normalised] = writer
            self._sizes[normalised] = size_bytes
        return writer

    def adopt(self, location: str, size_bytes: int) -> None:
        """Take in a data file that another rank has finished.

        Raises:
            MetadataError: The location is not in the folder of the save.
            StorageError: The file is not there, or has another size.
        """
        normalised = normalise_own_location(location, self._save_id, self._url)
        self._check_file(normalised, size_bytes)
        self._sizes[normalised] = size_bytes

    def commit(self, metadata: bytes) -> None:
        """Publish ``metadata`` and all data files in one step, then remove what they replace.

        Raises:
            StorageError: The bucket failed, or somebody else has removed data files. Either nothing was published, or
                the message says that it cannot be known.
        """
        if self._is_guest:
            raise StorageError(errno.EPERM, f"{self._url}: only the rank that has begun a save can publish it")
        if not all(writer.finished for writer in self._writers.values()):
            raise StorageError(errno.EBUSY, f"{self._url}: expected all data files to be finished, found open ones")
        present = self._place.files(DATA_FOLDER)
        self._check_files(present)
        self._publish(metadata)
        self._place.let_die(self._save_id)
        with warn_only(f"remove what is unused in {self._url}"):
            self._place.delete([*self._place.dead_files(metadata, present), *self._replaced])

    def abort(self) -> None:
        """Remove what the save has written, unless it is published. Failures are logged."""
        for writer in self._writers.values():
            writer.close()
        if self._is_guest:
            return  # the save may be published without this rank's knowing
        if not self._is_published:
            with warn_only(f"remove what an interrupted save has written to {self._url}"):
                self._place.delete([*self._place.files(f"{DATA_FOLDER}/{self._save_id}"), self._marker])
        self._place.let_die(self._save_id)

    def _check_files(self, found: Mapping[str, Item]) -> None:
        """See that nobody has taken this save for a dead one and removed its data."""
        for location, size_bytes in self._sizes.items():
            if location not in found or found[location].size_bytes != size_bytes:
                self._check_file(location, size_bytes)  # a listing may be late, but not a look at the file itself

    def _check_file(self, location: str, size_bytes: int) -> None:
        try:
            found = self._place.bucket.head(self._place.key(location)).size_bytes
        except FileNotFoundError:
            msg = (
                f"{self._url}: expected {location}, which this save has written, found nothing. Has another save to "
                "this place begun meanwhile? Nothing was published"
            )
            raise StorageError(errno.ENOENT, msg) from None
        if found != size_bytes:
            msg = f"{self._url}: expected {size_bytes} bytes in {location}, as this save has written, found {found}"
            raise StorageError(errno.EIO, msg)

    def _publish(self, metadata: bytes) -> None:
        bucket, key = self._place.bucket, self._place.key(METADATA_NAME)
        self._is_published = True  # as long as it may be, `abort` must remove nothing
        try:
            bucket.put(key, metadata)
        except StorageError as error:
            if self._is_there(metadata, error):
                return
            self._is_published = False
            raise

    def _is_there(self, metadata: bytes, error: StorageError) -> bool:
        """Whether the metadata was published although there was an error: its answer may have been lost."""
        try:
            return self._place.read() == metadata
        except FileNotFoundError:
            return False
        except StorageError:
            msg = f"{error.strerror}; whether the new snapshot is in place cannot be known, so its data is kept"
            raise type(error)(error.errno, msg) from error
