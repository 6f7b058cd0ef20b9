"""What lies in a folder of checkpoints."""

import os
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Literal

from lightning_snapshot.errors import DataError, MetadataError, NotASnapshotError, SnapshotNotFoundError
from lightning_snapshot.manifest import (
    DTensorEntry,
    Manifest,
    PrimitiveEntry,
    ShardedTensorEntry,
    decode,
)
from lightning_snapshot.read_plan import TensorLike
from lightning_snapshot.rebuild import read_primitive
from lightning_snapshot.storage import (
    METADATA_NAME,
    Found,
    Storage,
    list_names,
    local_path,
    look_at,
    open_storage,
    published_at,
)
from lightning_snapshot.storage.locations import data_locations

__all__ = ["Checkpoint", "file_size", "list_checkpoints", "read_manifest"]

_SUFFIX = ".ckpt"
# Where a save to a new path is built.
_STAGING_PREFIX = ".snapshot-"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """One line of a listing. ``None`` is what cannot be known.

    Attributes:
        name: Its name in the folder.
        status: ``"complete"``: all files are there with the right length. ``"incomplete"``: a save that is going on or
            was killed, or files are missing. ``"damaged"``: the metadata cannot be read, or a file has another length.
            ``"foreign"``: a checkpoint of another kind.
        saved: When.
        epoch: Lightning's.
        step: Lightning's ``global_step``.
        size_bytes: All data files together.
        tensors: How many.
        world_size: Processes that saved it.
        link: Where the name leads, if it is a link.
    """

    name: str
    status: Literal["complete", "damaged", "foreign", "incomplete"]
    saved: datetime
    epoch: int | None = None
    step: int | None = None
    size_bytes: int | None = None
    tensors: int | None = None
    world_size: int | None = None
    link: str | None = None


def list_checkpoints(folder: str) -> list[Checkpoint]:
    """All checkpoints directly in a folder, the oldest first; other files and folders are left out.

    Raises:
        OSError: The folder cannot be listed.
        SnapshotError: The storage failed.
    """
    checkpoints = []
    for name in list_names(folder):
        path = os.path.join(folder, name)
        checkpoint = _describe(path, name)
        if checkpoint is not None:
            place = local_path(path)
            link = os.readlink(place) if os.path.islink(place) else None
            checkpoints.append(replace(checkpoint, link=link))
    return sorted(checkpoints, key=lambda checkpoint: checkpoint.saved)


def _describe(path: str, name: str) -> Checkpoint | None:
    try:
        modified, size_bytes = _time_and_size(path)
        found = look_at(path)
    except (FileNotFoundError, PermissionError):
        return None  # a link to nothing, removed since it was listed, or nobody's business
    if name.startswith(_STAGING_PREFIX) and found is Found.SNAPSHOT:
        found = Found.UNFINISHED  # not published yet
    if found is Found.SNAPSHOT:
        return _describe_snapshot(path, name, modified)
    if found is Found.UNFINISHED or (found is Found.EMPTY and name.endswith(_SUFFIX)):
        return Checkpoint(name, "incomplete", modified)
    if found is Found.CHECKPOINT:
        return Checkpoint(name, "foreign", modified)
    if found is Found.FILE and name.endswith(_SUFFIX):
        return Checkpoint(name, "foreign", modified, size_bytes=size_bytes)
    return None


def _time_and_size(path: str) -> tuple[datetime, int | None]:
    """When a file or folder was written, as far as that can be known, and its length if it is a file."""
    place = local_path(path)
    if not place:
        return datetime.fromtimestamp(0, timezone.utc), None  # folders in buckets have no time
    status = os.stat(place)
    return datetime.fromtimestamp(status.st_mtime, timezone.utc), status.st_size


def _describe_snapshot(path: str, name: str, modified: datetime) -> Checkpoint | None:
    published = published_at(path)
    saved = published.saved if published else modified
    storage = open_storage(path)
    try:
        manifest = read_manifest(storage)
    except (NotASnapshotError, SnapshotNotFoundError):
        return None  # removed since it was listed
    except MetadataError:
        return Checkpoint(name, "damaged", saved)
    records = {} if manifest.extension is None else manifest.extension.files
    sizes = {location: file_size(storage, location) for location in data_locations(manifest)}
    wrong = [location for location, record in records.items() if sizes[location] != record.size_bytes]
    return Checkpoint(
        name,
        status="incomplete" if None in sizes.values() else "damaged" if wrong else "complete",
        saved=saved,
        epoch=_integer(manifest, "epoch"),
        step=_integer(manifest, "global_step"),
        size_bytes=sum(size or 0 for size in sizes.values()),
        tensors=_count_tensors(manifest),
        world_size=manifest.world_size,
    )


def read_manifest(storage: Storage) -> Manifest:
    """The manifest of a snapshot. Raises like ``storage.read_metadata``, and for damaged metadata."""
    return decode(storage.read_metadata(), source=f"{storage.url}/{METADATA_NAME}")


def file_size(storage: Storage, location: str) -> int | None:
    """Length of a data file in bytes; ``None`` if there is no file."""
    try:
        with closing(storage.open(location)) as reader:
            return reader.size_bytes
    except (DataError, MetadataError):
        return None


def _integer(manifest: Manifest, key: str) -> int | None:
    entry = manifest.entries.get(f"0/{key}")
    if not isinstance(entry, PrimitiveEntry) or entry.type != "int":
        return None
    with suppress(MetadataError):
        return int(read_primitive(key, entry))
    return None


def _count_tensors(manifest: Manifest) -> int:
    """Each tensor counts once, however many ranks hold a part of it."""
    found = set()
    for path, entry in manifest.entries.items():
        if isinstance(entry, (ShardedTensorEntry, DTensorEntry)):
            found.add(path.partition("/")[2])
        elif isinstance(entry, TensorLike):
            found.add(path)
    return len(found)
