"""Manifest entries and wanted boxes → which byte ranges of which files go where.

Pure. A manifest is hostile input: everything that can be checked without opening a data file is checked here, before
memory is taken or a byte is read.
"""

from collections.abc import Iterable, Mapping
from math import prod
from typing import TypeAlias

import msgspec

from lightning_snapshot.errors import MetadataError
from lightning_snapshot.geometry import Box, find_tiling_defect, flat_cover, intersect, rows_apart, whole
from lightning_snapshot.manifest import (
    ChunkedTensorEntry,
    DTensorEntry,
    ShardedTensorEntry,
    TensorEntry,
)

__all__ = ["Blob", "Fetch", "ReadPlan", "StoredTensor", "TensorLike", "plan_read", "stored_tensor"]

# Reading over what is not wanted is cheaper than a second read, up to here.
_MIN_GAP_BYTES = 64 * 1024

TensorLike: TypeAlias = TensorEntry | ChunkedTensorEntry | ShardedTensorEntry | DTensorEntry


class StoredPiece(msgspec.Struct, frozen=True, gc=False):
    """A box of a tensor in one stretch of one file; ``byte_range`` is ``None`` for the whole file."""

    box: Box
    location: str
    byte_range: tuple[int, int] | None
    is_zip: bool


class StoredTensor(msgspec.Struct, frozen=True, gc=False):
    """A tensor as the manifest describes it, all kinds of entries alike.

    Attributes:
        dtype: Stored dtype; empty if only the files tell (before 2022-06).
        shape: Elements per dimension.
        pieces: Boxes that tile the shape.
    """

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[StoredPiece, ...]


class Fetch(msgspec.Struct, frozen=True, gc=False):
    """A stretch of a file that holds row-major elements of one piece of a tensor.

    Attributes:
        path: Logical path of the tensor.
        location: File.
        begin_bytes: Start in the file (inclusive).
        end_bytes: End in the file (exclusive).
        file_size_bytes: Length that the file must have, or ``None`` if it may hold more than this piece.
        piece: Global box of the whole piece.
        first_element: Flat index in the piece of the element at ``begin_bytes``.
        item_bytes: Bytes of an element.
        wanted: Global box of the elements to take; the rest of the stretch is passed over.
    """

    path: str
    location: str
    begin_bytes: int
    end_bytes: int
    file_size_bytes: int | None
    piece: Box
    first_element: int
    item_bytes: int
    wanted: Box


class Blob(msgspec.Struct, frozen=True, gc=False):
    """A stretch of a file in ``torch.save``'s format, to be read in one piece.

    Attributes:
        path: Logical path of the value.
        location: File.
        byte_range: ``[begin, end)``; ``None`` for the whole file.
        piece: Global box of the tensor inside; ``None`` for an object.
    """

    path: str
    location: str
    byte_range: tuple[int, int] | None
    piece: Box | None


class ReadPlan(msgspec.Struct, frozen=True):
    """What has to be read. ``fetches`` are in order of file and offset."""

    fetches: tuple[Fetch, ...]
    blobs: tuple[Blob, ...]


def stored_tensor(path: str, entry: TensorLike) -> StoredTensor:
    """The one description of a tensor that all kinds of entries come down to.

    Args:
        path: Logical path, for messages.
        entry: The entry as seen by the rank; sharded ones merged over all ranks.

    Raises:
        MetadataError: The pieces do not tile the tensor, or disagree about its dtype.
    """
    if isinstance(entry, TensorEntry):
        shape = entry.shape
        return StoredTensor(entry.dtype, shape, (_piece(path, whole(shape), entry),))
    shards = entry.chunks if isinstance(entry, ChunkedTensorEntry) else entry.shards
    if not shards:
        msg = f"{path}: a tensor without any piece; its shape and dtype are unknown"
        raise MetadataError(msg)
    dtypes = {shard.tensor.dtype for shard in shards}
    if isinstance(entry, ChunkedTensorEntry):
        dtypes = {entry.dtype, *(dtypes - {""})}  # pieces of old snapshots have none of their own
    if len(dtypes) > 1:
        msg = f"{path}: expected one dtype in all pieces, found {sorted(dtypes)}"
        raise MetadataError(msg)
    for shard in shards:
        if tuple(shard.tensor.shape) != tuple(shard.sizes) or len(shard.offsets) != len(shard.sizes):
            msg = (
                f"{path}: expected a piece with sizes like its shape and as many offsets, found offsets "
                f"{list(shard.offsets)}, sizes {list(shard.sizes)} and shape {list(shard.tensor.shape)}"
            )
            raise MetadataError(msg)
    pieces = tuple(_piece(path, Box(tuple(s.offsets), tuple(s.sizes)), s.tensor) for s in shards)
    shape = tuple(entry.shape) if isinstance(entry, ChunkedTensorEntry) else _extent(pieces)
    # Snapshots of autumn 2022 chunk a 0-d tensor as one chunk of shape [1] (FORMAT 4.5).
    frame = shape if shape or len(pieces[0].box.sizes) == 0 else (1,)
    defect = find_tiling_defect(frame, [piece.box for piece in pieces])
    if defect:
        msg = f"{path}: the stored pieces do not make up the tensor of shape {list(shape)}: {defect}"
        raise MetadataError(msg)
    if frame != shape:
        pieces = tuple(StoredPiece(whole(()), p.location, p.byte_range, p.is_zip) for p in pieces)
    return StoredTensor(dtypes.pop(), shape, pieces)


def _piece(path: str, box: Box, tensor: TensorEntry) -> StoredPiece:
    if tensor.serializer not in {"buffer_protocol", "torch_save"}:
        msg = f"{path}: expected the serializer buffer_protocol or torch_save, found {tensor.serializer!r}"
        raise MetadataError(msg)
    return StoredPiece(box, tensor.location, tensor.byte_range, tensor.serializer == "torch_save")


def _extent(pieces: Iterable[StoredPiece]) -> tuple[int, ...]:
    ends = [tuple(o + s for o, s in zip(piece.box.offsets, piece.box.sizes, strict=True)) for piece in pieces]
    return tuple(max(column) for column in zip(*ends, strict=False))


def plan_read(
    tensors: Mapping[str, tuple[StoredTensor, int, Box | None]],
    objects: Mapping[str, tuple[str, tuple[int, int] | None]],
) -> ReadPlan:
    """Plan a load.

    Args:
        tensors: Logical path → tensor, bytes of one of its elements, and the global box that is wanted, if not all.
        objects: Logical path of a value that is read in one piece → its file, and the range there if not all of it.

    Raises:
        MetadataError: A byte range does not have the length that shape and dtype ask for.
    """
    fetches: list[Fetch] = []
    blobs = [Blob(path, location, byte_range, None) for path, (location, byte_range) in objects.items()]
    for path, (tensor, item_bytes, wanted) in tensors.items():
        if wanted is None and len(tensor.pieces) == 1 and not tensor.pieces[0].is_zip and tensor.pieces[0].box.volume:
            piece = tensor.pieces[0]
            fetches.append(_fetch(path, piece, item_bytes, piece.box))
            continue
        taken: set[Box] = set()
        for piece in tensor.pieces:
            part = intersect(piece.box, wanted) if wanted else piece.box
            if part is None or not part.volume or piece.box in taken:
                continue
            taken.add(piece.box)
            if piece.is_zip:
                blobs.append(Blob(path, piece.location, piece.byte_range, piece.box))
            elif part is piece.box:
                fetches.append(_fetch(path, piece, item_bytes, part))
            else:
                inner = part.relative_to(piece.box.offsets)
                for rows in rows_apart(piece.box.sizes, inner, _MIN_GAP_BYTES // max(1, item_bytes)):
                    absolute = tuple(o + p for o, p in zip(rows.offsets, piece.box.offsets, strict=True))
                    fetches.append(_fetch(path, piece, item_bytes, Box(absolute, rows.sizes)))
    fetches.sort(key=_place)
    return ReadPlan(tuple(fetches), tuple(blobs))


def _place(fetch: Fetch) -> tuple[str, int]:
    return fetch.location, fetch.begin_bytes


def _fetch(path: str, piece: StoredPiece, item_bytes: int, part: Box) -> Fetch:
    first, last = 0, prod(piece.box.sizes)
    size_bytes = last * item_bytes
    start = 0
    if piece.byte_range is not None:
        start = piece.byte_range[0]
        if piece.byte_range[1] - start != size_bytes:
            msg = (
                f"{path}: expected {size_bytes} bytes for shape {list(piece.box.sizes)}, found the range "
                f"{list(piece.byte_range)} of {piece.byte_range[1] - start} bytes in {piece.location}"
            )
            raise MetadataError(msg)
    if part is not piece.box:
        first, last = flat_cover(piece.box.sizes, part.relative_to(piece.box.offsets))
    return Fetch(
        path,
        piece.location,
        start + first * item_bytes,
        start + last * item_bytes,
        size_bytes if piece.byte_range is None else None,
        piece.box,
        first,
        item_bytes,
        part,
    )
