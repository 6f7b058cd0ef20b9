"""Entries → nested state again, top-down: the inverse of `lightning_snapshot.tree`."""

import base64
import struct
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lightning_snapshot.errors import MetadataError
from lightning_snapshot.manifest import (
    ContainerNote,
    DictEntry,
    Entry,
    ListEntry,
    OrderedDictEntry,
    PrimitiveEntry,
    RankNotes,
)
from lightning_snapshot.tree import ALIAS_ROOT, MAX_DEPTH, decode_key, encode_key

__all__ = ["StateTree", "read_primitive"]

# More than any list can have; Python refuses to read numbers of more than 4300.
_MAX_INDEX_DIGITS = 20


def read_primitive(path: str, entry: PrimitiveEntry) -> int | str | bool | bytes | float:
    """The value of an inline entry (FORMAT 4.3).

    Raises:
        MetadataError: The text is no value of that type.
    """
    text = entry.serialized_value
    try:
        match entry.type:
            case "int":
                return int(text)
            case "bool":
                return {"True": True, "False": False}[text]
            case "float":
                (number,) = struct.unpack("<d", base64.b64decode(text, validate=True))
                return float(number)
            case "bytes":
                return base64.b64decode(text)
            case _:
                return text
    except (ValueError, KeyError, struct.error) as error:
        msg = f"{path}: expected the text of a {entry.type}, found {text[:80]!r}"
        raise MetadataError(msg) from error


class StateTree:
    """The entries of one rank's view, put together again top-down.

    Args:
        entries: Logical path → entry.
        notes: What the extension says about them; ``None`` in snapshots of torchsnapshot.
    """

    def __init__(self, entries: Mapping[str, Entry], notes: RankNotes | None) -> None:
        self._entries = entries
        self._notes = notes or RankNotes()
        self._is_own = notes is not None
        self._list_children: dict[str, list[tuple[int, str]]] = {}
        for path in (*entries, *self._notes.moved):
            parent, _, token = path.rpartition("/")
            if _is_index(token) and isinstance(entries.get(parent), ListEntry):
                self._list_children.setdefault(parent, []).append((int(token), path))
        for children in self._list_children.values():
            children.sort()

    @property
    def roots(self) -> dict[str, str]:
        """Top-level key → logical path of its entry, in order."""
        if self._notes.roots:
            return {key: encode_key(key) for key in self._notes.roots}
        # Before percent-encoding a key could hold a slash: a root is what has no entry above it.
        return {decode_key(path): path for path in self._entries if not self._has_ancestor(path)}

    def leaf_paths(self, paths: Iterable[str], *, with_root_attributes: bool = False) -> list[str]:
        """Paths of all tensors and objects at or below ``paths``, in order, each shared one only once.

        Args:
            paths: Logical paths of entries.
            with_root_attributes: Include what `root_container` needs.
        """
        found = [self._existing(self.note("").extra)] if with_root_attributes and self.note("").extra else []
        visited: set[str] = set()
        pending = list(paths)[::-1]
        while pending:
            path = self.locate(pending.pop())
            if path in visited or self._notes.same.get(path) in visited:
                continue
            visited.add(path)
            note = self._notes.containers.get(path)
            if note is not None and note.extra:
                found.append(self._existing(note.extra))
            entry = self._entries[path]
            if isinstance(entry, (DictEntry, OrderedDictEntry, ListEntry)):
                pending.extend(child for _, child in reversed(self.children(path)))
            elif not isinstance(entry, PrimitiveEntry):
                found.append(path)
        return found

    def build(
        self, paths: Iterable[str], leaf: Callable[[str], Any], resolve_class: Callable[[str, str], Any]
    ) -> list[Any]:
        """The values at ``paths``, with objects that were shared among them shared again.

        Args:
            paths: Logical paths of entries.
            leaf: Gives the value of a leaf, by path.
            resolve_class: Gives a class, by path and ``module:qualified name``; asked for named tuples only.

        Raises:
            MetadataError: Entries are missing or contradict each other.
        """
        builder = _Builder(self, leaf, resolve_class)
        return [builder.value(path) for path in paths]

    def root_container(self, items: dict[str, Any], leaf: Callable[[str], Any]) -> dict[str, Any]:
        """``items`` in the container that the whole state was."""
        note = self._notes.containers.get("", ContainerNote())
        container = OrderedDict(items) if note.kind == "OrderedDict" else items
        return _finish_dictionary("", container, note, leaf)

    def children(self, path: str) -> list[tuple[str | int, str]]:
        """Key or index and path of the items of a container that have an entry, in order.

        Raises:
            MetadataError: A snapshot of this project lists a key that has no entry.
        """
        entry = self._entries[path]
        if isinstance(entry, ListEntry):
            return list(self._list_children.get(path, ()))
        found: list[tuple[str | int, str]] = []
        for key in entry.keys if isinstance(entry, (DictEntry, OrderedDictEntry)) else ():
            child = f"{path}/{encode_key(str(key))}"
            if child not in self._entries and child not in self._notes.moved:
                child = f"{path}/{key}"  # written before percent-encoding (FORMAT 13)
            if child in self._entries or child in self._notes.moved:
                found.append((key, child))
            elif self._is_own:
                msg = f"{path}: the key {key!r} is listed but has no entry; the metadata is damaged"
                raise MetadataError(msg)
        return found

    def entry(self, path: str) -> Entry:
        """The entry at a path that ``locate`` gave."""
        return self._entries[path]

    def note(self, path: str) -> ContainerNote:
        """The note on a container; an empty one if there is none."""
        return self._notes.containers.get(path) or ContainerNote()

    def first_path(self, path: str) -> str:
        """Where the very same object was met first; ``path`` itself if it is the only place."""
        return self._notes.same.get(path, path)

    def locate(self, path: str) -> str:
        """The path at which the entry of ``path`` really is: itself, or its alias."""
        return self._existing(self._notes.moved.get(path, path))

    def _existing(self, path: str) -> str:
        if path not in self._entries:
            msg = f"{path}: expected an entry, found none; the metadata is damaged"
            raise MetadataError(msg)
        return path

    def _has_ancestor(self, path: str) -> bool:
        parent = path.rpartition("/")[0]
        while parent:
            if parent in self._entries:
                return True
            parent = parent.rpartition("/")[0]
        return path.partition("/")[0] == ALIAS_ROOT


class _Builder:
    def __init__(self, tree: StateTree, leaf: Callable[[str], Any], resolve_class: Callable[[str, str], Any]) -> None:
        self._tree = tree
        self._leaf = leaf
        self._resolve_class = resolve_class
        self._built: dict[str, Any] = {}
        self._open: set[str] = set()

    def value(self, path: str) -> Any:
        path = self._tree.locate(path)
        first = self._tree.first_path(path)
        if first in self._built:
            return self._built[first]
        if not self._open.isdisjoint((path, first)):
            msg = f"{path}: expected a value of its own, found one that contains itself; the metadata is damaged"
            raise MetadataError(msg)
        if len(self._open) > MAX_DEPTH:
            msg = f"{path[:200]}…: expected at most {MAX_DEPTH} levels of nesting, found more"
            raise MetadataError(msg)
        entry = self._tree.entry(path)
        if isinstance(entry, PrimitiveEntry):
            value = read_primitive(path, entry)
        elif isinstance(entry, (DictEntry, OrderedDictEntry, ListEntry)):
            self._open.add(path)
            items = [(key, self.value(child)) for key, child in self._tree.children(path)]
            self._open.discard(path)
            value = self._container(path, entry, items)
        else:
            value = self._leaf(path)
        self._built[path] = value
        return value

    def _container(self, path: str, entry: Entry, items: list[tuple[str | int, Any]]) -> Any:
        note = self._tree.note(path)
        if isinstance(entry, ListEntry):
            values = [value for _, value in items]
            if note.kind == "items":
                return self._odd_dictionary(path, values, note)
            if note.kind == "tuple":
                return tuple(values)
            if note.kind == "namedtuple":
                return self._named_tuple(path, values, note)
            return values
        container = OrderedDict(items) if isinstance(entry, OrderedDictEntry) else dict(items)
        return _finish_dictionary(path, container, note, self._leaf)

    def _named_tuple(self, path: str, values: list[Any], note: ContainerNote) -> Any:
        kind = self._resolve_class(path, note.class_name)
        fields = getattr(kind, "_fields", None)
        if not isinstance(fields, tuple) or len(fields) != len(values):
            found = "no named tuple" if fields is None else f"the fields {fields}"
            msg = f"{path}: expected {note.class_name} to be a named tuple of {len(values)} fields, found {found}"
            raise MetadataError(msg)
        return kind._make(values)

    def _odd_dictionary(self, path: str, values: list[Any], note: ContainerNote) -> Any:
        keys = values[0] if values else None
        if not isinstance(keys, tuple) or len(keys) != len(values) - 1:
            msg = f"{path}: expected a tuple of keys followed by as many values, found {len(values)} items"
            raise MetadataError(msg)
        try:
            items = dict(zip(keys, values[1:], strict=True))
        except TypeError as error:
            msg = f"{path}: expected keys that a dictionary can have, found some that it cannot: {error}"
            raise MetadataError(msg) from error
        if note.class_name == "collections:OrderedDict":
            items = OrderedDict(items)
        kind = "defaultdict" if note.class_name == "collections:defaultdict" else ""
        return _finish_dictionary(path, items, ContainerNote(kind, extra=note.extra), self._leaf)


def _finish_dictionary(
    path: str, items: dict[Any, Any], note: ContainerNote, leaf: Callable[[str], Any]
) -> dict[Any, Any]:
    if note.kind == "defaultdict":
        factory = leaf(note.extra) if note.extra else None
        if factory is not None and not callable(factory):
            msg = f"{path}: expected the factory of a defaultdict, found {type(factory).__name__}"
            raise MetadataError(msg)
        return defaultdict(factory, items)
    if note.extra:
        attributes = leaf(note.extra)
        if not isinstance(attributes, dict) or not isinstance(items, OrderedDict):
            msg = f"{path}: expected the attributes of an OrderedDict, found {type(attributes).__name__}"
            raise MetadataError(msg)
        vars(items).update(attributes)
    return items


def _is_index(token: str) -> bool:
    return token.isdecimal() and token.isascii() and len(token) < _MAX_INDEX_DIGITS
