"""Snapshots that lie beside each other: which is the newest, and which one can stand in for a damaged one."""

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

import torch

from lightning_snapshot.errors import DataError, MetadataError, NotASnapshotError, SnapshotError
from lightning_snapshot.restore import read_manifest
from lightning_snapshot.storage import (
    Found,
    Published,
    Storage,
    list_published,
    look_at,
    open_storage,
    parent_of,
    published_at,
)
from lightning_snapshot.storage.locations import data_locations
from lightning_snapshot.tensors import tensors_by_path

__all__ = ["Fallback", "latest"]

_Path: TypeAlias = str | os.PathLike[str]
_Read: TypeAlias = Callable[[Storage], dict[str, Any]]

_MAX_NAMES = 5


def latest(directory: _Path, storage_options: Mapping[str, Any] | None = None) -> str | None:
    """The newest complete snapshot directly in a folder.

    Snapshots of ours count by the time in their save id, which copies keep; those of torchsnapshot by the time at
    which their metadata was written. Complete means that the metadata is readable and all data files have their
    length; their content is checked when it is loaded. Links count as what they lead to. Anything else, and what is
    hidden, is ignored.

    Args:
        directory: Path or URL of a folder.
        storage_options: Options of the storage, by the names of obstore or of fsspec.

    Returns:
        Its path, which begins with ``directory``; nothing if there is none.

    Raises:
        UnsupportedFeatureError: The place or an option is not known, or a package is missing that it needs.
        StorageError: The storage failed.
    """
    for _, path in _snapshots_in(directory, storage_options):
        defect = _find_defect(open_storage(path, storage_options))
        if defect is None:
            return path
        warnings.warn(f"passed over a snapshot that is not complete: {defect}", stacklevel=2)
    return None


def _snapshots_in(directory: _Path, storage_options: Mapping[str, Any] | None) -> Iterator[tuple[Published, str]]:
    """Snapshots and their paths, the newest first."""
    open_storage(directory, storage_options)  # says what is wrong with the path
    for published in list_published(directory, storage_options):
        yield published, os.path.join(os.fspath(directory), published.name)


def _find_defect(storage: Storage) -> SnapshotError | None:
    """What shows that a snapshot is not complete, without reading its data."""
    try:
        manifest = read_manifest(storage)
        records = manifest.extension.files if manifest.extension else {}
        for location in data_locations(manifest):
            reader = storage.open(location)
            reader.close()
            if location in records and reader.size_bytes != records[location].size_bytes:
                expected, found = records[location].size_bytes, reader.size_bytes
                return DataError(f"{storage.url}: expected {expected} bytes in {location}, found {found}")
    except SnapshotError as error:
        return error
    return None


class Fallback:
    """Loads a snapshot or, where that is allowed, the newest complete one beside it in its place.

    An unfinished save or removal, which Lightning may take for the last checkpoint, can always be replaced.

    Args:
        previous: Whether an older snapshot may replace a damaged one.
        storage_options: Passed to the storage.
    """

    def __init__(self, *, previous: bool, storage_options: Mapping[str, Any]) -> None:
        self._previous = previous
        self._storage_options = storage_options
        self._damaged: dict[Published, SnapshotError] = {}

    def load(self, path: _Path, read: _Read, targets: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Load the state at a path. What is known to be damaged is not read again, unless it has been saved anew.

        Args:
            path: The snapshot.
            read: Reads the state of a snapshot, as far as possible into ``targets``.
            targets: Logical path → tensor. What an attempt that failed has written to them is overwritten by the state
                that is returned, or else when that is loaded into the owner of the tensors.

        Raises:
            SnapshotError: That of ``path``, if no other snapshot may or can replace it; it says what was tried.
        """
        storage = open_storage(path, self._storage_options)
        published = published_at(path, self._storage_options)
        defect = self._damaged.get(published) if published else None
        filled: set[str] = set()
        if defect is None:
            try:
                return read(storage)
            except (DataError, MetadataError, NotASnapshotError) as error:
                if not self._is_replaceable(path, error):
                    raise
                defect = self._note(published, error)
            filled = _filled_by(storage, targets)
        tried: list[str] = []
        for sibling, place in self._siblings(path, published):
            state = self._load_sibling(sibling, place, read, targets, filled, tried)
            if state is not None:
                age = " that is older" if published else ""
                msg = f"{defect}. Loaded {place} instead, the newest complete snapshot beside it{age}"
                warnings.warn(msg, stacklevel=3)
                return state
        msg = f"{defect}; {'tried instead: ' if tried else 'no snapshot beside it could replace it'}{'; '.join(tried)}"
        raise type(defect)(msg)

    def _is_replaceable(self, path: _Path, error: SnapshotError) -> bool:
        if not isinstance(error, NotASnapshotError):
            return self._previous
        found = look_at(path, self._storage_options)
        # A killed save of torchsnapshot cannot be told from an ordinary folder.
        return found in (Found.EMPTY, Found.UNFINISHED) or (self._previous and found is Found.FOLDER)

    def _note(self, published: Published | None, error: SnapshotError) -> SnapshotError:
        """Remember an error, without its traceback, which holds all that has been read so far."""
        bare = type(error)(*error.args)
        if published is not None:
            self._damaged[published] = bare
        return bare

    def _siblings(self, path: _Path, published: Published | None) -> Iterator[tuple[Published, str]]:
        for sibling, place in _snapshots_in(parent_of(path), self._storage_options):
            if published is None or sibling < published:
                yield sibling, place

    def _load_sibling(
        self,
        sibling: Published,
        place: str,
        read: _Read,
        targets: Mapping[str, torch.Tensor],
        filled: set[str],
        tried: list[str],
    ) -> dict[str, Any] | None:
        """The state of a sibling, or None and one more line in ``tried``, and in ``filled`` what it has overwritten."""
        storage = open_storage(place, self._storage_options)
        defect = self._damaged.get(sibling) or _find_defect(storage)
        if defect is None:
            try:
                state = read(storage)
            except (DataError, MetadataError) as error:
                if not self._previous:
                    raise
                defect = self._note(sibling, error)
            else:
                # Lightning may be told not to miss them, and they would keep elements of a damaged snapshot.
                lost = sorted(filled - tensors_by_path(state).keys())
                if not lost:
                    return state
                names = ", ".join(lost[:_MAX_NAMES])
                defect = DataError(f"{place}: expected all tensors of the damaged snapshot, found none at {names}")
            filled |= _filled_by(storage, targets)
        tried.append(str(defect))
        return None


def _filled_by(storage: Storage, targets: Mapping[str, torch.Tensor]) -> set[str]:
    """The targets to which a load that failed may have written."""
    if not targets:
        return set()
    try:
        entries = read_manifest(storage).entries
    except SnapshotError:
        return set()  # then the load has failed before it came to the data
    return targets.keys() & {path.partition("/")[2] for path in entries}
