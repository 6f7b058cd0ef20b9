"""A save to a local disk: where it is built, and the one step that publishes it.

There are two ways, and `LocalTransaction` is told which one to take:

- *Inside* the snapshot that is already there. Data goes to ``.data/<save id>/``, metadata to
  ``.data/<save id>.metadata``, and renaming that to ``.snapshot_metadata`` publishes the save. Nothing else touches the
  snapshot folder, so that its modification time says when it was last published.
- *Beside* it, in a hidden sibling that looks like the finished snapshot. Renaming it to the name of the snapshot
  publishes the save; a file or link of that name is exchanged with it and then removed. If another process has
  published a snapshot there meanwhile, the data is moved inside and the first way taken.

Before that step everything that it refers to is durable, and nothing that the old snapshot needs is touched. After it,
and only when it is durable too, what it replaced is removed. `lightning_snapshot.storage.folders` names what a save
leaves behind when it is killed.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lightning_snapshot.errors import StorageError
from lightning_snapshot.storage.base import DATA_FOLDER, METADATA_NAME
from lightning_snapshot.storage.files import LocalWriter
from lightning_snapshot.storage.folders import (
    METADATA_SUFFIX,
    Found,
    claim_folder,
    look,
    make_folders,
    moved_path,
    refuse,
    remove_dead_saves,
    remove_if_empty,
    remove_path,
    staging_path,
    unchanged_mtime,
    warn_only,
)
from lightning_snapshot.storage.locations import SAVE_ID, is_named, normalise_own_location
from lightning_snapshot.storage.posix import NO_EXCHANGE, Posix, storage_errors

__all__ = ["LocalTransaction"]

# What a rename says when somebody else has changed the place since we looked.
_CHANGED = {errno.EEXIST, errno.EISDIR, errno.ENOENT, errno.ENOTDIR, errno.ENOTEMPTY}
_MAX_ATTEMPTS = 10
_INSIDE = "inside"


class LocalTransaction:
    """See `lightning_snapshot.storage.base.Transaction`."""

    def __init__(self, posix: Posix, root: Path, url: str, save_id: str) -> None:
        self._posix = posix
        self._root = root
        self._url = url
        self._save_id = save_id
        self._stage = staging_path(root, save_id)
        self._folders: set[Path] = set()
        self._writers: list[LocalWriter] = []
        self._locks: list[int] = []
        self._leftovers: list[Path] = []
        self._complete_saves: list[str] = []
        self._changed_folder = root.parent
        self._published = False
        self._is_guest = False
        self._is_claim = False

    def start(self, *, inside: bool, claim: bool = False) -> None:
        """Create the folders of the save and take its lock.

        Args:
            inside: Build inside the snapshot folder rather than beside it.
            claim: Make an empty folder at the place, which is removed if the save fails.

        Raises:
            OSError: The operating system refused; `abort` removes what there is.
        """
        if inside:
            self._stage = self._root
            self._start_inside()
            return
        make_folders(self._posix, self._root.parent)
        self._locks.append(claim_folder(self._posix, self._stage))
        # Not before: a folder that was there already belongs to another save.
        self._leftovers.append(self._stage)
        self._make_folder(self._data_folder())
        if claim:
            # Nothing is lost if somebody else is faster: publishing looks at what is there by then.
            with suppress(FileExistsError):
                self._posix.make_folder(self._root)
                self._is_claim = True

    def join(self, invitation: str) -> None:
        """Take part in the save that another rank has begun.

        Args:
            invitation: Where that rank builds it.

        Raises:
            FileNotFoundError: The save is not there.
        """
        self._stage = self._root if invitation == _INSIDE else self._stage
        self._is_guest = True
        if not self._data_folder().is_dir():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self._data_folder()))
        self._folders.add(self._data_folder())

    @property
    def invitation(self) -> str:
        """Where the save is built: inside the snapshot that is there, or beside it."""
        return _INSIDE if self._stage == self._root else "beside"

    def adopt(self, location: str, size_bytes: int) -> None:
        """Take in a data file that another rank has finished.

        Raises:
            MetadataError: The location is not in the folder of the save.
            StorageError: The file is not there, or has another size.
        """
        path = self._stage / normalise_own_location(location, self._save_id, self._url)
        with storage_errors("look at the file that another rank has written,", path):
            found = path.stat().st_size
        if found != size_bytes:
            msg = f"{path}: expected {size_bytes} bytes, as another rank has written there, found {found}"
            raise StorageError(errno.EIO, msg)
        self._folders.add(path.parent)

    def create(self, location: str, size_bytes: int) -> LocalWriter:
        """Start a data file in the folder of the save; missing folders in between are made.

        Raises:
            MetadataError: The location is not in the folder of the save.
            StorageError: The operating system refused.
        """
        normalised = normalise_own_location(location, self._save_id, self._url)
        path = self._stage / normalised
        with storage_errors("create the folder of", path):
            self._make_folder(path.parent)
        writer = LocalWriter(self._posix, path, size_bytes)
        self._writers.append(writer)
        return writer

    def commit(self, metadata: bytes) -> None:
        """Publish ``metadata`` and all data files in one step, then remove what they replace.

        Raises:
            NotASnapshotError: Another process has put something there that must not be lost.
            StorageError: The operating system refused. Either nothing was published, or the message says so.
        """
        if self._is_guest:
            raise StorageError(errno.EPERM, f"{self._url}: only the rank that has begun a save can publish it")
        if not all(writer.finished for writer in self._writers):
            raise StorageError(errno.EBUSY, f"{self._url}: expected all data files to be finished, found open ones")
        with storage_errors("publish the snapshot", self._root):
            if self._stage == self._root:
                self._publish_inside(metadata)
            else:
                self._publish_beside(metadata)
        with storage_errors(
            "make sure that a power cut cannot undo the new snapshot, which is in place at", self._root
        ):
            self._posix.sync_folder(self._changed_folder)
        self._remove_leftovers()
        with warn_only(f"remove what is unused in {self._root}"):
            remove_dead_saves(self._posix, self._root, metadata, self._complete_saves, is_durable=True)
        self._unlock()

    def abort(self) -> None:
        """Remove what the save has written, unless it is published. Failures are logged."""
        for writer in self._writers:
            with warn_only(f"close a file of {self._url}"):
                writer.close()
        if not self._published:
            self._remove_leftovers()
        self._unlock()

    def _remove_leftovers(self) -> None:
        for path in self._leftovers:
            with warn_only(f"remove {path}"):
                remove_path(self._posix, path)
        if self._is_claim and not self._published:
            with warn_only(f"remove {self._root}"):
                remove_if_empty(self._posix, self._root)

    def _unlock(self) -> None:
        while self._locks:
            descriptor = self._locks.pop()
            with warn_only(f"unlock {self._url}"):
                self._posix.unlock(descriptor)
            with warn_only(f"unlock {self._url}"):
                self._posix.close(descriptor)

    # --- building ----------------------------------------------------------------------------------------------------

    def _data_folder(self) -> Path:
        return self._stage / DATA_FOLDER / self._save_id

    def _temporary_metadata(self) -> Path:
        return self._root / DATA_FOLDER / (self._save_id + METADATA_SUFFIX)

    def _make_folder(self, path: Path) -> None:
        """Create a folder below the stage, and its parents; `commit` makes them durable."""
        if path in self._folders or path == self._stage:
            return
        self._make_folder(path.parent)
        with suppress(FileExistsError):
            self._posix.make_folder(path)
        self._folders.add(path)

    def _start_inside(self) -> None:
        self._make_data_root()
        data = self._data_folder()
        self._locks.append(claim_folder(self._posix, data))
        self._leftovers += [data, self._temporary_metadata()]
        self._folders.add(data)

    def _make_data_root(self) -> None:
        path = self._root / DATA_FOLDER
        if path.is_symlink():
            raise OSError(errno.ELOOP, "expected a folder, found a link", str(path))
        if not path.is_dir():
            with unchanged_mtime(self._posix, self._root), suppress(FileExistsError):
                self._posix.make_folder(path)
        self._folders.add(path)

    # --- publishing --------------------------------------------------------------------------------------------------

    @contextmanager
    def _publication(self) -> Iterator[None]:
        """Surrounds the step that publishes. If it may have happened (Ctrl-C right behind it), nothing is removed."""
        self._published = True
        try:
            yield
        except OSError:
            self._published = False
            raise

    def _publish_inside(self, metadata: bytes) -> None:
        temporary, published = self._temporary_metadata(), self._root / METADATA_NAME
        self._write_metadata(temporary, metadata)
        # The parent, too: a save that was killed may have given the snapshot its name without making that durable.
        self._sync(*self._folders, self._root, self._root.parent)
        self._complete_saves = self._find_complete_saves(published)
        with self._publication():
            self._posix.rename(temporary, published)
        self._changed_folder = self._root
        own = (temporary, self._data_folder())
        self._leftovers = [path for path in self._leftovers if path not in own]

    def _publish_beside(self, metadata: bytes) -> None:
        self._write_metadata(self._stage / METADATA_NAME, metadata)
        self._sync(*self._folders, self._stage, self._stage.parent)
        attempt = 1
        while not self._try_to_replace(metadata, is_last=attempt == _MAX_ATTEMPTS):
            attempt += 1

    def _try_to_replace(self, metadata: bytes, *, is_last: bool) -> bool:
        try:
            self._replace(metadata)
        except OSError as error:
            if is_last or error.errno not in _CHANGED:
                raise
        return self._published

    def _replace(self, metadata: bytes) -> None:
        found = look(self._posix, self._root)
        if found in (Found.NOTHING, Found.EMPTY):
            with self._publication():
                self._posix.rename(self._stage, self._root)
        elif found in (Found.FILE, Found.LINK):
            self._exchange()
        elif found in (Found.SNAPSHOT, Found.UNFINISHED):
            self._move_inside()
            self._publish_inside(metadata)
        else:
            raise refuse(self._url, found)

    def _exchange(self) -> None:
        try:
            with self._publication():
                self._posix.exchange(self._stage, self._root)
        except OSError as error:
            if error.errno not in NO_EXCHANGE:
                raise
            self._exchange_in_two_steps()

    def _exchange_in_two_steps(self) -> None:
        """Move the old thing away, then take its place. `finish_exchanges` does the rest if we die in between."""
        old = moved_path(self._root, self._save_id)
        with suppress(FileExistsError):
            self._posix.make_folder(old.parent)
        self._posix.sync_folder(old.parent.parent)  # or a power cut could lose the old thing with the folder it is in
        try:
            self._posix.rename(self._root, old)
            with self._publication():
                self._posix.rename(self._stage, self._root)
        except BaseException as error:
            # Nobody else takes the stage away, whose lock is ours; by now, the next save may have replaced this one.
            finished_by_others = not os.path.lexists(self._stage)
            if not (finished_by_others and isinstance(error, OSError)):
                self._move_back(old)
                raise
            self._published = True
        self._leftovers.append(old.parent)

    def _move_back(self, old: Path) -> None:
        if os.path.lexists(old) and not os.path.lexists(self._root):
            self._posix.rename(old, self._root)
            # Before `abort` takes the stage apart: after a power cut that undid this, the stage would be published.
            self._posix.sync_folder(self._root.parent)
        with warn_only(f"remove {old.parent}"):
            self._posix.remove_folder(old.parent)

    def _move_inside(self) -> None:
        """Another process has made a snapshot of the place since this save began: become a save inside that."""
        data = self._data_folder()
        self._locks.append(self._posix.open_folder(data))
        self._posix.lock(self._locks[-1], wait=True)
        self._stage = self._root
        self._folders = set()
        self._make_data_root()
        self._leftovers += [self._data_folder(), self._temporary_metadata()]
        self._posix.rename(data, self._data_folder())
        self._folders.add(self._data_folder())

    def _write_metadata(self, path: Path, metadata: bytes) -> None:
        writer = LocalWriter(self._posix, path, len(metadata))
        try:
            writer.write(0, memoryview(metadata))
            writer.finish()
        finally:
            writer.close()

    def _sync(self, *folders: Path) -> None:
        for folder in sorted(folders):
            self._posix.sync_folder(folder)

    def _find_complete_saves(self, published: Path) -> list[str]:
        """The saves that the published metadata names: no other process can be writing to their folders."""
        try:
            metadata = published.read_bytes()
        except FileNotFoundError:
            return []
        names = self._posix.list_folder(self._root / DATA_FOLDER)
        return [name for name in names if SAVE_ID.fullmatch(name) and is_named(name, metadata)]
