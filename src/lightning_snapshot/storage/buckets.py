"""What `lightning_snapshot.storage.remote` needs from a place without folders: objects with keys."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol

__all__ = ["Bucket", "Item"]


@dataclass(frozen=True, slots=True)
class Item:
    """An object.

    Attributes:
        key: Its name in the bucket.
        size_bytes: Its length.
        modified: When it was written; ``None`` if the place cannot tell.
    """

    key: str
    size_bytes: int
    modified: datetime | None


class Bucket(Protocol):
    """A bucket, container or file system. Any thread may use it.

    All methods raise `StorageError` if the place fails; no message holds a secret. A request that fails for a reason
    that may pass has then been tried several times.
    """

    @property
    def name(self) -> str:
        """The place, for messages: ``s3://bucket``."""
        ...

    @property
    def part_bytes(self) -> int:
        """Objects that are larger are uploaded in parts of this size."""
        ...

    @property
    def concurrency(self) -> int:
        """How many requests under way at once make the place as fast as it can be."""
        ...

    def get(self, key: str, max_bytes: int) -> bytes:
        """The whole object.

        Raises:
            FileNotFoundError: There is none.
            StorageError: Also if it is larger than ``max_bytes``; ``errno`` is then ``EFBIG``.
        """
        ...

    def read_into(self, key: str, offset_bytes: int, buffer: memoryview) -> int:
        """Fill a buffer of bytes from an object; tells how many bytes there were.

        Raises:
            FileNotFoundError: There is none.
        """
        ...

    def head(self, key: str) -> Item:
        """What is known of an object.

        Raises:
            FileNotFoundError: There is none.
        """
        ...

    def walk(self, folder: str) -> list[Item]:
        """All objects whose keys begin with ``folder/``."""
        ...

    def list_folder(self, folder: str) -> tuple[list[str], list[Item]]:
        """Names of what looks like folders in a folder, and the objects directly in it."""
        ...

    def put(self, key: str, content: bytes | bytearray) -> None:
        """Write an object in one step, over one that is there."""
        ...

    def upload(self, key: str, size_bytes: int, blocks: Iterator[bytes]) -> None:
        """Write a large object, in several parts at once.

        When ``blocks`` raises, nothing is left of it, and that error is raised.
        """
        ...

    def copy(self, source: str, target: str) -> None:
        """Copy an object without moving its content through this machine.

        Raises:
            FileNotFoundError: There is none.
        """
        ...

    def delete(self, keys: Sequence[str]) -> None:
        """Remove objects. Those that are not there are no error."""
        ...
