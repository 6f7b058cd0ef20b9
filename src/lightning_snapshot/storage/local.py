"""Snapshots in folders of a local or network disk.

How a save is published is in `lightning_snapshot.storage.save`, what it leaves behind when it is killed in
`lightning_snapshot.storage.folders`.
"""

import errno
import logging
import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from lightning_snapshot.errors import (
    DataError,
    MetadataError,
    MissingDataError,
    NotASnapshotError,
    SnapshotError,
    SnapshotNotFoundError,
    StorageError,
)
from lightning_snapshot.manifest import decode
from lightning_snapshot.storage.base import DATA_FOLDER, METADATA_NAME
from lightning_snapshot.storage.files import LocalReader
from lightning_snapshot.storage.folders import (
    Found,
    finish_exchanges,
    look,
    refuse,
    remove_dead_saves,
    remove_dead_siblings,
    remove_path,
    unchanged_mtime,
    warn_only,
)
from lightning_snapshot.storage.locations import check_save_id, data_locations, normalise_location
from lightning_snapshot.storage.posix import Posix, storage_errors
from lightning_snapshot.storage.save import LocalTransaction

__all__ = ["LocalStorage"]

_logger = logging.getLogger("lightning_snapshot")

_MAX_METADATA_BYTES = 4 * 1024**3
_MAX_NAMES = 5
_NOT_THERE = (errno.ENOENT, errno.ENOTDIR)
_NOT_EMPTY = (errno.EEXIST, errno.ENOTEMPTY)


class LocalStorage:
    """See `lightning_snapshot.storage.base.Storage`."""

    def __init__(self, path: Path, url: str, posix: Posix) -> None:
        """Name the snapshot; nothing is touched.

        Args:
            path: Its folder, absolute. The last part of the path may be a link, and is then what gets replaced.
            url: The place as the user wrote it.
            posix: The system calls.
        """
        self._root = path
        self._url = url
        self._posix = posix

    @property
    def url(self) -> str:
        """The place as the user wrote it."""
        return self._url

    def is_snapshot(self) -> bool:
        """Whether there is a snapshot that can be read."""
        return (self._root / METADATA_NAME).is_file()

    def read_metadata(self) -> bytes:
        """Read ``.snapshot_metadata``, after finishing a commit that was interrupted half way.

        Raises:
            SnapshotNotFoundError: There is nothing.
            NotASnapshotError: There is something else.
            MetadataError: The metadata is no readable file, or too large to be true.
            StorageError: The operating system refused.
        """
        with suppress(MissingDataError):
            return self._read_metadata()
        with storage_errors("look for", self._root):
            if not os.path.lexists(self._root):
                finish_exchanges(self._posix, self._root.parent)
        try:
            return self._read_metadata()
        except MissingDataError:
            raise self._explain_absence() from None

    def open(self, location: str) -> LocalReader:
        """Open a data file for reading.

        Raises:
            DataError: It is a folder, a pipe or a device.
            MetadataError: The location leads out of the snapshot.
            MissingDataError: There is no such file.
            StorageError: The operating system refused.
        """
        path = self._resolve(location)
        try:
            with storage_errors("open", path):
                return LocalReader(self._posix, path)
        except StorageError as error:
            if error.errno not in _NOT_THERE:
                raise
            msg = f"{self._url}: expected a data file at {location!r}, found none; the snapshot is incomplete"
            raise MissingDataError(msg) from error

    def begin(self, save_id: str) -> LocalTransaction:
        """Start a save, after removing what dead saves have left here.

        Raises:
            NotASnapshotError: There is something that must not be lost.
            StorageError: The operating system refused.
        """
        check_save_id(save_id, self._url)
        with storage_errors("start a save to", self._root):
            self._clean_up()
            found = look(self._posix, self._root)
            if found in (Found.CHECKPOINT, Found.FOLDER):
                raise refuse(self._url, found)
            transaction = LocalTransaction(self._posix, self._root, self._url, save_id)
            try:
                transaction.start(inside=found in (Found.SNAPSHOT, Found.UNFINISHED))
            except BaseException:
                transaction.abort()
                raise
        return transaction

    def discard(self, locations: Iterable[str]) -> None:
        """Remove data files and the folders that become empty. Failures are logged."""
        with warn_only(f"remove unused files of {self._url}"), unchanged_mtime(self._posix, self._root):
            folders: set[Path] = set()
            for location in locations:
                with warn_only(f"remove {location!r} from {self._url}"):
                    folders.update(self._unlink(location))
            self._remove_if_empty(folders)

    def remove(self) -> None:
        """Remove what is there: a snapshot, a file, a link (not what it leads to), or a sharded checkpoint.

        Raises:
            NotASnapshotError: It is a folder of another kind.
            StorageError: The operating system refused.
        """
        with storage_errors("remove", self._root):
            with warn_only(f"finish interrupted saves beside {self._url}"):
                finish_exchanges(self._posix, self._root.parent)
            found = look(self._posix, self._root)
            if found is Found.FOLDER:
                raise refuse(self._url, found)
            if found in (Found.SNAPSHOT, Found.UNFINISHED):
                self._remove_snapshot()
            else:
                # Lightning's own sharded strategies, too, ask the plugin to remove what they have written.
                remove_path(self._posix, self._root)

    # --- reading -----------------------------------------------------------------------------------------------------

    def _resolve(self, location: str, *, follow: bool = True) -> Path:
        """The real path of a location, which must not lead out of the snapshot.

        Args:
            location: Relative to the snapshot.
            follow: Whether to look behind a link if the file itself is one.

        Raises:
            MetadataError: The location leads out of the snapshot.
        """
        root = Path(os.path.realpath(self._root))
        path = root / normalise_location(location, self._url)
        resolved = Path(os.path.realpath(path if follow else path.parent)) / ("" if follow else path.name)
        if root not in resolved.parents:
            msg = f"{self._url}: expected {location!r} to be a file in {root}, found a link to {resolved}"
            raise MetadataError(msg)
        return resolved

    def _read_metadata(self) -> bytes:
        try:
            reader = self.open(METADATA_NAME)
        except MissingDataError:
            raise
        except DataError as error:
            raise MetadataError(str(error)) from error
        try:
            if reader.size_bytes > _MAX_METADATA_BYTES:
                limit, found = _MAX_METADATA_BYTES, reader.size_bytes
                msg = f"{self._url}: expected at most {limit} bytes in {METADATA_NAME}, found {found}"
                raise MetadataError(msg)
            metadata = bytearray(reader.size_bytes)
            reader.read_into(0, memoryview(metadata))
        finally:
            reader.close()
        return bytes(metadata)

    def _explain_absence(self) -> SnapshotError:
        target = Path(os.path.realpath(self._root))
        with storage_errors("look for", target):
            found = look(self._posix, target)
        if found is not Found.NOTHING:
            return NotASnapshotError(
                f"{self._url}: expected a snapshot, which is a folder with {METADATA_NAME}, found {found.value}"
            )
        what = f"a link to {target}, where nothing is" if self._root.is_symlink() else "nothing"
        return SnapshotNotFoundError(f"{self._url}: expected a snapshot, found {what}")

    # --- removing ----------------------------------------------------------------------------------------------------

    def _clean_up(self) -> None:
        with warn_only(f"finish interrupted saves beside {self._url}"):
            finish_exchanges(self._posix, self._root.parent)
        with warn_only(f"clean up beside {self._url}"):
            remove_dead_siblings(self._posix, self._root.parent)
        if self._root.is_symlink() or not (self._root / DATA_FOLDER).is_dir():
            return
        try:
            metadata = self._read_metadata()
        except MissingDataError:
            metadata = b""
        except SnapshotError as error:
            _logger.warning("could not clean up in %s: %s", self._url, error)
            return
        with warn_only(f"clean up in {self._url}"):
            remove_dead_saves(self._posix, self._root, metadata, ())

    def _remove_snapshot(self) -> None:
        locations = self._find_data_files()
        with suppress(FileNotFoundError):
            self._posix.unlink(self._root / METADATA_NAME)
        self._posix.sync_folder(self._root)
        remove_path(self._posix, self._root / DATA_FOLDER)
        folders: set[Path] = set()
        for location in locations:
            folders.update(self._unlink(location))
        self._remove_if_empty(folders)
        try:
            self._posix.remove_folder(self._root)
        except OSError as error:
            if error.errno not in _NOT_EMPTY:
                raise
            self._warn_about_kept_files()

    def _find_data_files(self) -> list[str]:
        try:
            return data_locations(decode(self._read_metadata(), source=self._url))
        except MissingDataError:
            return []
        except SnapshotError as error:
            _logger.warning("cannot tell all data files of %s, which is removed: %s", self._url, error)
            return []

    def _unlink(self, location: str) -> Iterator[Path]:
        """Remove a data file, unless the location is that of something else; gives the folders it was in."""
        try:
            path = self._resolve(location, follow=False)
        except MetadataError as error:
            _logger.warning("nothing to remove: %s", error)
            return
        if path.name == METADATA_NAME or path.is_dir():
            _logger.warning("%s: expected the location of a data file to remove, found %r", self._url, location)
            return
        with suppress(FileNotFoundError, NotADirectoryError):
            self._posix.unlink(path)
        root = Path(os.path.realpath(self._root))
        yield from (folder for folder in path.parents if root in folder.parents)

    def _remove_if_empty(self, folders: Iterable[Path]) -> None:
        for folder in sorted(folders, key=lambda folder: len(folder.parts), reverse=True):
            if folder.name != DATA_FOLDER:
                try:
                    self._posix.remove_folder(folder)
                except OSError as error:
                    if error.errno not in (*_NOT_EMPTY, *_NOT_THERE):
                        raise

    def _warn_about_kept_files(self) -> None:
        files = [path for path in self._root.rglob("*") if path.is_symlink() or not path.is_dir()]
        kept = [str(path.relative_to(self._root)) for path in files] or self._posix.list_folder(self._root)
        names = ", ".join(sorted(kept)[:_MAX_NAMES])
        more = f" and {len(kept) - _MAX_NAMES} more" if len(kept) > _MAX_NAMES else ""
        msg = f"{self._url}: removed the snapshot, but kept the files that it does not name: {names}{more}"
        warnings.warn(msg, UserWarning, stacklevel=4)
