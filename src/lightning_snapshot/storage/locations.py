"""Names inside a snapshot: which ones are safe, and which saves a metadata text refers to."""

import errno
import os
import re

from lightning_snapshot.errors import MetadataError, StorageError
from lightning_snapshot.manifest import (
    ChunkedTensorEntry,
    DTensorEntry,
    Manifest,
    ObjectEntry,
    ShardedTensorEntry,
    TensorEntry,
)
from lightning_snapshot.storage.base import DATA_FOLDER

__all__ = ["SAVE_ID", "check_save_id", "data_locations", "is_named", "normalise_location", "normalise_own_location"]

SAVE_ID = re.compile("[A-Za-z0-9][A-Za-z0-9_-]{0,99}")
"""What names a save: no dot, so that it never ends like another name; short enough for every file system."""


def check_save_id(save_id: str, url: str) -> None:
    """Refuse a name that is no safe file name, or that Lightning's directory scans would take for a checkpoint.

    Raises:
        StorageError: The name is not allowed.
    """
    if not SAVE_ID.fullmatch(save_id) or "ckpt_" in save_id:
        msg = f"{url}: expected a save id of up to 100 letters, digits, '_' and '-' without 'ckpt_', found {save_id!r}"
        raise StorageError(errno.EINVAL, msg)


def normalise_location(location: str, url: str) -> str:
    """The location without empty parts, ``.`` and ``..``. Other systems than the writer's must agree on the file.

    Args:
        location: What a metadata file says, relative to the snapshot.
        url: The snapshot, for messages.

    Raises:
        MetadataError: The location could lead out of the snapshot, or names no file.
    """
    parts: list[str] = []
    defect = _find_defect(location)
    for part in location.split("/"):
        if part == ".." and not parts:
            defect = defect or "one that leads out of it"
        elif part == "..":
            parts.pop()
        elif part not in ("", "."):
            parts.append(part)
    if defect or not parts:
        msg = f"{url}: expected the location of a file inside the snapshot, found {defect or 'the root'}: {location!r}"
        raise MetadataError(msg)
    return "/".join(parts)


def _find_defect(location: str) -> str:
    if not location:
        return "an empty one"
    if location.startswith("/"):
        return "an absolute path"
    if "\0" in location or "\\" in location:
        return "a NUL character or a backslash"
    try:
        os.fsencode(location)
    except UnicodeEncodeError:
        return "a lone surrogate"
    return ""


def normalise_own_location(location: str, save_id: str, url: str) -> str:
    """Like `normalise_location`, for a file that the save is about to write.

    Raises:
        MetadataError: The location is not in the folder of the save.
    """
    normalised = normalise_location(location, url)
    if not normalised.startswith(f"{DATA_FOLDER}/{save_id}/"):
        msg = f"{url}: expected a location in '{DATA_FOLDER}/{save_id}/', found {location!r}"
        raise MetadataError(msg)
    return normalised


def data_locations(manifest: Manifest) -> list[str]:
    """All files that a manifest names, as it writes them, each once."""
    found: dict[str, None] = dict.fromkeys(manifest.extension.files if manifest.extension is not None else ())
    for entry in manifest.entries.values():
        if isinstance(entry, TensorEntry | ObjectEntry):
            found[entry.location] = None
        elif isinstance(entry, ChunkedTensorEntry):
            found.update((chunk.tensor.location, None) for chunk in entry.chunks)
        elif isinstance(entry, ShardedTensorEntry | DTensorEntry):
            found.update((shard.tensor.location, None) for shard in entry.shards)
    return list(found)


def is_named(save_id: str, metadata: bytes) -> bool:
    """Whether a metadata text refers to data of a save.

    Looks at the text alone: that works for damaged metadata and for tens of megabytes of YAML too, and errs on the side
    of keeping data.
    """
    return re.search(rb"/%b[/\\]" % re.escape(save_id.encode()), metadata) is not None
