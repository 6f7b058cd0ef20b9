"""S3, Google Cloud Storage and Azure, through obstore."""

import errno
import os
import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from lightning_snapshot.errors import StorageError, StoragePermissionError, UnsupportedFeatureError
from lightning_snapshot.storage.buckets import Item
from lightning_snapshot.storage.censor import Censor
from lightning_snapshot.storage.cloud_options import SCHEMES, Settings, settings_for

__all__ = ["SCHEMES", "CloudBucket", "open_bucket"]

# What the stores say in the text of an answer, where obstore does not tell it apart.
_NO_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound|specified bucket does not exist", re.IGNORECASE)
_NO_ENTRY = re.compile(
    r"ExpiredToken|InvalidToken|TokenRefreshRequired|InvalidAccessKeyId|SignatureDoesNotMatch|AuthenticationFailed"
    r"|AccessDenied|NoAuthenticationInformation|InvalidAuthenticationInfo|status code: 40[13]|\b40[13] (Unauth|Forbid)"
)
_WRITES = ("write", "upload")
# Only what obstore has not tried again itself.
_BROKEN_CONNECTION = re.compile(r"HTTP error: (?!.*after \d+ retries)", re.DOTALL)
_MAX_TRIES = 5
_BACKOFF_SECONDS = 0.1
_MAX_PARTS = 9000
_MIB = 1024 * 1024

_lock = threading.Lock()
_buckets: dict[tuple[Any, ...], "CloudBucket"] = {}
_process: list[int] = []


class CloudBucket:
    """See `lightning_snapshot.storage.buckets.Bucket`.

    Args:
        store: One of obstore's.
        name: The place, for messages.
        censor: Takes secrets out of messages.
        part_bytes: Size of the parts of an upload.
        concurrency: Requests under way at once, for each file.
    """

    def __init__(
        self, store: Any, name: str, censor: Censor, *, part_bytes: int = 6 * _MIB, concurrency: int = 8
    ) -> None:
        self._obstore = _import_obstore(name)
        self._store = store
        self._censor = censor
        self.name = name
        self.part_bytes = part_bytes
        self.concurrency = concurrency

    def get(self, key: str, max_bytes: int) -> bytes:
        """The whole object."""
        with self._errors("read", key):
            result = self._obstore.get(self._store, key)
            size_bytes = result.meta["size"]
            if size_bytes <= max_bytes:
                return bytes(result.bytes())
        raise StorageError(errno.EFBIG, f"expected at most {max_bytes} bytes, found {size_bytes}")

    def read_into(self, key: str, offset_bytes: int, buffer: memoryview) -> int:
        """Fill a buffer from an object."""
        with self._errors(f"read {len(buffer)} bytes at offset {offset_bytes} of", key):
            found = memoryview(
                self._obstore.get_range(self._store, key, start=offset_bytes, end=offset_bytes + len(buffer))
            )
        buffer[: len(found)] = found
        return len(found)

    def head(self, key: str) -> Item:
        """What is known of an object."""
        with self._errors("look for", key):
            return _item(self._obstore.head(self._store, key))

    def walk(self, folder: str) -> list[Item]:
        """All objects below a folder."""
        found = self._persistently("list", folder, lambda: self._obstore.list(self._store, folder or None).collect())
        return [_item(each) for each in found]

    def list_folder(self, folder: str) -> tuple[list[str], list[Item]]:
        """What is directly in a folder."""
        found = self._persistently(
            "list", folder, lambda: self._obstore.list_with_delimiter(self._store, folder or None)
        )
        names = [prefix.rstrip("/").rpartition("/")[2] for prefix in found["common_prefixes"]]
        return names, [_item(each) for each in found["objects"]]

    def put(self, key: str, content: bytes | bytearray) -> None:
        """Write an object in one step."""
        with self._errors("write", key):
            self._obstore.put(self._store, key, content, use_multipart=False)

    def upload(self, key: str, size_bytes: int, blocks: Iterator[bytes]) -> None:
        """Write a large object in parts."""
        part_bytes = max(self.part_bytes, -(-size_bytes // _MAX_PARTS // _MIB) * _MIB)
        with self._errors("upload", key):
            self._obstore.put(
                self._store,
                key,
                blocks,
                use_multipart=True,
                chunk_size=part_bytes,
                max_concurrency=self.concurrency,
            )

    def copy(self, source: str, target: str) -> None:
        """Copy an object inside the store."""
        with self._errors(f"copy {source} to", target):
            self._obstore.copy(self._store, source, target, overwrite=True)

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects."""
        if not keys:
            return
        what = keys[0] if len(keys) == 1 else f"{len(keys)} objects like {keys[0]}"
        try:
            self._persistently("remove", what, lambda: self._obstore.delete(self._store, list(keys)))
        except FileNotFoundError:
            for key in keys if len(keys) > 1 else ():
                self.delete([key])

    def _persistently(self, operation: str, key: str, action: Callable[[], Any]) -> Any:
        """Do what may be done twice, again and again if the connection breaks: obstore itself does so for the rest."""
        for attempt in range(_MAX_TRIES):
            with self._errors(operation, key):
                try:
                    return action()
                except self._obstore.exceptions.BaseError as error:
                    if attempt == _MAX_TRIES - 1 or not _BROKEN_CONNECTION.search(str(error)):
                        raise
            time.sleep(_BACKOFF_SECONDS * 2**attempt * random.uniform(0.5, 1.5))  # noqa: S311  # no secret
        return None

    @contextmanager
    def _errors(self, operation: str, key: str) -> Iterator[None]:
        """Turn errors of obstore into ours, without their text, which may hold secrets, and without their traceback."""
        _check_process(self.name)
        try:
            yield
        except (self._obstore.exceptions.BaseError, OSError) as error:
            raise self._translated(operation, key, error) from None

    def _translated(self, operation: str, key: str, error: Exception) -> OSError:
        text = str(error)
        place = f"could not {operation} {self.name}/{key}"
        names = {cls.__name__ for cls in type(error).__mro__}
        is_absent = bool(names & {"FileNotFoundError", "NotFoundError"})
        if _NO_BUCKET.search(text) or (is_absent and operation in _WRITES):
            return StorageError(errno.ENOENT, f"{place}: there is no bucket or container of that name")
        if is_absent:
            return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), f"{self.name}/{key}")
        reason = self._censor(text)
        if names & {"PermissionError", "PermissionDeniedError", "UnauthenticatedError"} or _NO_ENTRY.search(text):
            msg = f"{place}: the store refuses the credentials, or they may not do this, or have expired: {reason}"
            return StoragePermissionError(errno.EACCES, msg)
        return StorageError(errno.EIO, f"{place}: {reason}")


def _item(meta: Mapping[str, Any]) -> Item:
    return Item(meta["path"], meta["size"], meta["last_modified"])


def _import_obstore(url: str) -> Any:
    # Not before it is needed: whoever saves to a disk may not have it, and does not wait for it.
    try:
        module = import_module("obstore")
        import_module("obstore.store")
        import_module("obstore.exceptions")
    except ImportError as error:
        msg = (
            f"{url}: object stores need the package obstore; install it with `pip install 'lightning-snapshot[cloud]'`"
        )
        raise UnsupportedFeatureError(msg) from error
    return module


def _check_process(url: str) -> None:
    """Refuse to hang: the threads of obstore do not live on in a process that is forked."""
    if not _process:
        _process.append(os.getpid())
    if _process[0] != os.getpid():
        msg = (
            f"{url}: this process was forked from one that has used an object store already, which cannot work; use "
            "strategy='ddp' or 'ddp_spawn', or touch no object store before the fork"
        )
        raise UnsupportedFeatureError(msg)


def open_bucket(protocol: str, bucket: str, options: Mapping[str, Any]) -> CloudBucket:
    """The one client of this process for a bucket with certain options.

    Args:
        protocol: One of `SCHEMES`.
        bucket: What stands between ``//`` and ``/`` in the URL.
        options: See `lightning_snapshot.storage.cloud_options`.

    Raises:
        UnsupportedFeatureError: An option is unknown or wrong, or obstore is not installed.
    """
    key = (protocol, bucket, _frozen(options), _relevant_environment())
    with _lock:
        if key not in _buckets:
            _buckets[key] = _connect(f"{protocol}://{bucket}", settings_for(protocol, bucket, options), Censor(options))
        return _buckets[key]


def _connect(url: str, settings: Settings, censor: Censor) -> CloudBucket:
    obstore = _import_obstore(url)
    arguments: dict[str, Any] = {
        "config": settings.config,
        "client_options": settings.client_options,
        "retry_config": settings.retry_config or None,
        "credential_provider": settings.credential_provider,
    }
    try:
        store = getattr(obstore.store, settings.kind)(settings.bucket, **arguments)
    except (obstore.exceptions.BaseError, ValueError, TypeError) as error:
        msg = f"{url}: the storage options are not understood: {censor(error)}"
        raise UnsupportedFeatureError(msg) from None
    return CloudBucket(store, url, censor, part_bytes=settings.part_bytes, concurrency=settings.max_concurrency)


def _frozen(value: Any) -> Any:
    """Something with a hash that is equal for equal options."""
    if isinstance(value, Mapping):
        return tuple(sorted((str(key), _frozen(each)) for key, each in value.items()))
    return (type(value).__name__, value if isinstance(value, (str, bytes, int, float, type(None))) else repr(value))


def _relevant_environment() -> tuple[tuple[str, str], ...]:
    prefixes = ("AWS_", "AZURE_", "GOOGLE_", "STORAGE_EMULATOR_HOST")
    return tuple(sorted((name, value) for name, value in os.environ.items() if name.startswith(prefixes)))
