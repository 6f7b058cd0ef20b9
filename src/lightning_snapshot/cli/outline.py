"""The tree of values in a snapshot, told from its metadata."""

import base64
from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite
from typing import Any

from lightning_snapshot.cli.listing import file_size
from lightning_snapshot.errors import EntryNotFoundError, MetadataError
from lightning_snapshot.manifest import (
    DictEntry,
    Entry,
    ListEntry,
    Manifest,
    ObjectEntry,
    PrimitiveEntry,
    RankNotes,
    TensorNote,
)
from lightning_snapshot.read_plan import TensorLike, stored_tensor
from lightning_snapshot.rebuild import StateTree, read_primitive
from lightning_snapshot.storage import Storage
from lightning_snapshot.tree import encode_key
from lightning_snapshot.view import stands_on_rank_0, view_of_rank

__all__ = ["Node", "Outline"]

# Where damaged or hostile metadata would go on and on; nothing deeper can be saved or loaded.
_MAX_DEPTH = 200


@dataclass(frozen=True, slots=True)
class Node:
    """A value.

    Attributes:
        key: Its key or index in what it belongs to.
        path: Logical path.
        kind: ``"tensor"``, ``"parameter"``, the type of a primitive or container, or the class of an object.
        dtype: Of a tensor.
        shape: Of a tensor.
        size_bytes: Of what is in files; ``None`` if that cannot be known.
        value: Of a primitive.
        items: Of a container; ``None`` for everything else.
    """

    key: str | int
    path: str
    kind: str
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    size_bytes: int | None = 0
    value: int | str | bool | bytes | float | None = None
    items: "tuple[Node, ...] | None" = None

    @property
    def tensors(self) -> int:
        """How many tensors there are at and below it."""
        return (self.shape is not None) + sum(item.tensors for item in self.items or ())

    def to_json(self) -> dict[str, Any]:
        """The node as what JSON can express; fields that do not apply are left out."""
        value: Any = self.value
        if isinstance(value, bytes):
            value = base64.b64encode(value).decode()
        elif isinstance(value, float) and not isfinite(value):
            value = str(value)
        fields = {
            "key": self.key,
            "path": self.path,
            "kind": self.kind,
            "dtype": self.dtype,
            "shape": self.shape,
            "size_bytes": self.size_bytes,
            "value": value,
        }
        found = {name: field for name, field in fields.items() if field is not None}
        return found if self.items is None else found | {"items": [item.to_json() for item in self.items]}


class Outline:
    """What a rank sees of a snapshot.

    Args:
        storage: The snapshot.
        manifest: Its metadata.
        rank: One of those that saved it.

    Raises:
        EntryNotFoundError: There is no such rank.
        MetadataError: The metadata contradicts itself.
    """

    def __init__(self, storage: Storage, manifest: Manifest, rank: int) -> None:
        if not 0 <= rank < manifest.world_size:
            msg = f"{storage.url}: expected a rank from 0 to {manifest.world_size - 1}, found {rank}"
            raise EntryNotFoundError(msg)
        self._storage = storage
        self._extension = manifest.extension
        self._view = view_of_rank(manifest, rank)
        self._notes = RankNotes()
        if manifest.extension is not None:
            self._notes = manifest.extension.ranks.get(str(rank), RankNotes())
        entries = {path: located.entry for path, located in self._view.items()}
        self._tree = StateTree(entries, None if manifest.extension is None else self._notes)
        self._visited: set[str] = set()
        # Such a rank has notes on its own top-level keys only; for the others, rank 0's count.
        self._rank_0 = Outline(storage, manifest, 0) if stands_on_rank_0(manifest, rank) else None

    @property
    def roots(self) -> dict[str, str]:
        """Top-level key → logical path."""
        if self._rank_0 is None:
            return self._tree.roots
        return self._rank_0.roots | {key: encode_key(key) for key in self._notes.roots}

    def whole(self) -> Node:
        """Everything.

        Raises:
            MetadataError: The metadata contradicts itself.
        """
        items = tuple(self.at(path, key) for key, path in self.roots.items())
        return Node("", "", "snapshot", size_bytes=_sum(item.size_bytes for item in items), items=items)

    def at(self, path: str, key: str | None = None) -> Node:
        """One value and what is below it.

        Args:
            path: Logical path.
            key: What it is called; by default the last part of the path.

        Raises:
            EntryNotFoundError: There is none.
            MetadataError: The metadata contradicts itself.
        """
        own = {encode_key(root) for root in self._notes.roots}
        if self._rank_0 is not None and path.partition("/")[0] not in own:
            return self._rank_0.at(path, key)
        if path not in self._view and path not in self._notes.moved:
            msg = f"{self._storage.url}: expected a value {path!r}, found none; top-level keys are {sorted(self.roots)}"
            raise EntryNotFoundError(msg)
        return self._node(path.rpartition("/")[2] if key is None else key, path)

    def _node(self, key: str | int, path: str, depth: int = 1) -> Node:
        place = self._tree.locate(path)
        entry = self._tree.entry(place)
        if isinstance(entry, PrimitiveEntry):
            return Node(key, path, entry.type, value=read_primitive(path, entry))
        if isinstance(entry, ObjectEntry):
            return Node(
                key, path, entry.obj_type.removeprefix("builtins."), size_bytes=self._piece_size(entry.location, None)
            )
        if isinstance(entry, TensorLike):
            return self._tensor(key, path, place, entry)
        # Several paths that lead to one place would have a damaged tree grow without end.
        if place in self._visited:
            return Node(key, path, f"same as {place}")
        self._visited.add(place)
        if depth > _MAX_DEPTH:
            msg = f"{path[:200]}…: expected at most {_MAX_DEPTH} levels of nesting, found more"
            raise MetadataError(msg)
        items = tuple([self._node(item, child, depth + 1) for item, child in self._tree.children(place)])
        size_bytes = _sum(item.size_bytes for item in items)
        return Node(key, path, self._container_kind(place, entry), size_bytes=size_bytes, items=items)

    def _container_kind(self, place: str, entry: Entry) -> str:
        note = self._tree.note(place)
        if note.kind in {"namedtuple", "items"} and note.class_name:
            return note.class_name.replace(":", ".")
        own = "list" if isinstance(entry, ListEntry) else "dict" if isinstance(entry, DictEntry) else "OrderedDict"
        return {"items": "dict"}.get(note.kind, note.kind) or own

    def _tensor(self, key: str | int, path: str, place: str, entry: TensorLike) -> Node:
        tensor = stored_tensor(path, entry)
        rank, _, logical_path = self._view[place].path.partition("/")
        notes = self._extension.ranks.get(rank, RankNotes()) if self._extension else RankNotes()
        note = notes.tensors.get(logical_path, TensorNote())
        return Node(
            key,
            path,
            "parameter" if note.parameter else "tensor",
            dtype=(note.dtype or tensor.dtype).removeprefix("torch.") or None,
            shape=tensor.shape,
            size_bytes=_sum(self._piece_size(piece.location, piece.byte_range) for piece in tensor.pieces),
        )

    def _piece_size(self, location: str, byte_range: tuple[int, int] | None) -> int | None:
        if byte_range is not None:
            return byte_range[1] - byte_range[0]
        record = self._extension.files.get(location) if self._extension else None
        return file_size(self._storage, location) if record is None else record.size_bytes


def _sum(sizes: Iterable[int | None]) -> int | None:
    total = 0
    for size in sizes:
        if size is None:
            return None
        total += size
    return total
