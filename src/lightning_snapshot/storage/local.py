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
    METADATA_SUFFIX,
    REMOVED_NAME,
    Found,
    finish_exchanges,
    look,
    refuse,
    remove_dead_saves,
    remove_dead_siblings,
    remove_if_empty,
    remove_path,
    unchanged_mtime,
    warn_only,
)
from lightning_snapshot.storage.listing import list_published
from lightning_snapshot.storage.locations import SAVE_ID, check_save_id, data_locations, normalise_location
from lightning_snapshot.storage.posix import Posix, storage_errors
from lightning_snapshot.storage.save import LocalTransaction

__all__ = ["LocalStorage", "clear_folder"]

_logger = logging.getLogger("lightning_snapshot")

_MAX_METADATA_BYTES = 4 * 1024**3
_MAX_NAMES = 5
_LIGHTNING_SUFFIX = ".ckpt"
# The last two are of names that no file can have.
_NOT_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)


class LocalStorage:
    """See `lightning_snapshot.storage.base.Storage`."""

    min_threads = 1

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

    def begin(self, save_id: str, *, claim: bool = False) -> LocalTransaction:
        """Start a save, after removing what dead saves have left here.

        Args:
            save_id: Unique name of the save.
            claim: If nothing is there, make the folder of the snapshot now; it stays empty until the save is published.

        Raises:
            NotASnapshotError: There is something that must not be lost.
            StorageError: The operating system refused.
        """
        check_save_id(save_id, self._url)
        with storage_errors("start a save to", self._root):
            self._clean_up_beside()
            found = look(self._posix, self._root)
            if found in (Found.SNAPSHOT, Found.UNFINISHED):
                self._clean_up_inside()
                found = look(self._posix, self._root)
            if found in (Found.CHECKPOINT, Found.FOLDER):
                raise refuse(self._url, found)
            transaction = LocalTransaction(self._posix, self._root, self._url, save_id)
            try:
                inside = found in (Found.SNAPSHOT, Found.UNFINISHED)
                transaction.start(inside=inside, claim=claim and found is Found.NOTHING)
            except BaseException:
                transaction.abort()
                raise
        return transaction

    def join(self, save_id: str, invitation: str) -> LocalTransaction:
        """Take part in a save that another rank has begun.

        Raises:
            StorageError: The operating system refused, or the save is not there.
        """
        check_save_id(save_id, self._url)
        transaction = LocalTransaction(self._posix, self._root, self._url, save_id)
        with storage_errors("join the save of rank 0 (do all ranks see one file system?) at", self._root):
            transaction.join(invitation)
        return transaction

    def discard(self, locations: Iterable[str]) -> None:
        """Remove data files and the folders that become empty. Failures are logged."""
        with warn_only(f"remove unused files of {self._url}"), unchanged_mtime(self._posix, self._root):
            folders: set[Path] = set()
            for location in locations:
                with warn_only(f"remove {location!r} from {self._url}"):
                    folders.update(self._unlink(location))
            self._remove_empty(folders)

    def finish_removal(self) -> None:
        """Remove what an interrupted removal has left, if there is something. Failures are logged."""
        if not os.path.lexists(self._root / REMOVED_NAME) or self.is_snapshot():
            return
        with warn_only(f"finish the interrupted removal of {self._url}"):
            self._posix.sync_folder(self._root)  # that it is no snapshot any more
            self._remove_named_files()
            remove_dead_saves(self._posix, self._root, b"", (), is_durable=True)
            # While somebody saves there, the name stays: should that save die, too, what it leaves is garbage as well.
            if remove_if_empty(self._posix, self._root / DATA_FOLDER):
                self._forget_removed()
                remove_if_empty(self._posix, self._root)

    def remove(self) -> None:
        """Remove what is there: a snapshot, a file, a link (not what it leads to), or a sharded checkpoint.

        Raises:
            NotASnapshotError: It is a folder of another kind.
            StorageError: The operating system refused.
        """
        with storage_errors("remove", self._root):
            # Otherwise the next reader finishes them, and what is removed here comes back.
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

    def _read_metadata(self, name: str = METADATA_NAME) -> bytes:
        try:
            reader = self.open(name)
        except MissingDataError:
            raise
        except DataError as error:
            raise MetadataError(str(error)) from error
        try:
            if reader.size_bytes > _MAX_METADATA_BYTES:
                limit, found = _MAX_METADATA_BYTES, reader.size_bytes
                msg = f"{self._url}: expected at most {limit} bytes in {name}, found {found}"
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
            inside = list_published(str(target)) if found is Found.FOLDER else []
        if found is not Found.NOTHING:
            hint = f"; the newest snapshot in it is {os.path.join(self._url, inside[0].name)}" if inside else ""
            return NotASnapshotError(
                f"{self._url}: expected a snapshot, which is a folder with {METADATA_NAME}, found {found.value}{hint}"
            )
        what = f"a link to {target}, where nothing is" if self._root.is_symlink() else "nothing"
        return SnapshotNotFoundError(f"{self._url}: expected a snapshot, found {what}")

    # --- removing ----------------------------------------------------------------------------------------------------

    def _clean_up_beside(self) -> None:
        with warn_only(f"finish interrupted saves beside {self._url}"):
            finish_exchanges(self._posix, self._root.parent)
        with warn_only(f"clean up beside {self._url}"):
            remove_dead_siblings(self._posix, self._root.parent)

    def _clean_up_inside(self) -> None:
        self.finish_removal()
        if not (self._root / DATA_FOLDER).is_dir():
            return
        try:
            metadata = self._read_metadata()
        except MissingDataError:
            metadata = b""
        except SnapshotError as error:
            _logger.warning("could not clean up in %s: %s", self._url, error)
            return
        with warn_only(f"clean up in {self._url}"):
            remove_dead_saves(self._posix, self._root, metadata, (), is_durable=False)

    def _remove_snapshot(self) -> None:
        with suppress(FileNotFoundError):
            self._posix.rename(self._root / METADATA_NAME, self._root / REMOVED_NAME)
        self._posix.sync_folder(self._root)
        data = self._root / DATA_FOLDER
        if data.is_symlink():
            self._posix.unlink(data)
        for name in self._posix.list_folder(data) if data.is_dir() else ():
            if SAVE_ID.fullmatch(name.removesuffix(METADATA_SUFFIX)):
                remove_path(self._posix, data / name)
        self._remove_named_files()
        remove_if_empty(self._posix, data)
        self._forget_removed()
        if not remove_if_empty(self._posix, self._root):
            self._warn_about_kept_files()

    def _remove_named_files(self) -> None:
        """Remove the files that a removed snapshot names, and the folders that become empty."""
        folders: set[Path] = set()
        for location in self._find_data_files():
            folders.update(self._unlink(location))
        self._remove_empty(folders)

    def _forget_removed(self) -> None:
        # What it names must not come back after a power cut, because nobody would know any more what it is.
        self._posix.sync_folder(self._root)
        with suppress(FileNotFoundError):
            self._posix.unlink(self._root / REMOVED_NAME)

    def _find_data_files(self) -> list[str]:
        try:
            return data_locations(decode(self._read_metadata(REMOVED_NAME), source=self._url))
        except MissingDataError:
            return []
        except StorageError:
            raise  # a later attempt may still be able to read it
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
        if path.name == METADATA_NAME or os.path.isdir(path):
            _logger.warning("%s: expected the location of a data file to remove, found %r", self._url, location)
            return
        try:
            self._posix.unlink(path)
        except OSError as error:
            if error.errno not in _NOT_THERE:
                raise
        root = Path(os.path.realpath(self._root))
        yield from (folder for folder in path.parents if root in folder.parents)

    def _remove_empty(self, folders: Iterable[Path]) -> None:
        for folder in sorted(folders, key=lambda folder: len(folder.parts), reverse=True):
            if folder.name != DATA_FOLDER:
                remove_if_empty(self._posix, folder)

    def _warn_about_kept_files(self) -> None:
        files = [path for path in self._root.rglob("*") if path.is_symlink() or not path.is_dir()]
        kept = [str(path.relative_to(self._root)) for path in files] or self._posix.list_folder(self._root)
        names = ", ".join(sorted(kept)[:_MAX_NAMES])
        more = f" and {len(kept) - _MAX_NAMES} more" if len(kept) > _MAX_NAMES else ""
        msg = f"{self._url}: removed the snapshot, but kept the files that it does not name: {names}{more}"
        warnings.warn(msg, UserWarning, stacklevel=4)


def clear_folder(folder: Path, posix: Posix) -> None:
    """See `lightning_snapshot.storage.clear_leftovers`."""
    with warn_only(f"finish interrupted saves in {folder}"):
        finish_exchanges(posix, folder)
    with warn_only(f"clean up in {folder}"):
        remove_dead_siblings(posix, folder)
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            if path.is_symlink():
                continue
            LocalStorage(path, str(path), posix).finish_removal()
            if path.suffix == _LIGHTNING_SUFFIX:
                # All that is left of a removal right before its end. If somebody else made it, nothing is lost.
                remove_if_empty(posix, path)
