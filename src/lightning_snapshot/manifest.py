"""The text of ``.snapshot_metadata``: reading it, writing it.

With `lightning_snapshot.entries`, whose types it hands on, this is the only place that knows the schema of the file:
torchsnapshot's entries (all versions from 0.0.2 on) and this project's own entry, ``x-lightning-snapshot``, which
torchsnapshot skips. What only old versions wrote is in `lightning_snapshot.manifest_legacy`.
"""

import codecs
import hashlib
import re
from collections.abc import Sequence
from typing import Annotated, Any, TypeAlias, cast

import msgspec

from lightning_snapshot.entries import (
    EXTENSION_FORMAT,
    ChunkedTensorEntry,
    ContainerNote,
    DictEntry,
    DTensorEntry,
    Entry,
    Extension,
    FileRecord,
    ListEntry,
    Manifest,
    ObjectEntry,
    OrderedDictEntry,
    PrimitiveEntry,
    RankNotes,
    Shard,
    ShardedTensorEntry,
    TensorEntry,
    TensorNote,
)
from lightning_snapshot.errors import MetadataError
from lightning_snapshot.manifest_legacy import JSON_FAILURES, describe, modernise, parse

__all__ = [
    "EXTENSION_KEY",
    "ChunkedTensorEntry",
    "ContainerNote",
    "DTensorEntry",
    "DictEntry",
    "Entry",
    "Extension",
    "FileRecord",
    "ListEntry",
    "Manifest",
    "ObjectEntry",
    "OrderedDictEntry",
    "PrimitiveEntry",
    "RankNotes",
    "Shard",
    "ShardedTensorEntry",
    "TensorEntry",
    "TensorNote",
    "decode",
    "encode",
    "escaped_length",
    "seal",
    "split_rank",
]

EXTENSION_KEY = "x-lightning-snapshot"
"""Manifest path and type of the entry that holds the `Extension`."""

# torchsnapshot's YAML reader gives up on longer keys (FORMAT 2.1).
_MAX_PATH_CHARACTERS = 1022
_SURELY_SHORT_CHARACTERS = _MAX_PATH_CHARACTERS // len(r"\u0000")
# Python does not print integers of more than 4300 digits; YAML can give them in hexadecimal.
_MAX_KEY_BITS = 14_284
# Nobody writes more; code that walks up a path, or through the dimensions of a tensor, takes time or stack for each.
_MAX_LEVELS = 1000
_MAX_DIMENSIONS = 256
# A JSON parser takes these as they are, a YAML parser does not: it rejects the file or, for the line breaks U+0085,
# U+2028 and U+2029, folds the text around them.
_ONLY_JSON = re.compile("[\x7f-\x9f\u2028\u2029\ufffe\uffff]")
_ESCAPED_TO_SIX = re.compile("[\x00-\x07\x0b\x0e-\x1f\x7f-\x9f\u2028\u2029\ufffe\uffff]")
_CONTROL_ESCAPED_TO_TWO = re.compile(r"[\b\t\n\f\r]")
_RANK = re.compile("0|[1-9][0-9]{0,17}")
_PATH_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")
_HEXADECIMAL = re.compile("[0-9a-f]*")


class _IntEntry(msgspec.Struct, gc=False, tag_field="type", tag="int"):
    serialized_value: str
    replicated: bool
    readable: str | None = None


class _StrEntry(_IntEntry, gc=False, tag="str"): ...


class _BoolEntry(_IntEntry, gc=False, tag="bool"): ...


class _BytesEntry(_IntEntry, gc=False, tag="bytes"): ...


class _FloatEntry(_IntEntry, gc=False, tag="float"): ...


class _ExtensionEntry(msgspec.Struct, tag_field="type", tag=EXTENSION_KEY):
    checksum: str
    content: str


# `PrimitiveEntry` stands for five types of the file; msgspec wants one class for each.
_StoredPrimitive: TypeAlias = _IntEntry | _StrEntry | _BoolEntry | _BytesEntry | _FloatEntry
_Stored: TypeAlias = (
    ListEntry
    | DictEntry
    | OrderedDictEntry
    | _StoredPrimitive
    | TensorEntry
    | ChunkedTensorEntry
    | ShardedTensorEntry
    | DTensorEntry
    | ObjectEntry
    | _ExtensionEntry
)
_PRIMITIVES: dict[type, Any] = {
    _IntEntry: "int",
    _StrEntry: "str",
    _BoolEntry: "bool",
    _BytesEntry: "bytes",
    _FloatEntry: "float",
}
_NO_CHECKSUM = "0" * 32
# A quote inside a text is escaped, so this can only be the field of the extension entry.
_CHECKSUM = re.compile(rb'("checksum":\s*")[0-9a-f]{32}')
_KNOWN_TYPES = frozenset(
    (*_PRIMITIVES.values(), "list", "dict", "OrderedDict", "Tensor", "ChunkedTensor", "ShardedTensor", "DTensor")
) | {"object", EXTENSION_KEY}


class _StoredManifest(msgspec.Struct):
    version: Any
    world_size: Any
    manifest: dict[str, _Stored]


class _ExtensionFormat(msgspec.Struct):
    format: Annotated[int, msgspec.Meta(ge=1)]


def escaped_length(text: str) -> int:
    """Number of characters that ``text`` takes between the quotes in ``.snapshot_metadata``."""
    quoted = text.count('"') + text.count("\\")
    if text.isascii() and text.isprintable():
        return len(text) + quoted
    return len(text) + quoted + len(_CONTROL_ESCAPED_TO_TWO.findall(text)) + 5 * len(_ESCAPED_TO_SIX.findall(text))


def split_rank(path: str) -> tuple[int, str]:
    """Cut a manifest path into its rank and its logical path.

    Raises:
        MetadataError: The path does not start with a rank and a slash.
    """
    rank, slash, logical_path = path.partition("/")
    if not slash or not _RANK.fullmatch(rank):
        msg = f"manifest path {path[:200]!r}: expected a rank and a slash first, like '0/model', found {rank[:50]!r}"
        raise MetadataError(msg)
    return int(rank), logical_path


def encode(manifest: Manifest) -> bytes:
    """The text of a manifest: JSON that torchsnapshot's YAML reader takes too.

    The same manifest always gives the same bytes: entries stay in their order and the extension comes last.

    Raises:
        MetadataError: A path is too long for torchsnapshot, or a text cannot be expressed in UTF-8.
    """
    entries: dict[str, Entry | _ExtensionEntry] = dict(manifest.entries)
    for path in entries:
        if len(path) > _SURELY_SHORT_CHARACTERS and escaped_length(path) > _MAX_PATH_CHARACTERS:
            limit, found = _MAX_PATH_CHARACTERS, escaped_length(path)
            msg = f"manifest path {path!r}: expected at most {limit} characters as escaped, found {found}"
            raise MetadataError(msg)
    if manifest.extension is not None:
        entries[EXTENSION_KEY] = _ExtensionEntry(_NO_CHECKSUM, _to_json(EXTENSION_KEY, manifest.extension).decode())
    stored = {"version": manifest.version, "world_size": manifest.world_size, "manifest": entries}
    try:
        data = msgspec.json.encode(stored)
    except UnicodeEncodeError:
        for path, entry in entries.items():
            _to_json(path, {path: entry})
        raise
    if not data.isascii() or b"\x7f" in data:
        data = _ONLY_JSON.sub(lambda match: f"\\u{ord(match[0]):04x}", data.decode()).encode()
    return seal(data)


def seal(data: bytes) -> bytes:
    """The text of a manifest with the right checksum in its extension entry; as it is if it has none."""
    match = _find_checksum(data)
    if match is None:
        return data
    text = memoryview(data)
    return b"".join((text[: match.end(1)], _checksum(data, match).encode(), text[match.end() :]))


def _find_checksum(data: bytes) -> "re.Match[bytes] | None":
    # Backwards: it is near the end, and with many ranks the text is long.
    start = data.rfind(b'"checksum":')
    return None if start < 0 else _CHECKSUM.match(data, start)


def _checksum(data: bytes, match: "re.Match[bytes] | None") -> str:
    """Of the whole text, with zeros where the checksum itself stands."""
    digest = hashlib.blake2b(digest_size=len(_NO_CHECKSUM) // 2)
    if match is None:
        digest.update(data)
    else:
        text = memoryview(data)  # with many ranks it is long
        for part in (text[: match.end(1)], _NO_CHECKSUM.encode(), text[match.end() :]):
            digest.update(part)
    return digest.hexdigest()


def _to_json(path: str, value: object) -> bytes:
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError as error:
        msg = f"manifest path {path!r}: expected text that UTF-8 can express, found a lone surrogate; rename the key"
        raise MetadataError(msg) from error


def decode(data: bytes, *, source: str) -> Manifest:
    """Read the text of a manifest, of this project or of any version of torchsnapshot.

    Args:
        data: Content of ``.snapshot_metadata``.
        source: Where it comes from, for messages.

    Raises:
        MetadataError: The text is damaged, or it was written by a newer version of this project.
    """
    text = data.removeprefix(codecs.BOM_UTF8)
    try:
        stored = msgspec.json.decode(text, type=_StoredManifest)
    except JSON_FAILURES:
        # YAML, old forms of entries, types from the future; or damage, which this way finds and names.
        stored = _decode_unusual(text, source)
    if type(stored.world_size) is not int or not 1 <= stored.world_size < 2**63:
        msg = f"{source}: expected a positive integer as 'world_size', found {describe(stored.world_size)}"
        raise MetadataError(msg)
    version = stored.version if isinstance(stored.version, str) else describe(stored.version)
    extension = _checked_extension(stored, data, source)
    return Manifest(version, stored.world_size, _checked_entries(stored, source), extension)


def _checked_extension(stored: _StoredManifest, data: bytes, source: str) -> Extension | None:
    own = stored.manifest.get(EXTENSION_KEY)
    if not isinstance(own, _ExtensionEntry):
        # The name stands in the text twice, as key and as type: some damage has hit one of them.
        if EXTENSION_KEY.encode() in data:
            msg = f"{source}: expected an entry {EXTENSION_KEY!r}, found none; the metadata is damaged"
            raise MetadataError(msg)
        return None
    found = _checksum(data, _find_checksum(data))
    if found != own.checksum:
        msg = f"{source}: the metadata changed since it was written: expected checksum {own.checksum}, found {found}"
        raise MetadataError(msg)
    return _decode_extension(own.content, source)


def _decode_unusual(text: bytes, source: str) -> _StoredManifest:
    content = parse(text, source)
    if not isinstance(content, dict) or not content.keys() >= {"version", "world_size", "manifest"}:
        msg = f"{source}: expected a mapping with 'version', 'world_size' and 'manifest', found {describe(content)}"
        raise MetadataError(msg)
    manifest = content["manifest"]
    if not isinstance(manifest, dict):
        msg = f"{source}: expected a mapping as 'manifest', found {describe(manifest)}"
        raise MetadataError(msg)
    entries: dict[str, _Stored] = {}
    for path, entry in manifest.items():
        kind = entry.get("type") if isinstance(entry, dict) else None
        if not isinstance(kind, str) or not isinstance(path, str):
            msg = f"{source}: entry {describe(path)}: expected a mapping with a 'type', found {describe(entry)}"
            raise MetadataError(msg)
        modern = modernise(entry)
        if modern["type"] not in _KNOWN_TYPES:
            continue
        try:
            entries[path] = msgspec.convert(modern, type=_Stored)
        except JSON_FAILURES as error:
            msg = f"{source}: entry {path!r}: {error}; found {describe(_value_at(modern, str(error)))}"
            raise MetadataError(msg) from error
    return _StoredManifest(content["version"], content["world_size"], entries)


def _value_at(entry: Any, message: str) -> Any:
    """The part of an entry that a message of msgspec is about: it ends in a path, like ``at `$.shape[0]```."""
    for name, index in _PATH_STEP.findall(message.partition("at `$")[2]):
        entry = entry[name] if name else entry[int(index)]
    return entry


def _checked_entries(stored: _StoredManifest, source: str) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    ranks: set[str] = set()
    for path, entry in stored.manifest.items():
        kind = type(entry)
        if kind is _ExtensionEntry:
            continue
        rank = path[: path.find("/") + 1]
        if rank not in ranks:
            _check_rank(path, stored.world_size, source)
            ranks.add(rank)
        if path.count("/") > _MAX_LEVELS:
            msg = f"{source}: entry {describe(path)}: expected at most {_MAX_LEVELS} levels, found {path.count('/')}"
            raise MetadataError(msg)
        if kind in _PRIMITIVES:
            primitive = cast(_IntEntry, entry)
            entries[path] = PrimitiveEntry(
                _PRIMITIVES[kind], primitive.serialized_value, primitive.replicated, primitive.readable
            )
            continue
        defect = _find_defect(cast(Entry, entry))
        if defect:
            msg = f"{source}: entry {path!r}: {defect}"
            raise MetadataError(msg)
        entries[path] = cast(Entry, entry)
    return entries


def _check_rank(path: str, world_size: int, source: str) -> None:
    try:
        rank, _ = split_rank(path)
    except MetadataError as error:
        msg = f"{source}: {error}"
        raise MetadataError(msg) from None
    if rank >= world_size:
        msg = f"{source}: entry {path!r}: expected a rank below the world size {world_size}, found rank {rank}"
        raise MetadataError(msg)


def _find_defect(entry: Entry) -> str | None:
    """Say what the types of the fields alone do not rule out."""
    if isinstance(entry, (DictEntry, OrderedDictEntry)):
        if any(type(key) is int and key.bit_length() > _MAX_KEY_BITS for key in entry.keys):
            return f"expected keys of at most {_MAX_KEY_BITS} bits, found an integer with more"
    elif isinstance(entry, TensorEntry):
        return _find_defect_of_tensor(entry)
    elif isinstance(entry, DTensorEntry) and not _is_mesh(entry.mesh):
        return f"expected nested lists of rank numbers as 'mesh', found {describe(entry.mesh)}"
    elif isinstance(entry, (ShardedTensorEntry, DTensorEntry)):
        return _find_defect_of_pieces(entry.shards)
    elif isinstance(entry, ChunkedTensorEntry):
        return _find_defect_of_pieces(entry.chunks)
    return None


def _find_defect_of_tensor(entry: TensorEntry) -> str | None:
    if len(entry.shape) > _MAX_DIMENSIONS:
        return f"expected at most {_MAX_DIMENSIONS} dimensions, found {len(entry.shape)}"
    if entry.byte_range is not None and entry.byte_range[1] < entry.byte_range[0]:
        return f"expected a 'byte_range' that ends behind its begin, found {list(entry.byte_range)}"
    return None


def _find_defect_of_pieces(pieces: Sequence[Shard]) -> str | None:
    for piece in pieces:
        if len(piece.offsets) != len(piece.sizes) or piece.tensor.shape != piece.sizes:
            return f"expected a piece with 'sizes' like its shape and as many 'offsets', found {describe(piece)}"
        if defect := _find_defect_of_tensor(piece.tensor):
            return defect
    return None


def _is_mesh(mesh: list[object]) -> bool:
    pending: list[object] = list(mesh)
    while pending:
        item = pending.pop()
        if isinstance(item, list):
            pending.extend(item)
        elif type(item) is not int or not 0 <= item < 2**63:
            return False
    return True


def _decode_extension(content: str, source: str) -> Extension:
    try:
        written = msgspec.json.decode(content, type=_ExtensionFormat).format
        if written > EXTENSION_FORMAT:
            msg = (
                f"{source}: expected metadata of format {EXTENSION_FORMAT} or older, found format {written}; "
                "install a newer lightning-snapshot"
            )
            raise MetadataError(msg)
        extension = msgspec.json.decode(content, type=Extension)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        msg = f"{source}: entry {EXTENSION_KEY!r}: {error}; found {describe(content)}"
        raise MetadataError(msg) from error
    for location, record in extension.files.items():
        digits = 16 * -(-record.size_bytes // extension.block_bytes)
        if len(record.hashes) != digits or not _HEXADECIMAL.fullmatch(record.hashes):
            msg = (
                f"{source}: entry {EXTENSION_KEY!r}: expected {digits} hexadecimal digits of hashes for {location!r}, "
                f"found {describe(record.hashes)}"
            )
            raise MetadataError(msg)
    return extension
