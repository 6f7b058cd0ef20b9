"""Which snapshots lie in a folder, and in which order: told from names and times, however large their metadata is."""

import logging
import os
import posixpath
import re
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from fsspec.implementations.local import LocalFileSystem

from lightning_snapshot.storage.base import DATA_FOLDER, METADATA_NAME
from lightning_snapshot.storage.locations import is_named

__all__ = ["Published", "list_published", "published_at"]

_logger = logging.getLogger("lightning_snapshot")

_LOCAL = LocalFileSystem()
_TIMED_SAVE_ID = re.compile(r"(\d{8}T\d{6})-[0-9a-f]{12}")


@dataclass(frozen=True, slots=True, order=True)
class Published:
    """A published snapshot. Later ones are greater; one that is saved anew is another one.

    Attributes:
        saved: When it was saved, by its save id, which copies keep; without one, like ``written``.
        written: When its metadata was written. Save ids count seconds, this tells apart what was saved within one.
        real_path: Where it is, behind all links.
        name: Its name in the folder that was listed, which may be that of a link.
    """

    saved: datetime
    written: datetime
    real_path: str
    name: str = field(compare=False)


def list_published(folder: str, file_system: Any = _LOCAL) -> list[Published]:
    """The snapshots directly in a folder, the newest first; whether their data is whole is not looked at.

    Hidden folders are left out. A link counts as what it leads to, and not at all if that is listed itself.

    Args:
        folder: Path in the file system. Nothing there: no snapshots.
        file_system: As fsspec has them.

    Raises:
        OSError: The folder cannot be listed.
    """
    try:
        paths = file_system.ls(_real_path(folder, file_system), detail=False)
    except (FileNotFoundError, NotADirectoryError):
        return []
    shown = [path for path in paths if not _name(path).startswith(".")]
    found = [snapshot for path in shown if (snapshot := published_at(path, file_system))]
    # Links first, so that what they lead to takes their place.
    found.sort(key=lambda snapshot: snapshot.name == _name(snapshot.real_path))
    return sorted({snapshot.real_path: snapshot for snapshot in found}.values(), reverse=True)


def published_at(path: str, file_system: Any = _LOCAL) -> Published | None:
    """The snapshot at a path, if there is one.

    Args:
        path: Path in the file system.
        file_system: As fsspec has them.
    """
    try:
        written = file_system.modified(f"{path}/{METADATA_NAME}")
        saved = _time_of_save(path, file_system) or written
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        _logger.warning("could not tell whether %s is a snapshot: %s", path, error)
        return None
    return Published(saved, written, _real_path(path, file_system), _name(path))


def _time_of_save(path: str, file_system: Any) -> datetime | None:
    """When a snapshot of ours was saved, to the second."""
    try:
        names = [_name(each) for each in file_system.ls(f"{path}/{DATA_FOLDER}", detail=False)]
    except (FileNotFoundError, NotADirectoryError):
        return None
    times = {name: match[1] for name in names if (match := _TIMED_SAVE_ID.fullmatch(name))}
    if len(times) > 1:
        # A save over this snapshot goes on, or was killed.
        metadata = file_system.cat_file(f"{path}/{METADATA_NAME}")
        times = {save_id: time for save_id, time in times.items() if is_named(save_id, metadata)}
    with suppress(ValueError):  # no date, or none at all
        return datetime.strptime(max(times.values()), "%Y%m%dT%H%M%S").replace(tzinfo=timezone.utc)
    return None


def _name(path: str) -> str:
    return posixpath.basename(path.rstrip("/"))


def _real_path(path: str, file_system: Any) -> str:
    return os.path.realpath(path) if isinstance(file_system, LocalFileSystem) else path
