"""What old versions of torchsnapshot wrote into ``.snapshot_metadata``: YAML and other forms of entries (FORMAT 13)."""

import re
import reprlib
from collections.abc import Mapping
from typing import Any

import msgspec
import yaml

from lightning_snapshot.errors import MetadataError

__all__ = ["JSON_FAILURES", "describe", "modernise", "parse"]

JSON_FAILURES = (msgspec.MsgspecError, ValueError, RecursionError)
"""What msgspec raises on text that it cannot read. Its own errors are a `ValueError` in newer versions only."""

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# The loader recurses, and some versions in C without a check, so that deep nesting would end the process.
_MAX_LEVELS = 1000
# YAML has numbers with base 60, like 1:30:00, which take time for the square of their length.
_BASE_60 = re.compile(r"[-+]?[0-9_]+(:[0-5]?[0-9])+(\.[0-9_]*)?")
_MAX_BASE_60_CHARACTERS = 1000
# PyYAML's constructors let whatever `int`, `datetime`, … raise pass through.
_YAML_FAILURES = (
    yaml.YAMLError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
_LEAF_FIELDS = {"type", "location", "replicated"}
_PRIMITIVE_TYPES = frozenset({"int", "str", "bool", "bytes", "float"})
_PIECES = {"ChunkedTensor": "chunks", "ShardedTensor": "shards", "DTensor": "shards"}

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = 120


def describe(value: object) -> str:
    """A short ``repr`` for messages, of any value whatsoever."""
    try:
        return _SHORT.repr(value)
    except (ValueError, RecursionError):  # an integer of more digits than Python prints
        return f"a {type(value).__name__} that cannot be shown"


def parse(data: bytes, source: str) -> object:
    """Read JSON or, if it is none, YAML.

    Args:
        data: The text, without byte order mark.
        source: Where it comes from, for messages.

    Raises:
        MetadataError: It is neither, or it is YAML that uses an alias.
    """
    try:
        return msgspec.json.decode(data)
    except RecursionError as error:
        msg = f"{source}: expected JSON or YAML, found more nested lists and mappings than can be read"
        raise MetadataError(msg) from error
    except JSON_FAILURES as error:
        json_error = error
    # A complete YAML mapping can never be the first part of a JSON text. This spares the slow parser a large file
    # that was cut off.
    if "truncated" in str(json_error):
        msg = f"{source}: expected JSON or YAML, found the beginning of a JSON text ({len(data)} bytes); it was cut off"
        raise MetadataError(msg) from json_error
    try:
        return _parse_yaml(data.decode())
    except _YAML_FAILURES as error:
        msg = f"{source}: expected JSON or YAML, found neither ({json_error}; {' '.join(str(error).split())[:500]})"
        raise MetadataError(msg) from error


def _parse_yaml(text: str) -> object:
    levels = 0
    for event in yaml.parse(text, Loader=_LOADER):
        if isinstance(event, yaml.AliasEvent):
            # Snapshots never have any, and a few nested ones expand a kilobyte to any size.
            msg = f"an alias, whose content has to be written out, {event.start_mark}"
            raise yaml.YAMLError(msg)
        levels += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if levels > _MAX_LEVELS:
            msg = f"more than {_MAX_LEVELS} levels {event.start_mark}"
            raise yaml.YAMLError(msg)
        if isinstance(event, yaml.ScalarEvent):
            event.value.encode()  # PyYAML without libyaml lets lone surrogates pass
            if len(event.value) > _MAX_BASE_60_CHARACTERS and _BASE_60.fullmatch(event.value):
                msg = f"a number of more than {_MAX_BASE_60_CHARACTERS} characters {event.start_mark}"
                raise yaml.YAMLError(msg)
    return yaml.load(text, Loader=_LOADER)  # noqa: S506  # a safe loader


def modernise(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Give an entry the form that torchsnapshot 0.1.0 writes.

    Defects pass through unchanged; the caller's conversion to types finds them.

    Args:
        entry: Fields of the entry; ``type`` is there and a string.
    """
    modern = dict(entry)
    kind: str = modern["type"]
    if kind in _PIECES:
        field = _PIECES[kind]
        pieces = modern.get(field)
        if isinstance(pieces, list):
            modern[field] = [_modernise_piece(piece) for piece in pieces]
            if kind == "ChunkedTensor":
                modern.setdefault("replicated", any(_is_replicated(piece) for piece in pieces))
    elif kind in _PRIMITIVE_TYPES:
        if not isinstance(modern.get("readable"), str):
            modern["readable"] = None
    elif modern.keys() == _LEAF_FIELDS and ("." in kind or kind == "Tensor"):
        # Until June 2022 the type was the class of the value, and every value a file of `torch.save`.
        modern |= {"type": "object", "serializer": "torch_save"}
        modern["obj_type"] = "torch.Tensor" if kind == "Tensor" else kind
    return modern


def _modernise_piece(piece: object) -> object:
    if not isinstance(piece, dict) or "tensor" in piece or "location" not in piece:
        return piece
    tensor = {
        "location": piece["location"],
        "serializer": "torch_save",
        "dtype": "",
        "shape": piece.get("sizes"),
        "replicated": False,
    }
    return {**piece, "tensor": tensor}


def _is_replicated(piece: object) -> bool:
    tensor = piece.get("tensor") if isinstance(piece, dict) else None
    return isinstance(tensor, dict) and tensor.get("replicated") is True
