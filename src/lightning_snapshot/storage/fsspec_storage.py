"""Everything else that fsspec reaches: right, but not made to be fast."""

import errno
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from typing import Any

import fsspec

from lightning_snapshot.errors import StorageError, StoragePermissionError, UnsupportedFeatureError
from lightning_snapshot.storage.buckets import Item
from lightning_snapshot.storage.censor import Censor

__all__ = ["FsspecBucket", "open_fsspec"]

_MIB = 1024 * 1024
# What file systems call the time of the last change.
_TIMES = ("LastModified", "last_modified", "mtime", "modified", "updated", "created")


class FsspecBucket:
    """See `lightning_snapshot.storage.buckets.Bucket`. Keys are paths of the file system.

    Args:
        file_system: As fsspec has them.
        name: The place, for messages.
        root: Folders in it that become empty are removed, and so is this one.
        censor: Takes secrets out of messages.
    """

    part_bytes = 8 * _MIB
    concurrency = 4

    def __init__(self, file_system: Any, name: str, root: str, censor: Censor) -> None:
        self._fs = file_system
        self._root = root
        self._censor = censor
        self.name = name

    def get(self, key: str, max_bytes: int) -> bytes:
        """The whole file."""
        size_bytes = self.head(key).size_bytes
        if size_bytes > max_bytes:
            raise StorageError(errno.EFBIG, f"expected at most {max_bytes} bytes, found {size_bytes}")
        with self._errors("read", key):
            return bytes(self._fs.cat_file(key))

    def read_into(self, key: str, offset_bytes: int, buffer: memoryview) -> int:
        """Fill a buffer from a file."""
        with self._errors("read", key):
            found = self._fs.cat_file(key, start=offset_bytes, end=offset_bytes + len(buffer))
        buffer[: len(found)] = found
        return len(found)

    def head(self, key: str) -> Item:
        """What is known of a file."""
        with self._errors("look for", key):
            self._fs.invalidate_cache()
            info = self._fs.info(key)
            if info["type"] != "file":
                raise FileNotFoundError(key)
        return self._item(info)

    def walk(self, folder: str) -> list[Item]:
        """All files below a folder."""
        with self._errors("list", folder):
            self._fs.invalidate_cache()
            if not self._fs.isdir(folder):
                return []
            return [self._item(info) for info in self._fs.find(folder, detail=True).values()]

    def list_folder(self, folder: str) -> tuple[list[str], list[Item]]:
        """What is directly in a folder."""
        with self._errors("list", folder):
            self._fs.invalidate_cache()
            if not self._fs.isdir(folder):
                return [], []
            infos = self._fs.ls(folder, detail=True)
            # Empty folders are nothing, as in a bucket.
            folders = [info["name"].rstrip("/") for info in infos if info["type"] == "directory"]
            names = [path.rpartition("/")[2] for path in folders if self._fs.find(path)]
        return names, [self._item(info) for info in infos if info["type"] == "file"]

    def put(self, key: str, content: bytes | bytearray) -> None:
        """Write a file."""
        with self._errors("write", key):
            self._make_parent(key)
            self._fs.pipe_file(key, bytes(content))

    def upload(self, key: str, size_bytes: int, blocks: Iterator[bytes]) -> None:  # noqa: ARG002  # not needed here
        """Write a file piece by piece."""
        with self._errors("upload", key):
            self._make_parent(key)
            file = self._fs.open(key, "wb")
            try:
                for block in blocks:
                    file.write(block)
                file.close()
            except BaseException:
                with suppress(Exception):
                    file.close()
                with suppress(Exception):
                    self._fs.rm_file(key)
                raise

    def copy(self, source: str, target: str) -> None:
        """Copy a file."""
        with self._errors(f"copy {source} to", target):
            self._make_parent(target)
            self._fs.cp_file(source, target)

    def delete(self, keys: Sequence[str]) -> None:
        """Remove files."""
        for key in keys:
            with self._errors("remove", key), suppress(FileNotFoundError):
                if self._fs.isfile(key):
                    self._fs.rm_file(key)
                self._remove_empty(key.rpartition("/")[0])

    def _remove_empty(self, folder: str) -> None:
        while folder.startswith(self._root) and self._fs.isdir(folder) and not self._fs.ls(folder, detail=False):
            try:
                self._fs.rmdir(folder)
            except (OSError, NotImplementedError):
                return  # where folders are only names, there is nothing to remove
            folder = folder.rpartition("/")[0]

    def _make_parent(self, key: str) -> None:
        self._fs.makedirs(key.rpartition("/")[0], exist_ok=True)

    def _item(self, info: Mapping[str, Any]) -> Item:
        time = next((info[name] for name in _TIMES if info.get(name)), None)
        if isinstance(time, (int, float)):
            time = datetime.fromtimestamp(time, timezone.utc)
        if not isinstance(time, datetime):
            time = None
        elif time.tzinfo is None:
            time = time.replace(tzinfo=timezone.utc)
        return Item(info["name"], info["size"], time)

    @contextmanager
    def _errors(self, operation: str, key: str) -> Iterator[None]:
        try:
            yield
        except (FileNotFoundError, StorageError):
            raise
        except PermissionError as error:
            raise StoragePermissionError(errno.EACCES, self._message(operation, key, error)) from None
        except Exception as error:  # noqa: BLE001  # each file system has errors of its own
            raise StorageError(
                getattr(error, "errno", None) or errno.EIO, self._message(operation, key, error)
            ) from None

    def _message(self, operation: str, key: str, error: Exception) -> str:
        return f"could not {operation} {key} in {self.name}: {type(error).__name__}: {self._censor(error)}"


def open_fsspec(url: str, options: Mapping[str, Any]) -> tuple[FsspecBucket, str]:
    """The file system of a URL, which fsspec keeps for the next time, and the path in it.

    Raises:
        UnsupportedFeatureError: fsspec knows no such file system, or its package is not installed.
    """
    protocol = url.partition("://")[0]
    try:
        file_system, path = fsspec.core.url_to_fs(url, **options)
    except (ImportError, TypeError, ValueError) as error:
        msg = f"{url}: fsspec cannot reach this place: {Censor(options)(error)}"
        raise UnsupportedFeatureError(msg) from None
    root = path.rstrip("/")
    return FsspecBucket(file_system, f"{protocol}://", root, Censor(options)), root
