"""What is at a place on disk, and the folders that saves make there and that dead saves leave behind.

Names beside a snapshot, in its parent folder:

- ``.snapshot-<save id>.tmp`` is a save that will become a snapshot folder. After an exchange it is what was replaced.
- ``.snapshot-<save id>.old/<name>`` is the file or link of that name, moved away because the file system cannot
  exchange two names in one step. As long as nothing is called ``<name>``, its save is about to take its place.

Inside a snapshot:

- ``.data/<save id>/`` holds the data of a save, ``.data/<save id>.metadata`` its metadata before it is published.
- ``.snapshot_metadata.removed`` was the metadata until somebody began to remove the snapshot. It is the last to go, so
  that whoever comes next knows what there is to remove.

Whoever writes holds the lock of a folder, so that others see that the save is alive.
"""

import errno
import logging
import os
import re
import stat
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from enum import Enum
from functools import partial
from pathlib import Path

from lightning_snapshot.errors import NotASnapshotError, SnapshotError
from lightning_snapshot.storage.base import DATA_FOLDER, METADATA_NAME
from lightning_snapshot.storage.locations import SAVE_ID, is_named
from lightning_snapshot.storage.posix import Posix

__all__ = [
    "METADATA_SUFFIX",
    "REMOVED_NAME",
    "Found",
    "claim_folder",
    "finish_exchanges",
    "found_by_names",
    "look",
    "make_folders",
    "moved_path",
    "refuse",
    "remove_dead_saves",
    "remove_dead_siblings",
    "remove_if_empty",
    "remove_path",
    "staging_path",
    "unchanged_mtime",
    "warn_only",
]

_logger = logging.getLogger("lightning_snapshot")

METADATA_SUFFIX = ".metadata"
REMOVED_NAME = METADATA_NAME + ".removed"
_STAGING = re.compile(rf"\.snapshot-({SAVE_ID.pattern})\.tmp")
_MOVED = re.compile(rf"\.snapshot-({SAVE_ID.pattern})\.old")
_MAX_ATTEMPTS = 100
_NOT_THERE = (errno.ENOENT, errno.ENOTDIR)
_NOT_EMPTY = (errno.EEXIST, errno.ENOTEMPTY)


class Found(Enum):
    """What is at the place of a snapshot, in the words of error messages."""

    NOTHING = "nothing"
    EMPTY = "an empty folder"
    SNAPSHOT = "a snapshot"
    UNFINISHED = "an unfinished save or removal, which was interrupted or is still going on"
    CHECKPOINT = "a sharded checkpoint of torch.distributed.checkpoint (DCP), as Lightning's FSDP strategies write it"
    FOLDER = "a folder that holds other things"
    FILE = "a file"
    LINK = "a link"


_MARKS = {
    METADATA_NAME: Found.SNAPSHOT,
    REMOVED_NAME: Found.UNFINISHED,
    ".metadata": Found.CHECKPOINT,
    "meta.pt": Found.CHECKPOINT,
}


def look(posix: Posix, path: Path) -> Found:
    """Say what is at a path. Links are not followed."""
    try:
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return Found.NOTHING
    if stat.S_ISLNK(mode):
        return Found.LINK
    if not stat.S_ISDIR(mode):
        return Found.FILE
    return found_by_names(posix.list_folder(path))


def found_by_names(names: Collection[str]) -> Found:
    """Say what a folder is that has these names directly in it."""
    if list(names) == [DATA_FOLDER]:
        return Found.UNFINISHED
    marks = [found for name, found in _MARKS.items() if name in names]
    return marks[0] if marks else Found.FOLDER if names else Found.EMPTY


def refuse(url: str, found: Found) -> NotASnapshotError:
    """The error for a place that holds something else, which must not be lost."""
    return NotASnapshotError(
        f"{url}: expected a snapshot, a file or nothing, found {found.value}; nothing was changed. "
        "Choose another path, or move away what is there"
    )


def staging_path(root: Path, save_id: str) -> Path:
    """Hidden sibling of a snapshot. Lightning's scans of the folder do not take it for a checkpoint."""
    return root.parent / f".snapshot-{save_id}.tmp"


def moved_path(root: Path, save_id: str) -> Path:
    """Where a file or link goes that a snapshot replaces. The last name says where it was."""
    return root.parent / f".snapshot-{save_id}.old" / root.name


@contextmanager
def warn_only(operation: str) -> Iterator[None]:
    """Log errors of the operating system, and ours, for work whose failure must not become the caller's."""
    try:
        yield
    except (OSError, SnapshotError) as error:
        _logger.warning("could not %s: %s", operation, error)


@contextmanager
def unchanged_mtime(posix: Posix, folder: Path) -> Iterator[None]:
    """Give a folder its modification time back: Lightning takes the checkpoint with the latest one for the last."""
    before = folder.stat()
    try:
        yield
    finally:
        with warn_only(f"restore the modification time of {folder}"):
            if folder.stat().st_mtime_ns != before.st_mtime_ns:
                posix.set_times(folder, before.st_atime_ns, before.st_mtime_ns)


def _is_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _list_if_there(posix: Posix, folder: Path) -> list[str]:
    try:
        return posix.list_folder(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []


def make_folders(posix: Posix, path: Path) -> None:
    """Create a folder and its missing parents, durably."""
    missing = []
    while not path.is_dir():
        missing.append(path)
        path = path.parent
    for folder in reversed(missing):
        try:
            posix.make_folder(folder)
        except FileExistsError:
            if not folder.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, f"{folder} is a file", str(folder)) from None
        posix.sync_folder(folder.parent)


def claim_folder(posix: Posix, path: Path) -> int:
    """Create a folder and take its lock.

    Returns:
        The descriptor that holds the lock.
    """
    for _ in range(_MAX_ATTEMPTS):
        posix.make_folder(path)
        with suppress(FileNotFoundError):
            descriptor = posix.open_folder(path)
            try:
                posix.lock(descriptor, wait=True)
                if _is_at(path, descriptor):
                    return descriptor
            except BaseException:
                posix.close(descriptor)
                raise
            # Somebody cleaned up between the creation and the lock, and took this for a dead save.
            posix.close(descriptor)
    raise OSError(errno.EBUSY, "other processes keep removing it", str(path))


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.lstat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def remove_path(posix: Posix, path: Path) -> None:
    """Remove a file, a link or a folder with everything in it. What is gone already is no error."""
    # Without recursion: a hostile folder may be nested more deeply than Python can go.
    pending, folders = [path], []
    while pending:
        found = pending.pop()
        with suppress(FileNotFoundError):
            if _is_folder(found):
                folders.append(found)
                pending.extend(found / name for name in reversed(posix.list_folder(found)))
            else:
                posix.unlink(found)
    for folder in reversed(folders):
        with suppress(FileNotFoundError):
            posix.remove_folder(folder)


def remove_if_empty(posix: Posix, folder: Path) -> bool:
    """Remove a folder unless there is something in it; says whether it is gone."""
    try:
        posix.remove_folder(folder)
    except OSError as error:
        if error.errno not in (*_NOT_EMPTY, *_NOT_THERE):
            raise
        return error.errno in _NOT_THERE
    return True


def _remove_if_dead(posix: Posix, folder: Path, is_used: Callable[[], bool] = lambda: False) -> None:
    with suppress(FileNotFoundError):
        descriptor = posix.open_folder(folder)
        try:
            # Asked under the lock: a save that has given it back is dead, or has been published meanwhile.
            if posix.lock(descriptor, wait=False) and _is_at(folder, descriptor) and not is_used():
                remove_path(posix, folder)
        finally:
            posix.close(descriptor)


def remove_dead_siblings(posix: Posix, parent: Path) -> None:
    """Remove what dead saves to any snapshot in ``parent`` have left beside it. Failures are logged."""
    for name in _list_if_there(posix, parent):
        path = parent / name
        if not _STAGING.fullmatch(name):
            continue
        with warn_only(f"remove {path}, the leftover of an interrupted save"):
            if not _is_folder(path):
                # What an exchange has replaced. It must not go before the exchange is durable.
                posix.sync_folder(parent)
                remove_path(posix, path)
            elif set(_list_if_there(posix, path)) <= {DATA_FOLDER, METADATA_NAME}:
                _remove_if_dead(posix, path)


def remove_dead_saves(
    posix: Posix, root: Path, metadata: bytes, complete: Collection[str], *, is_durable: bool
) -> None:
    """Remove data in ``.data`` that the snapshot does not use. Failures are logged.

    Args:
        posix: The system calls.
        root: The snapshot.
        metadata: Its metadata.
        complete: Saves that are not being written any more, and can go even where the file system knows no locks.
        is_durable: Whether a power cut cannot bring earlier metadata back. If a save was killed right behind the step
            that published it, that is not sure.
    """
    data = root / DATA_FOLDER
    for name in _list_if_there(posix, data):
        path = data / name
        save_id = name.removesuffix(METADATA_SUFFIX)
        if not SAVE_ID.fullmatch(save_id) or is_named(save_id, metadata):
            continue
        with warn_only(f"remove {path}, the leftover of another save"):
            if not is_durable:
                posix.sync_folder(root)
                is_durable = True
            if not _is_folder(path):
                # The metadata of a save that lives has its folder beside it.
                if name != save_id and not os.path.lexists(data / save_id):
                    remove_path(posix, path)
            elif save_id in complete:
                remove_path(posix, path)
            else:
                _remove_if_dead(posix, path, partial(_is_published, root, save_id))


def _is_published(root: Path, save_id: str) -> bool:
    """Whether the metadata that is in place now names a save."""
    try:
        return is_named(save_id, (root / METADATA_NAME).read_bytes())
    except FileNotFoundError:
        return False


def finish_exchanges(posix: Posix, parent: Path) -> None:
    """Finish commits that moved a file or link away and stopped before the snapshot took its place.

    Everything is durable before that point of a commit, so any process may do the rest, even while the save lives.
    """
    for name in _list_if_there(posix, parent):
        match = _MOVED.fullmatch(name)
        if match:
            with suppress(FileNotFoundError):
                _finish_exchange(posix, parent / name, match[1])


def _finish_exchange(posix: Posix, folder: Path, save_id: str) -> None:
    names = posix.list_folder(folder)
    if any(_is_folder(folder / name) for name in names):
        return  # not ours: only files and links are moved away
    for name in names:
        root, old = folder.parent / name, folder / name
        if not os.path.lexists(root):
            staged = staging_path(root, save_id)
            posix.rename(staged if _is_folder(staged) else old, root)
        posix.sync_folder(folder.parent)
        remove_path(posix, old)
    posix.remove_folder(folder)
    posix.sync_folder(folder.parent)  # or a removal that follows could let the old thing come back after a power cut
