"""Places that hold snapshots."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsspec.core import split_protocol
from fsspec.implementations.local import LocalFileSystem

from lightning_snapshot.errors import NotASnapshotError, UnsupportedFeatureError
from lightning_snapshot.storage.base import DATA_FOLDER, METADATA_NAME, Reader, Storage, Transaction, Writer
from lightning_snapshot.storage.folders import Found, look
from lightning_snapshot.storage.listing import Published, list_published, published_at
from lightning_snapshot.storage.local import LocalStorage, clear_folder
from lightning_snapshot.storage.posix import Posix

__all__ = [
    "DATA_FOLDER",
    "METADATA_NAME",
    "Found",
    "Published",
    "Reader",
    "Storage",
    "Transaction",
    "Writer",
    "clear_leftovers",
    "list_published",
    "local_path",
    "look_at",
    "open_storage",
    "published_at",
]

_LOCAL_PROTOCOLS = frozenset({None, "file", "local"})
# What fsspec's local file system takes, so that a program with one set of options for all places runs here, too.
_LOCAL_OPTIONS = frozenset({"auto_mkdir"})


def local_path(url: str | os.PathLike[str]) -> str:
    """The file or folder that a path or ``file://`` URL names; empty for a URL of another kind."""
    text = os.fspath(url)
    protocol = split_protocol(text)[0]
    if protocol is None and not text.startswith(("file:", "local:")):
        return os.path.expanduser(text)  # not through fsspec, for which "::" in a name joins two URLs
    return str(LocalFileSystem._strip_protocol(text)) if protocol in _LOCAL_PROTOCOLS else ""  # noqa: SLF001  # fsspec's own way


def look_at(url: str | os.PathLike[str]) -> Found:
    """Say what is at a path or URL of a local disk, behind all links."""
    return look(Posix(), Path(os.path.realpath(local_path(url))))


def clear_leftovers(folder: str | os.PathLike[str]) -> None:
    """Remove what interrupted saves and removals have left in a folder of checkpoints. Failures are logged.

    What somebody writes just now stays. So does a folder that has data but no metadata and was not being removed: it
    may be a copy that is not complete yet.

    Args:
        folder: On a local disk; elsewhere nothing is done.
    """
    path = local_path(folder)
    if path:
        clear_folder(Path(os.path.realpath(path)), Posix())


def open_storage(url: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None) -> Storage:
    """The storage for a path or URL, as Lightning's own path handling understands it. Nothing is read or written.

    Args:
        url: A path, or ``file://`` or ``local://`` and a path. A relative one is made absolute now, so that a later
            change of the working directory does not move the snapshot.
        storage_options: Options of the storage, as fsspec has them. A local disk has only ``auto_mkdir``, which is
            always on.

    Raises:
        NotASnapshotError: The path is empty or cannot be the path of anything.
        UnsupportedFeatureError: The place is not on a local or mounted disk.
    """
    text = os.fspath(url)
    protocol, path = split_protocol(text)
    if not path or "\0" in path:
        msg = f"expected the path of a snapshot, found {text!r}"
        raise NotASnapshotError(msg)
    if protocol is None and path.lower().startswith("registry:"):
        msg = f"{text}: the model registry of Lightning needs the package litmodels; install it, or give a path"
        raise UnsupportedFeatureError(msg)
    if protocol not in _LOCAL_PROTOCOLS:
        msg = f"{text}: this version reads and writes local disks only, found {protocol!r}; object stores come later"
        raise UnsupportedFeatureError(msg)
    unknown = sorted(set(storage_options or ()) - _LOCAL_OPTIONS)
    if unknown:
        msg = f"{text}: a local disk takes no storage options but {sorted(_LOCAL_OPTIONS)}, found {unknown}"
        raise UnsupportedFeatureError(msg)
    place = Path(os.getcwd(), local_path(text))
    # The last part may be a link, which a save replaces; the parts before it are resolved so that `..` means what the
    # file system says.
    root = (
        Path(os.path.realpath(place)) if place.name in ("", "..") else Path(os.path.realpath(place.parent), place.name)
    )
    return LocalStorage(root, text, Posix())
