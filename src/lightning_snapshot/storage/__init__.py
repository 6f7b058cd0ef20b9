"""Places that hold snapshots."""

import os
import posixpath
import re
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fsspec import register_implementation
from fsspec.core import split_protocol
from fsspec.implementations.local import LocalFileSystem

from lightning_snapshot.errors import NotASnapshotError, UnsupportedFeatureError
from lightning_snapshot.storage import listing
from lightning_snapshot.storage.base import DATA_FOLDER, METADATA_NAME, Reader, Storage, Transaction, Writer
from lightning_snapshot.storage.cloud import SCHEMES, open_bucket
from lightning_snapshot.storage.folders import Found, look, warn_only
from lightning_snapshot.storage.fsspec_storage import open_fsspec
from lightning_snapshot.storage.listing import Published
from lightning_snapshot.storage.local import LocalStorage, clear_folder
from lightning_snapshot.storage.posix import Posix
from lightning_snapshot.storage.remote import BucketListing, RemoteStorage

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
    "copy_snapshot",
    "list_names",
    "list_published",
    "local_path",
    "look_at",
    "offer_file_systems",
    "open_storage",
    "parent_of",
    "published_at",
    "read_remote_file",
]

_Path = str | os.PathLike[str]
_Options = Mapping[str, Any] | None

_LOCAL_PROTOCOLS = frozenset({None, "file", "local"})
# What fsspec's local file system takes, so that a program with one set of options for all places runs here, too.
_LOCAL_OPTIONS = frozenset({"auto_mkdir"})
# Package that fsspec wants → what does the same with obstore, for which protocols.
_OFFERS = (
    ("s3fs", "S3FileSystem", ("s3", "s3a")),
    ("gcsfs", "GoogleFileSystem", ("gs", "gcs")),
    ("adlfs", "AzureFileSystem", ("az", "abfs", "abfss")),
)
# What pathlib makes of a URL.
_MANGLED = re.compile(rf"({'|'.join(SCHEMES)}|memory):/[^/]")


def offer_file_systems() -> None:
    """Let fsspec, with which Lightning looks into folders, reach object stores where it lacks the packages for that."""
    if find_spec("obstore") is None:
        return
    for package, name, protocols in _OFFERS:
        if find_spec(package) is None:
            for protocol in protocols:
                register_implementation(protocol, f"{__name__}.file_systems.{name}", clobber=True)


def local_path(url: _Path) -> str:
    """The file or folder that a path or ``file://`` URL names; empty for a URL of another kind."""
    text = os.fspath(url)
    protocol = split_protocol(text)[0]
    if protocol is None and not text.startswith(("file:", "local:")):
        return os.path.expanduser(text)  # not through fsspec, for which "::" in a name joins two URLs
    return str(LocalFileSystem._strip_protocol(text)) if protocol in _LOCAL_PROTOCOLS else ""  # noqa: SLF001  # fsspec's own way


def parent_of(path: _Path) -> str:
    """The folder in which a path or URL lies."""
    place = local_path(path)
    return os.path.dirname(os.path.abspath(place)) if place else os.fspath(path).rstrip("/").rpartition("/")[0]


def look_at(url: _Path, storage_options: _Options = None) -> Found:
    """Say what is at a path or URL, behind all links."""
    path = local_path(url)
    return look(Posix(), Path(os.path.realpath(path))) if path else _open_remote(url, storage_options).place.look()


def read_remote_file(url: _Path, storage_options: _Options = None) -> bytes | None:
    """The content of what is no snapshot but a single file, at a URL of another kind than ``file://``; else nothing."""
    if local_path(url):
        return None
    place = _open_remote(url, storage_options).place
    return place.read_file() if place.look() is Found.FILE else None


def list_published(folder: _Path, storage_options: _Options = None) -> list[Published]:
    """See `lightning_snapshot.storage.listing.list_published`."""
    path = local_path(folder)
    if path:
        return listing.list_published(path)
    place = _open_remote(folder, storage_options).place
    return listing.list_published(place.key(""), BucketListing(place.bucket))


def published_at(url: _Path, storage_options: _Options = None) -> Published | None:
    """See `lightning_snapshot.storage.listing.published_at`."""
    path = local_path(url)
    if path:
        return listing.published_at(path)
    place = _open_remote(url, storage_options).place
    return listing.published_at(place.key(""), BucketListing(place.bucket))


def list_names(folder: _Path, storage_options: _Options = None) -> list[str]:
    """Names of all that lies directly in a folder.

    Raises:
        OSError: The folder cannot be listed.
    """
    path = local_path(folder)
    return sorted(os.listdir(path) if path else _open_remote(folder, storage_options).place.names())


def clear_leftovers(folder: _Path, storage_options: _Options = None) -> None:
    """Remove what interrupted saves and removals have left in a folder of checkpoints. Failures are logged.

    What somebody writes just now stays. So does a folder that has data but no metadata and was not being removed: it
    may be a copy that is not complete yet. Where nothing can be locked, as in a bucket, a save that nobody has added to
    for an hour counts as dead.

    Args:
        folder: Path or URL.
        storage_options: Options of the storage.
    """
    path = local_path(folder)
    if path:
        clear_folder(Path(os.path.realpath(path)), Posix())
        return
    with warn_only(f"clean up in {os.fspath(folder)}"):
        place = _open_remote(folder, storage_options).place
        for name in place.names():
            _open_remote(f"{os.fspath(folder).rstrip('/')}/{name}", storage_options).place.delete_if_dead()


def copy_snapshot(source: _Path, target: _Path, storage_options: _Options = None) -> None:
    """Make a copy of a snapshot in the same bucket, without moving its content through this machine.

    Raises:
        StorageError: The bucket failed, or the two are in different ones.
        SnapshotError: The source is no snapshot that can be read, or something else is at the target.
    """
    _open_remote(target, storage_options).copy_from(_open_remote(source, storage_options))


def open_storage(url: _Path, storage_options: _Options = None) -> Storage:
    """The storage for a path or URL, as Lightning's own path handling understands it. Nothing is read or written.

    Args:
        url: A path, or a URL: ``file://``, ``s3://``, ``gs://``, ``az://``, ``abfs://``, or another one that fsspec
            knows. A relative path is made absolute now, so that a later change of the working directory does not move
            the snapshot.
        storage_options: Options of the storage, by the names of obstore or of fsspec. A local disk has only
            ``auto_mkdir``, which is always on.

    Raises:
        NotASnapshotError: The path is empty or cannot be the path of anything.
        UnsupportedFeatureError: The place or an option is not known, or a package is missing that it needs.
    """
    text = os.fspath(url)
    protocol, path = split_protocol(text)
    if not path or "\0" in path:
        msg = f"expected the path of a snapshot, found {text!r}"
        raise NotASnapshotError(msg)
    if protocol is None and path.lower().startswith("registry:"):
        msg = f"{text}: the model registry of Lightning needs the package litmodels; install it, or give a path"
        raise UnsupportedFeatureError(msg)
    if protocol is None and _MANGLED.match(text):
        url = text.replace(":/", "://", 1)
        msg = f"expected a URL like {url!r}, found {text!r}; pathlib cannot hold URLs, pass text"
        raise NotASnapshotError(msg)
    if protocol not in _LOCAL_PROTOCOLS:
        return _open_remote(text, storage_options)
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


def _open_remote(url: _Path, storage_options: _Options) -> RemoteStorage:
    text = os.fspath(url)
    protocol, path = split_protocol(text)
    if protocol not in SCHEMES:
        return RemoteStorage(*open_fsspec(text, storage_options or {}), text)
    bucket, _, folder = path.partition("/")
    key = posixpath.normpath(f"/{folder}").lstrip("/")
    return RemoteStorage(open_bucket(protocol, bucket, storage_options or {}), key, text)
