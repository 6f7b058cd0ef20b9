"""One process's end of the key-value store through which the ranks of a process group talk.

No call waits for a key that is not there: a store that waits lets no other thread in, for as long as half an hour.
"""

import hashlib
import struct
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from torch import distributed

from lightning_snapshot.errors import RankError

__all__ = ["Mailbox", "Store", "store_of"]

_PIECE_BYTES = 4 << 20  # the server of a TCPStore hangs up on values above 8 MiB
_READ_AT_ONCE = 16  # bounds what the store answers in one message
_PIECES = struct.Struct(">I")


class Store(Protocol):
    """What this module needs of ``torch.distributed``'s stores: ``TCPStore``, ``HashStore``, ``FileStore``."""

    def add(self, key: str, step: int, /) -> int:
        """The new sum; a counter begins at 0."""
        ...

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys have values."""
        ...

    def compare_set(self, key: str, expected: str, value: str, /) -> bytes:
        """Set a value in place of the expected one, or where there is none; the value afterwards."""
        ...

    def delete_key(self, key: str, /) -> bool:
        """Delete a key, if it is there."""
        ...

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        """The values of keys; waits for those that are missing."""
        ...

    def set(self, key: str, value: bytes, /) -> None:
        """Set a value."""
        ...


@contextmanager
def _reaching_store() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        msg = (
            "the store of the process group cannot be reached any more; it lives in the process of rank 0 or of its "
            f"launcher, see how that ended: {error}"
        )
        raise RankError(msg) from error


class Mailbox:
    """Puts values of any size into a store, takes them out, and cleans up. Any thread may call any method.

    Every method raises `RankError` if the store cannot be reached.

    Args:
        store: Shared by all ranks of the group, and by nobody else: a ``PrefixStore`` does.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._written: list[str] = []

    @_reaching_store()
    def has(self, keys: Iterable[str]) -> bool:
        """Whether all these keys have a value; one message, however many they are."""
        return self._store.check(list(keys))

    @_reaching_store()
    def put(self, key: str, value: bytes) -> None:
        """Give a key its value. Whoever sees the key can take the whole value."""
        pieces = [value[start : start + _PIECE_BYTES] for start in range(0, len(value), _PIECE_BYTES)] or [b""]
        for number, piece in enumerate(pieces[1:]):
            self._set(f"{key}/{number}", piece)
        self._set(key, _PIECES.pack(len(pieces) - 1) + pieces[0])

    @_reaching_store()
    def take(self, keys: Sequence[str]) -> list[bytes]:
        """The values of keys that were put, in the order of the keys."""
        heads: list[bytes] = []
        for start in range(0, len(keys), _READ_AT_ONCE):
            heads += self._store.multi_get(list(keys[start : start + _READ_AT_ONCE]))
        return [self._assemble(key, head) for key, head in zip(keys, heads, strict=True)]

    @_reaching_store()
    def put_first(self, key: str, value: str) -> None:
        """Give a key its value unless it has one; `read` reads it."""
        self._written.append(key)
        self._store.compare_set(key, "", value)

    @_reaching_store()
    def read(self, key: str) -> bytes:
        """The value of a key that was `put_first`."""
        return self._store.multi_get([key])[0]

    @_reaching_store()
    def count(self, key: str, step: int = 0, *, keep: bool = True) -> int:
        """Add to a counter that starts at 0.

        Args:
            key: The counter's.
            step: What to add.
            keep: Whether it outlives `clean`.

        Returns:
            The sum.
        """
        if not keep:
            self._written.append(key)
        return self._store.add(key, step)

    @_reaching_store()
    def clean(self) -> None:
        """Delete all that this mailbox has put, once nobody will take it any more."""
        while self._written:
            self._store.delete_key(self._written.pop())

    def _set(self, key: str, value: bytes) -> None:
        self._written.append(key)
        self._store.set(key, value)

    def _assemble(self, key: str, head: bytes) -> bytes:
        (more,) = _PIECES.unpack_from(head)
        rest = [self._store.multi_get([f"{key}/{number}"])[0] for number in range(more)]
        return b"".join([head[_PIECES.size :], *rest])


@_reaching_store()
def store_of(pg: "distributed.ProcessGroup", channel: str = "") -> Store:
    """The part of the default store that belongs to a process group, over a connection of its own.

    Training waits in the store as well, for instance while ranks find each other for their first collective. Sharing
    its connection, a save in the background would stand still until the slowest rank gets there.
    """
    c10d: Any = distributed  # its types lack half of this
    store = c10d.distributed_c10d._get_default_store()  # noqa: SLF001 - torch has no public way to it
    server = store
    while isinstance(server, c10d.PrefixStore):
        server = server.underlying_store
    if isinstance(server, c10d.TCPStore):
        # The server may outlive this job and serve the next one, which has another prefix. torch 2.6 cannot say which.
        token = store.compare_set("lightning_snapshot", "", uuid.uuid4().hex).decode()
        client = c10d.TCPStore(
            server.host, server.port, is_master=False, wait_for_workers=False, timeout=server.timeout
        )
        store = c10d.PrefixStore(token, client)
    # Groups that are split off together have one name, but never the same ranks.
    ranks = hashlib.sha256(str(distributed.get_process_group_ranks(pg)).encode()).hexdigest()[:16]
    prefixed: Store = c10d.PrefixStore(f"lightning_snapshot/{pg.group_name}/{ranks}/{channel}", store)
    return prefixed
