"""Nested state → flat ``{logical path: leaf}`` plus the entries of its containers and primitives.

Logical paths, percent-encoding and what is flattened follow torchsnapshot (FORMAT section 3). What its format cannot
say (tuples with tensors, odd keys, shared lists, …) goes into notes for the extension entry. No torch here: the caller
says what a tensor is.
"""

import base64
import struct
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

import msgspec

from lightning_snapshot.errors import UnsupportedValueError
from lightning_snapshot.manifest import (
    ContainerNote,
    DictEntry,
    Entry,
    ListEntry,
    OrderedDictEntry,
    PrimitiveEntry,
    escaped_length,
)

__all__ = ["ALIAS_ROOT", "FlatState", "Leaf", "decode_key", "encode_key", "flatten"]

ALIAS_ROOT = "x-lightning-snapshot"
"""First part of the logical paths under which values live whose own path cannot be written."""

# torchsnapshot's YAML reader takes keys of up to 1022 characters; the rank and its slash need room too.
_MAX_PATH_CHARACTERS = 1000
# Below this length no path can be too long, even if every character is escaped to six.
_SURELY_SHORT_CHARACTERS = _MAX_PATH_CHARACTERS // 6
_MAX_INLINE_BYTES = 64 * 1024
# Python refuses to turn integers of more than 4300 decimal digits into text; this many bits stay below.
_MAX_INLINE_INT_BITS = 14_000
# Flattening takes three Python frames a level; the interpreter allows about a thousand in all.
MAX_DEPTH = 200
_INLINE_TYPES = frozenset({int, str, bool, bytes, float})
_IMMUTABLE_TYPES = frozenset({type(None), tuple, complex, frozenset, range, type}) | _INLINE_TYPES


def encode_key(key: str) -> str:
    """Escape a key for use in a logical path: ``%`` becomes ``%25``, then ``/`` becomes ``%2F``."""
    return key.replace("%", "%25").replace("/", "%2F") if "%" in key or "/" in key else key


def decode_key(token: str) -> str:
    """The inverse of `encode_key`."""
    return unquote(token) if "%" in token else token


@dataclass(frozen=True, slots=True)
class FlatState:
    """A state, taken apart. All paths are logical paths, in the order of the traversal.

    Attributes:
        items: Path → entry of a container or primitive, or the `Leaf` that has to be stored in a file.
        roots: Top-level keys.
        containers: Notes on containers; the path of the whole state is empty.
        same: Path of a value → path at which the very same object was met first.
        moved: Path of a value → alias path under which its items are.
    """

    items: "dict[str, Entry | Leaf]" = field(default_factory=dict)
    roots: list[str] = field(default_factory=list)
    containers: dict[str, ContainerNote] = field(default_factory=dict)
    same: dict[str, str] = field(default_factory=dict)
    moved: dict[str, str] = field(default_factory=dict)

    @property
    def leaves(self) -> "Iterator[tuple[str, Any]]":
        """Path and value of each leaf."""
        return ((path, item.value) for path, item in self.items.items() if isinstance(item, Leaf))


class Leaf(msgspec.Struct, frozen=True, gc=False):
    """A value that goes into a file: the caller's own object, not a copy.

    Attributes:
        value: A tensor or any other object.
        is_tensor: Which of the two.
        place: Where the value is in the caller's state, for messages.
    """

    value: Any
    is_tensor: bool
    place: str


def flatten(state: Mapping[str, Any], *, is_tensor: Callable[[Any], bool], alias_prefix: str = "") -> FlatState:
    """Take a state apart.

    Args:
        state: App key → value, nested at will.
        is_tensor: Tells tensors from other leaves.
        alias_prefix: Begins the names of aliases.

    Raises:
        UnsupportedValueError: A container contains itself or is nested too deeply, or a top-level key is no string.
    """
    return _Flattener(is_tensor, alias_prefix).run(state)


class _Flattener:
    def __init__(self, is_tensor: Callable[[Any], bool], alias_prefix: str) -> None:
        self._is_tensor = is_tensor
        self._alias_prefix = alias_prefix
        self._flat = FlatState()
        self._first_path: dict[int, str] = {}
        self._open: set[int] = set()
        self._aliases = 0

    def run(self, state: Mapping[str, Any]) -> FlatState:
        if type(state) is OrderedDict:
            extra = self._extra("", dict(vars(state))) if vars(state) else ""
            self._flat.containers[""] = ContainerNote(kind="OrderedDict", extra=extra)
        # Objects are told apart by their address, so all must live until the end, also those that ``state`` makes up.
        for key, value in list(state.items()):
            if type(key) is not str:
                msg = f"top-level keys of a snapshot must be str, found {key!r} of type {type(key).__name__}"
                raise UnsupportedValueError(msg)
            if not _is_unicode(key):
                msg = f"top-level key {key!r} holds a lone surrogate, which no text file can express; rename the key"
                raise UnsupportedValueError(msg)
            self._flat.roots.append(key)
            self._child(encode_key(key), value, reserved=key in {"", ALIAS_ROOT})
        return self._flat

    def _child(self, path: str, value: Any, *, place: str | None = None, reserved: bool = False) -> None:
        place = path if place is None else place
        if reserved or (len(path) > _SURELY_SHORT_CHARACTERS and escaped_length(path) > _MAX_PATH_CHARACTERS):
            self._flat.moved[path] = path = self._next_alias()
        kind = type(value)
        if kind in _INLINE_TYPES and _fits_inline(value):
            self._flat.items[path] = _primitive(value)
        elif self._is_tensor(value):
            self._remember(path, value)
            self._flat.items[path] = Leaf(value, is_tensor=True, place=place)
        else:
            self._compound(path, value, kind, place)

    def _compound(self, path: str, value: Any, kind: type, place: str) -> None:
        if id(value) in self._open:
            msg = f"{place}: this {kind.__name__} contains itself, which cannot be stored"
            raise UnsupportedValueError(msg)
        if len(self._open) >= MAX_DEPTH:
            msg = f"{place}: nested more than {MAX_DEPTH} levels deep, which cannot be stored; flatten it"
            raise UnsupportedValueError(msg)
        if kind not in _IMMUTABLE_TYPES:
            self._remember(path, value)
        self._open.add(id(value))
        if kind is list:
            self._sequence(path, value, place)
        elif kind is dict or kind is OrderedDict or (kind is defaultdict and self._holds_tensor(value)):
            self._dictionary(path, value, kind, place)
        elif isinstance(value, tuple) and (kind is tuple or _is_named(kind)) and self._holds_tensor(value):
            self._sequence(path, value, place)
            class_name = "" if kind is tuple else f"{kind.__module__}:{kind.__qualname__}"
            self._flat.containers[path] = ContainerNote("tuple" if kind is tuple else "namedtuple", class_name)
        else:
            self._leaf(path, value, place)
        self._open.discard(id(value))

    def _remember(self, path: str, value: Any) -> None:
        first = self._first_path.setdefault(id(value), path)
        if first != path:
            self._flat.same[path] = first

    def _dictionary(self, path: str, value: dict[Any, Any], kind: type, place: str) -> None:
        plain = _keys_are_plain(value)
        if not plain and not self._holds_tensor(value):
            self._leaf(path, value, place)
            return
        extra = ""
        if isinstance(value, defaultdict):
            extra = self._extra(place, value.default_factory)
        elif kind is OrderedDict and vars(value):
            extra = self._extra(place, dict(vars(value)))
        if plain:
            self._flat.items[path] = (OrderedDictEntry if kind is OrderedDict else DictEntry)(list(value))
            for key, item in value.items():
                token = encode_key(str(key))
                self._child(f"{path}/{token}", item, place=f"{place}/{token}")
            note = ContainerNote("defaultdict" if kind is defaultdict else "", extra=extra)
        else:
            self._sequence(path, [tuple(value), *value.values()], place)
            note = ContainerNote("items", "" if kind is dict else f"collections:{kind.__name__}", extra)
        if note.kind or note.extra:
            self._flat.containers[path] = note

    def _sequence(self, path: str, items: Iterable[Any], place: str) -> None:
        self._flat.items[path] = ListEntry()
        for index, item in enumerate(items):
            self._child(f"{path}/{index}", item, place=f"{place}/{index}")

    def _holds_tensor(self, value: Any) -> bool:
        pending, visited = [value], set()
        while pending:
            item = pending.pop()
            if self._is_tensor(item):
                return True
            if id(item) not in visited and isinstance(item, (dict, list, tuple)):
                visited.add(id(item))
                pending.extend(item.values() if isinstance(item, dict) else item)
        return False

    def _extra(self, place: str, value: Any) -> str:
        alias = self._next_alias()
        self._leaf(alias, value, place)
        return alias

    def _next_alias(self) -> str:
        self._aliases += 1
        # torchsnapshot looks for what an entry is in, and takes nothing out of a list.
        self._flat.items.setdefault(ALIAS_ROOT, ListEntry())
        return f"{ALIAS_ROOT}/{self._alias_prefix}{self._aliases}"

    def _leaf(self, path: str, value: Any, place: str) -> None:
        self._flat.items[path] = Leaf(value, is_tensor=False, place=place)


def _is_named(kind: type) -> bool:
    return hasattr(kind, "_fields") and hasattr(kind, "_make")


def _is_unicode(text: str) -> bool:
    return text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text)


def _keys_are_plain(value: dict[Any, Any]) -> bool:
    """Whether torchsnapshot's format can hold these keys, and its reader gives all of them back (FORMAT 3.3)."""
    texts = set()
    integers = {key for key in value if type(key) is int}
    for key in value:
        if type(key) is str:
            number = key.lstrip("+-")
            # Its reader takes such a key for a number, too.
            if number.isdigit() and (not number.isascii() or _collides(key, integers)):
                return False
            if not _is_unicode(key):
                return False
        elif type(key) is not int or not _fits_inline(key):
            return False
        texts.add(str(key))
    return len(texts) == len(value)


def _collides(key: str, integers: set[int]) -> bool:
    try:
        return int(key) in integers
    except ValueError:
        return bool(integers)


def _fits_inline(value: Any) -> bool:
    if isinstance(value, (bool, float)):
        return True
    if isinstance(value, int):
        return value.bit_length() <= _MAX_INLINE_INT_BITS
    return len(value) <= _MAX_INLINE_BYTES and (isinstance(value, bytes) or _is_unicode(value))


def _primitive(value: Any) -> PrimitiveEntry:
    if isinstance(value, bool):
        return PrimitiveEntry("bool", str(value), replicated=False)
    if isinstance(value, float):
        text = base64.b64encode(struct.pack("<d", value)).decode()
        return PrimitiveEntry("float", text, replicated=False, readable=str(value))
    if isinstance(value, bytes):
        return PrimitiveEntry("bytes", base64.b64encode(value).decode(), replicated=False)
    return PrimitiveEntry("str" if isinstance(value, str) else "int", str(value), replicated=False)
