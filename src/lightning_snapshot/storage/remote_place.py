"""The place of a snapshot in a bucket: what is there, and what dead saves and removals have left."""

import errno
import logging
from collections.abc import Collection, Iterable
from contextlib import suppress
from datetime import datetime, timedelta, timezone

from lightning_snapshot.errors import MetadataError, SnapshotError, StorageError
from lightning_snapshot.manifest import decode
from lightning_snapshot.storage.base import DATA_FOLDER, METADATA_NAME
from lightning_snapshot.storage.buckets import Bucket, Item
from lightning_snapshot.storage.folders import METADATA_SUFFIX, REMOVED_NAME, Found, found_by_names, warn_only
from lightning_snapshot.storage.locations import SAVE_ID, data_locations, is_named, normalise_location

__all__ = ["SAVING_SUFFIX", "Place", "save_of"]

_logger = logging.getLogger("lightning_snapshot")

SAVING_SUFFIX = ".saving"
"""``.data/<save id>.saving`` is there from the beginning of a save to its end. Whoever finds it without the save knows
what there is to remove: nothing can be locked in a bucket."""

_MAX_METADATA_BYTES = 4 * 1024**3
# What nobody has written to for so long belongs to a dead save.
_GRACE = timedelta(hours=1)
# Bucket, folder and id of the saves that go on in this process.
_living: set[tuple[str, str, str]] = set()


def save_of(location: str) -> str:
    """The save that a location in ``.data`` belongs to; empty for other locations."""
    folder, _, rest = location.partition("/")
    save_id = rest.partition("/")[0].removesuffix(SAVING_SUFFIX).removesuffix(METADATA_SUFFIX)
    return save_id if folder == DATA_FOLDER and SAVE_ID.fullmatch(save_id) else ""


class Place:
    """A folder in a bucket that is, or will be, a snapshot.

    Attributes:
        bucket: Where it is.
        url: As the user wrote it.
    """

    def __init__(self, bucket: Bucket, folder: str, url: str) -> None:
        self.bucket = bucket
        self.url = url
        self._folder = folder

    def key(self, location: str) -> str:
        """The key of a file of the snapshot; without a location, that of a stock checkpoint at the place."""
        return "/".join(filter(None, (self._folder, location)))

    def _location(self, item: Item) -> str:
        return item.key[len(self._folder) :].lstrip("/")

    def keep_alive(self, save_id: str) -> None:
        """Let nobody in this process take a save for a dead one."""
        _living.add((self.bucket.name, self._folder, save_id))

    def let_die(self, save_id: str) -> None:
        """The opposite of `keep_alive`."""
        _living.discard((self.bucket.name, self._folder, save_id))

    def names(self) -> list[str]:
        """What is directly in the folder."""
        folders, items = self.bucket.list_folder(self._folder)
        return [name for name in (*folders, *map(self._location, items)) if name]

    def look(self, names: Collection[str] | None = None) -> Found:
        """Say what is there.

        Args:
            names: What `names` says, if that is known.
        """
        names = self.names() if names is None else names
        if names:
            return found_by_names(names)
        if self._folder:
            with suppress(FileNotFoundError):
                self.bucket.head(self._folder)
                return Found.FILE
        return Found.NOTHING

    def files(self, folder: str = "") -> dict[str, Item]:
        """Location → object, of everything there or in a folder of it."""
        return {self._location(item): item for item in self.bucket.walk(self.key(folder))}

    def read(self, name: str = METADATA_NAME) -> bytes:
        """Read a metadata file.

        Raises:
            FileNotFoundError: There is none.
            MetadataError: It is too large to be true.
            StorageError: The bucket failed.
        """
        try:
            return self.bucket.get(self.key(name), _MAX_METADATA_BYTES)
        except StorageError as error:
            if error.errno != errno.EFBIG:
                raise
            msg = f"{self.url}/{name}: {error.strerror}"
            raise MetadataError(msg) from error

    def read_file(self) -> bytes:
        """Read the stock checkpoint that lies at the place."""
        return self.bucket.get(self._folder, 2**63)

    def delete(self, locations: Iterable[str]) -> None:
        """Remove files of the snapshot; the empty location is that of a stock checkpoint at the place."""
        keys = [key for location in locations if (key := self.key(location))]
        if keys:
            self.bucket.delete(keys)

    def dead_files(self, metadata: bytes, present: Iterable[str] | None = None) -> list[str]:
        """Files in ``.data`` that belong neither to the snapshot nor to a save of this process.

        Args:
            metadata: That of the snapshot; empty if there is none.
            present: Files in ``.data``, if they are known.
        """
        files: dict[str, list[str]] = {}
        for location in self.files(DATA_FOLDER) if present is None else present:
            files.setdefault(save_of(location), []).append(location)
        dead: list[str] = []
        for save_id, locations in files.items():
            if save_id and (self.bucket.name, self._folder, save_id) not in _living:
                kept = f"{DATA_FOLDER}/{save_id}/" if is_named(save_id, metadata) else None
                dead.extend(location for location in locations if kept is None or not location.startswith(kept))
        return dead

    def finish_removal(self) -> bool:
        """Remove what an interrupted removal has left.

        Returns:
            Whether there was something.
        """
        try:
            removed = self.read(REMOVED_NAME)
        except FileNotFoundError:
            return False
        with suppress(FileNotFoundError):
            self.bucket.head(self.key(METADATA_NAME))
            self.delete([REMOVED_NAME])  # saved anew, or the removal had not begun
            return True
        self.delete([*self._named_in(removed), *self.dead_files(b"")])
        self.delete([REMOVED_NAME])
        return True

    def delete_snapshot(self) -> None:
        """Remove a snapshot or what is left of one: first its metadata, so that it stops being one."""
        with suppress(FileNotFoundError):
            self.bucket.copy(self.key(METADATA_NAME), self.key(REMOVED_NAME))
            self.delete([METADATA_NAME])
        if not self.finish_removal():
            self.delete(self.dead_files(b""))

    def delete_if_dead(self, grace: timedelta = _GRACE) -> None:
        """Remove what is left of a save or removal that was interrupted. Failures are logged.

        Args:
            grace: A save counts as dead when nobody has added to it for so long.
        """
        with warn_only(f"clean up in {self.url}"):
            if self.look() is not Found.UNFINISHED or self.finish_removal():
                return
            files = self.files(DATA_FOLDER)
            modified = [item.modified for item in files.values() if item.modified]
            # Without a marker, it may be a copy that is not complete yet.
            is_save = any(name.endswith(SAVING_SUFFIX) for name in files)
            if is_save and modified and max(modified) < datetime.now(timezone.utc) - grace:
                self.delete(self.dead_files(b""))

    def _named_in(self, metadata: bytes) -> list[str]:
        """The files that a metadata text names, as far as they are in the place."""
        try:
            named = data_locations(decode(metadata, source=self.url))
        except SnapshotError as error:
            _logger.warning("cannot tell all data files of %s, which is removed: %s", self.url, error)
            return []
        return list(self.inside(named))

    def inside(self, locations: Iterable[str]) -> Iterable[str]:
        """Those of some locations that are of data files; others are logged."""
        for location in locations:
            try:
                normalised = normalise_location(location, self.url)
            except MetadataError as error:
                _logger.warning("nothing to remove: %s", error)
                continue
            if normalised != METADATA_NAME:
                yield normalised
