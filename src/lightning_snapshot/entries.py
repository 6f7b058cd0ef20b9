"""The entries of a snapshot's metadata: torchsnapshot's (FORMAT 4) and what this project notes besides.

How they are written as text is in `lightning_snapshot.manifest`.
"""

from collections.abc import Mapping
from typing import Annotated, Literal, TypeAlias

import msgspec

__all__ = [
    "EXTENSION_FORMAT",
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
]

EXTENSION_FORMAT = 1
"""Version of `Extension`; a reader refuses a higher one."""

# What PyTorch can count; also keeps hostile numbers from growing without bound.
_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Counts: TypeAlias = tuple[_Count, ...]
_Dimension: TypeAlias = Annotated[int, msgspec.Meta(ge=-1, le=2**63 - 1)]


class ListEntry(msgspec.Struct, frozen=True, gc=False, tag_field="type", tag="list"):
    """A list. Its items are the entries below it, by index."""


class DictEntry(msgspec.Struct, frozen=True, tag_field="type", tag="dict"):
    """A dictionary with its keys in order."""

    keys: list[str | int | bool]


class OrderedDictEntry(msgspec.Struct, frozen=True, tag_field="type", tag="OrderedDict"):
    """A ``collections.OrderedDict`` with its keys in order."""

    keys: list[str | int | bool]


class PrimitiveEntry(msgspec.Struct, frozen=True, gc=False):
    """A Python ``int``, ``str``, ``bool``, ``bytes`` or ``float`` inside the metadata."""

    type: Literal["int", "str", "bool", "bytes", "float"]
    serialized_value: str
    replicated: bool
    readable: str | None = None


class TensorEntry(msgspec.Struct, frozen=True, gc=False, tag_field="type", tag="Tensor"):
    """A tensor, or one piece of it, in one stretch of one file.

    Attributes:
        location: File, relative to the snapshot.
        serializer: ``"buffer_protocol"`` (row-major elements) or ``"torch_save"``.
        dtype: Like ``"torch.float32"``; empty for legacy pieces, where only the file tells.
        shape: Elements per dimension.
        replicated: The same on all ranks, and stored once.
        byte_range: ``[begin, end)`` in the file; ``None`` is the whole file.
    """

    location: str
    serializer: str
    dtype: str
    shape: _Counts
    replicated: bool
    byte_range: tuple[_Count, _Count] | None = None


class Shard(msgspec.Struct, frozen=True, gc=False):
    """A box of a larger tensor: ``offsets`` and ``sizes`` in elements per dimension of the whole."""

    offsets: _Counts
    sizes: _Counts
    tensor: TensorEntry


class ChunkedTensorEntry(msgspec.Struct, frozen=True, tag_field="type", tag="ChunkedTensor"):
    """A tensor stored in pieces. The boxes of ``chunks`` tile ``shape``."""

    dtype: str
    shape: _Counts
    chunks: list[Shard]
    replicated: bool


class ShardedTensorEntry(msgspec.Struct, frozen=True, tag_field="type", tag="ShardedTensor"):
    """The shards that one rank holds of a tensor that is spread over ranks."""

    shards: list[Shard]


class DTensorEntry(msgspec.Struct, frozen=True, tag_field="type", tag="DTensor"):
    """The shards that one rank holds of a ``DTensor``.

    Attributes:
        shards: Boxes of the global tensor.
        mesh: Nested lists of rank numbers.
        dim_map: Per tensor dimension the mesh dimensions that shard it, ``[-1]`` for none.
    """

    shards: list[Shard]
    mesh: list[object]
    dim_map: list[list[_Dimension]]


class ObjectEntry(msgspec.Struct, frozen=True, gc=False, tag_field="type", tag="object"):
    """Any other value: one whole file in ``torch.save``'s format."""

    location: str
    serializer: str
    obj_type: str
    replicated: bool


Entry: TypeAlias = (
    ListEntry
    | DictEntry
    | OrderedDictEntry
    | PrimitiveEntry
    | TensorEntry
    | ChunkedTensorEntry
    | ShardedTensorEntry
    | DTensorEntry
    | ObjectEntry
)


class FileRecord(msgspec.Struct, frozen=True):
    """What a data file must be.

    Attributes:
        size_bytes: Its exact length.
        hashes: XXH3-64 of each block of ``Extension.block_bytes`` bytes (the last one may be shorter), 16 hexadecimal
            digits each, one after the other. Empty for an empty file.
    """

    size_bytes: _Count
    hashes: str


class ContainerNote(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a ``list`` or ``dict`` entry really was.

    Attributes:
        kind: ``"tuple"``, ``"namedtuple"``, ``"defaultdict"`` or ``"items"`` (a dictionary whose keys are an object at
            index 0 and whose values follow), or empty for what the entry says. The whole state, which has no entry, may
            have been an ``"OrderedDict"``.
        class_name: ``module:qualified name`` of a named tuple's class or an ``items`` dictionary's (``OrderedDict``).
        extra: Logical path of an object that belongs to the container: the attributes of an ``OrderedDict``, the
            factory of a ``defaultdict``.
    """

    kind: str = ""
    class_name: str = ""
    extra: str = ""


class TensorNote(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a tensor entry cannot say.

    Attributes:
        dtype: True dtype, if the entry's is only a stand-in of the same width.
        parameter: It was a ``torch.nn.Parameter``.
        requires_grad: ``requires_grad`` of the tensor, if not what is usual (true for a parameter, false else).
        dim_order: Dimensions from the slowest to the fastest in memory, if not row-major.
        placement: How the tensor was spread over the ranks: its placements and its mesh, as text.
    """

    dtype: str = ""
    parameter: bool = False
    requires_grad: bool | None = None
    dim_order: _Counts | None = None
    placement: str = ""


class RankNotes(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the entries of one rank cannot say. All paths are logical paths.

    Attributes:
        roots: The top-level keys in order.
        containers: Notes on containers; the whole state has the empty path.
        tensors: Notes on tensors.
        tied: Path of a tensor → path of the tensor whose memory it shares.
        same: Path of a value → path where the very same object was met first.
        moved: Path of a value → where its entries are, because its own path cannot be written.
        over_rank_0: Only the ``roots`` that differ from those of rank 0 are stored under this rank; all others are
            rank 0's.
    """

    roots: tuple[str, ...] = ()
    containers: dict[str, ContainerNote] = {}
    tensors: dict[str, TensorNote] = {}
    tied: dict[str, str] = {}
    same: dict[str, str] = {}
    moved: dict[str, str] = {}
    over_rank_0: bool = False


class Extension(msgspec.Struct, frozen=True):
    """Everything torchsnapshot's format has no place for. Stored as one JSON string in one entry.

    Attributes:
        save_id: The save that wrote the snapshot.
        writer: Name and version of the software.
        block_bytes: Block size of the checksums.
        files: All data files, by location.
        ranks: Notes of each rank, by its number in decimal.
        format: Version of this schema. Readers refuse a higher one.
    """

    save_id: str
    writer: str
    block_bytes: Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
    files: dict[str, FileRecord]
    ranks: dict[str, RankNotes] = {}
    format: int = EXTENSION_FORMAT


class Manifest(msgspec.Struct, frozen=True):
    """A whole metadata file.

    Attributes:
        version: What the file says; never used for a decision.
        world_size: Number of ranks that took part.
        entries: ``<rank>/<logical path>`` → entry. Without the extension entry and entries of unknown types.
        extension: This project's own entry; ``None`` in snapshots of torchsnapshot.
    """

    version: str
    world_size: int
    entries: Mapping[str, Entry]
    extension: Extension | None = None
