"""All ranks' leaf specs → who writes which bytes where, and the entries of the final manifest.

Pure and deterministic: the same specs give the same plan, on every rank and in every run. Nothing is read or written.
"""

import heapq
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import TypeAlias

import msgspec

from lightning_snapshot.errors import UnsupportedValueError
from lightning_snapshot.geometry import Box, find_tiling_defect, split_first_dimension, whole
from lightning_snapshot.manifest import (
    ChunkedTensorEntry,
    DictEntry,
    DTensorEntry,
    Entry,
    ListEntry,
    ObjectEntry,
    OrderedDictEntry,
    Shard,
    ShardedTensorEntry,
    TensorEntry,
)

__all__ = [
    "BlobSpec",
    "FilePlan",
    "Holders",
    "Layout",
    "Piece",
    "Planner",
    "RankSpecs",
    "TensorSpec",
    "WritePlan",
    "plan_write",
]

# Pieces of at least this size start on a page of the file, so that they can be mapped and read directly.
_LARGE_BYTES = 64 * 1024
_PAGE_BYTES = 4096
_SMALL_ALIGNMENT_BYTES = 64
# What several ranks hold is cut into pieces so small that the ranks write about the same, but not smaller than this.
_MIN_SHARED_PIECE_BYTES = 1024 * 1024
_SHARED_PIECES_PER_RANK = 16
_NO_BOX = whole(())
_NO_SHARDS = ShardedTensorEntry([])


class TensorSpec(msgspec.Struct, frozen=True, gc=False, tag="tensor"):
    """A tensor of one rank, to be stored as row-major elements.

    Attributes:
        dtype: Name of the stored dtype, one that torchsnapshot knows.
        item_bytes: Bytes of one element.
        shape: Elements per dimension of the whole tensor, none of them zero.
        box: The part that this rank holds, or ``None`` if it holds all of it and the tensor is not sharded.
        replicated: All ranks hold the same tensor under this path, and it is stored once.
        by_rank_0: It is stored once, and what rank 0 holds counts; what other ranks hold may differ.
        tied_to: Path of the tensor on the same rank whose memory this one shares; empty if it is the first or only one.
        is_tied: Another tensor shares this one's memory.
    """

    dtype: str
    item_bytes: int
    shape: tuple[int, ...]
    box: Box | None = None
    replicated: bool = False
    by_rank_0: bool = False
    tied_to: str = ""
    is_tied: bool = False


class BlobSpec(msgspec.Struct, frozen=True, gc=False, tag="blob"):
    """A value that is already a string of bytes in ``torch.save``'s format, and gets a file of its own.

    Attributes:
        size_bytes: Length.
        digest: Equal for equal content; blobs with the same digest share one file.
        obj_type: Class of an object; empty for a tensor.
        dtype: dtype of a tensor.
        shape: Shape of a tensor.
        replicated: As in `TensorSpec`.
    """

    size_bytes: int
    digest: str
    obj_type: str = ""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    replicated: bool = False


RankSpecs: TypeAlias = Mapping[str, Entry | TensorSpec | BlobSpec]
"""What one rank has: logical path → finished entry, or spec of a leaf."""

Holders: TypeAlias = Mapping[str, Sequence[int]]
"""First part of a logical path → ranks that hold the replicated tensors below it, as rank 0 has them."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How data is cut into files.

    Attributes:
        save_id: Names the folder of the data files.
        chunk_bytes: Tensors larger than this are cut along dimension 0.
        file_bytes: No file grows beyond this unless a single piece does.
    """

    save_id: str
    chunk_bytes: int
    file_bytes: int


class Piece(msgspec.Struct, frozen=True, gc=False):
    """A stretch of one leaf in a file.

    Attributes:
        path: Logical path of the leaf on the writing rank.
        begin_bytes: Start in the row-major bytes of what the rank holds of the leaf (inclusive).
        end_bytes: End (exclusive).
        offset_bytes: Where it starts in the file.
    """

    path: str
    begin_bytes: int
    end_bytes: int
    offset_bytes: int

    @property
    def size_bytes(self) -> int:
        """Length."""
        return self.end_bytes - self.begin_bytes


class FilePlan(msgspec.Struct, frozen=True):
    """One data file. Bytes that belong to no piece are zero.

    Attributes:
        location: Relative to the snapshot.
        size_bytes: Exact length.
        pieces: In order of their offsets, without overlap.
    """

    location: str
    size_bytes: int
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True)
class WritePlan:
    """The plan of a whole save.

    Attributes:
        entries: ``<rank>/<logical path>`` → entry.
        files: Per rank the files that it writes.
    """

    entries: dict[str, Entry]
    files: tuple[tuple[FilePlan, ...], ...]


class _Part(msgspec.Struct, frozen=True, gc=False):
    """A piece before it has a place. Leaves that are alike have the same parts.

    Attributes:
        box: Its global box.
        ranks: Who holds it, and could write it. Hashable.
        begin_bytes: Start in the row-major bytes of what each of them holds of the leaf (inclusive).
        end_bytes: End (exclusive).
        dtype: Of the leaf.
        own_file: It must be alone in its file.
        replicated: Its entry is stored once, under rank 0.
        digest: Blobs with the same one share a file.
    """

    box: Box
    ranks: Sequence[int]
    begin_bytes: int
    end_bytes: int
    dtype: str = ""
    own_file: bool = False
    replicated: bool = False
    digest: str = ""

    @property
    def size_bytes(self) -> int:
        return self.end_bytes - self.begin_bytes

    def at(self, location: str, byte_range: tuple[int, int] | None) -> Shard:
        """The part in its place; ``byte_range`` is ``None`` for a file of its own."""
        sizes = self.box.sizes
        entry = TensorEntry(location, "buffer_protocol", self.dtype, sizes, False, byte_range)  # noqa: FBT003  # a Struct's field
        return Shard(self.box.offsets, sizes, entry)


_PathPart: TypeAlias = tuple[str, _Part]
"""Logical path of a leaf, and a part of it."""


def plan_write(specs: Sequence[RankSpecs], layout: Layout, holders: Holders | None = None) -> WritePlan:
    """Plan a save.

    Args:
        specs: What each rank has, by rank.
        layout: How data is cut into files.
        holders: If given, the other ranks' specs do not repeat what is replicated; this says who holds it.

    Returns:
        The same plan for the same arguments, whoever calls.

    Raises:
        UnsupportedValueError: Ranks disagree about a tensor that they share.
    """
    if holders is None:
        _check_replicas(specs)
    parts = [*_cut(specs, layout, holders), *_cut_shards(specs, layout)]
    writers = _assign([part for _, part in parts], len(specs))
    places, files = _place(parts, writers, len(specs), layout)
    return WritePlan(_entries(specs, places), files)


class Planner:
    """Plans one save after another. As long as only values change, the plan of the save before is used again."""

    def __init__(self) -> None:
        # One attribute, so that threads which save at the same time see specs and plan of one save.
        self._last: tuple[Sequence[RankSpecs], Layout, Holders | None, WritePlan] = (
            (),
            Layout("", 0, 0),
            None,
            WritePlan({}, ()),
        )

    def plan(self, specs: Sequence[RankSpecs], layout: Layout, holders: Holders | None = None) -> WritePlan:
        """Like `plan_write`."""
        specs_before, layout_before, holders_before, plan_before = self._last
        is_alike = (
            holders == holders_before
            and layout == replace(layout_before, save_id=layout.save_id)
            and len(specs) == len(specs_before)
            and all(_is_alike(now, before, specs[0]) for now, before in zip(specs, specs_before, strict=True))
        )
        if is_alike:
            plan = _renamed(plan_before, specs, layout_before.save_id, layout.save_id)
        else:
            plan = plan_write(specs, layout, holders)
        self._last = (specs, layout, holders, plan)
        return plan


def _is_alike(specs: RankSpecs, before: RankSpecs, of_rank_0: RankSpecs) -> bool:
    """Whether the same data has to be written; the entries, which hold values, may differ."""
    if len(specs) != len(before):
        return False
    for (path, spec), (path_before, spec_before) in zip(specs.items(), before.items(), strict=True):
        if path != path_before:
            return False
        if isinstance(spec, (TensorSpec, BlobSpec)):
            if spec is not spec_before and spec != spec_before:
                return False
        elif type(spec) is not type(spec_before) or _is_replicated(spec) != _is_replicated(spec_before):
            return False
        elif specs is not of_rank_0 and _is_replicated(spec) and spec != of_rank_0.get(path):
            return False  # `plan_write` refuses it
    return True


def _renamed(plan: WritePlan, specs: Sequence[RankSpecs], before: str, now: str) -> WritePlan:
    """The plan with the data in the folder of another save, and the entries of ``specs`` where those are no leaves."""
    names = {
        file.location: file.location.replace(f"/{before}/", f"/{now}/", 1) for files in plan.files for file in files
    }

    def renamed(entry: Entry) -> Entry | None:
        if isinstance(entry, ShardedTensorEntry):
            return ShardedTensorEntry([moved(shard) for shard in entry.shards]) if entry.shards else entry
        if isinstance(entry, TensorEntry):
            return moved_tensor(entry)
        if isinstance(entry, ObjectEntry):
            return msgspec.structs.replace(entry, location=names[entry.location])
        if isinstance(entry, ChunkedTensorEntry):
            return msgspec.structs.replace(entry, chunks=[moved(chunk) for chunk in entry.chunks])
        return None

    def moved(shard: Shard) -> Shard:
        return Shard(shard.offsets, shard.sizes, moved_tensor(shard.tensor))

    def moved_tensor(entry: TensorEntry) -> TensorEntry:
        location = names[entry.location]
        return TensorEntry(location, entry.serializer, entry.dtype, entry.shape, entry.replicated, entry.byte_range)

    entries: dict[str, Entry] = {}
    for path, entry in plan.entries.items():
        leaf = renamed(entry)
        if leaf is None:
            rank, _, logical_path = path.partition("/")
            spec = specs[int(rank)][logical_path]
            leaf = entry if isinstance(spec, (TensorSpec, BlobSpec)) else spec
        entries[path] = leaf
    files = tuple(
        tuple(FilePlan(names[file.location], file.size_bytes, file.pieces) for file in files) for files in plan.files
    )
    return WritePlan(entries, files)


def _cut(specs: Sequence[RankSpecs], layout: Layout, holders_of: Holders | None) -> Iterator[_PathPart]:
    """The parts of what is not spread over ranks, and has to be written once each."""
    everyone = range(len(specs))
    holding = {root: tuple(ranks) for root, ranks in (holders_of or {}).items()}
    shared_bytes = _shared_piece_bytes(specs, layout)
    for rank, spec_of in enumerate(specs):
        alone = (rank,)
        for path, spec in spec_of.items():
            if isinstance(spec, TensorSpec):
                if spec.box is not None or spec.tied_to or (rank and spec.replicated):
                    continue
                ranks: Sequence[int] = alone
                if spec.replicated and not spec.by_rank_0:
                    ranks = everyone if holders_of is None else holding.get(path.partition("/")[0], alone)
                limit = shared_bytes if len(ranks) > 1 else layout.chunk_bytes
                for box, begin, end in _pieces(whole(spec.shape), spec.item_bytes, limit):
                    yield path, _Part(box, ranks, begin, end, spec.dtype, spec.is_tied, spec.replicated)
            elif isinstance(spec, BlobSpec) and not (rank and spec.replicated):
                part = _Part(_NO_BOX, alone, 0, spec.size_bytes, spec.dtype, True, spec.replicated, spec.digest)  # noqa: FBT003  # a Struct's fields
                yield path, part


def _cut_shards(specs: Sequence[RankSpecs], layout: Layout) -> Iterator[_PathPart]:
    """The parts of what is spread over ranks."""
    spread: dict[str, dict[int, TensorSpec]] = defaultdict(dict)
    for rank, spec_of in enumerate(specs):
        for path, spec in spec_of.items():
            if isinstance(spec, TensorSpec) and spec.box is not None:
                spread[path][rank] = spec
    shared_bytes = _shared_piece_bytes(specs, layout)
    # Models have few kinds of tensors, and specs that have come from other ranks are one object where they are equal.
    cut: dict[tuple[tuple[int, ...], ...], list[_Part]] = {}
    for path, shards in spread.items():
        kind = tuple(shards), tuple(map(id, shards.values()))
        parts = cut.get(kind)
        if parts is None:
            _check_shards(path, list(shards.values()))
            parts = cut[kind] = list(_parts_of_shards(shards, shared_bytes, layout))
        for part in parts:
            yield path, part


def _parts_of_shards(shards: Mapping[int, TensorSpec], shared_bytes: int, layout: Layout) -> Iterator[_Part]:
    holders: dict[Box, list[int]] = {}
    for rank, spec in shards.items():
        if spec.box is not None and not spec.tied_to:
            holders.setdefault(spec.box, []).append(rank)
    for box, ranks in holders.items():
        first, is_tied = shards[ranks[0]], any(shards[rank].is_tied for rank in ranks)
        limit = shared_bytes if len(ranks) > 1 else layout.chunk_bytes
        for piece, begin, end in _pieces(box, first.item_bytes, limit):
            if end:  # a rank may hold nothing of a tensor
                yield _Part(piece, tuple(ranks), begin, end, first.dtype, is_tied)


def _shared_piece_bytes(specs: Sequence[RankSpecs], layout: Layout) -> int:
    """Above this size, what several ranks hold is cut, so that each of them can write an equal share."""
    if len(specs) == 1:
        return layout.chunk_bytes
    shared = (spec for spec in specs[0].values() if isinstance(spec, TensorSpec) and (spec.replicated or spec.box))
    total = sum((spec.box or whole(spec.shape)).volume * spec.item_bytes for spec in shared)
    share = total // (len(specs) * _SHARED_PIECES_PER_RANK)
    return min(layout.chunk_bytes, max(share, _MIN_SHARED_PIECE_BYTES))


def _pieces(box: Box, item_bytes: int, limit_bytes: int) -> Iterable[tuple[Box, int, int]]:
    """Global box and row-major byte range of each piece of what a rank holds."""
    size_bytes = box.volume * item_bytes
    if size_bytes <= limit_bytes:
        return ((box, 0, size_bytes),)
    row_bytes = prod(box.sizes[1:]) * item_bytes
    pieces = []
    for piece in split_first_dimension(box.sizes, item_bytes, limit_bytes):
        begin = piece.offsets[0] * row_bytes if piece.offsets else 0
        offsets = tuple(o + p for o, p in zip(box.offsets, piece.offsets, strict=True))
        pieces.append((Box(offsets, piece.sizes), begin, begin + piece.volume * item_bytes))
    return pieces


def _check_shards(path: str, shards: Sequence[TensorSpec]) -> None:
    kinds = {(spec.dtype, spec.item_bytes, spec.shape): None for spec in shards}
    if len(kinds) > 1:
        msg = f"{path}: expected one dtype and shape on all ranks, found {', '.join(map(str, kinds))}"
        raise UnsupportedValueError(msg)
    defect = find_tiling_defect(shards[0].shape, [spec.box for spec in shards if spec.box is not None])
    if defect:
        msg = f"{path}: the shards of all ranks do not make up the tensor of shape {list(shards[0].shape)}: {defect}"
        raise UnsupportedValueError(msg)


def _check_replicas(specs: Sequence[RankSpecs]) -> None:
    first = specs[0]
    for rank, spec_of in enumerate(specs):
        if spec_of is first:
            continue
        for path, spec in spec_of.items():
            if not (isinstance(spec, TensorSpec) and spec.box is not None):
                _check_replica(path, first.get(path), spec, rank)
        for path, spec in first.items():
            if path not in spec_of:
                _check_replica(path, spec, None, rank)


_Spec: TypeAlias = Entry | TensorSpec | BlobSpec | None


def _check_replica(path: str, first: _Spec, spec: _Spec, rank: int) -> None:
    if first == spec:
        return
    if (_is_replicated(first) or _is_replicated(spec)) and _common(first) != _common(spec):
        msg = f"{path}: marked replicated, but rank 0 has {first} and rank {rank} has {spec}"
        raise UnsupportedValueError(msg)


def _common(spec: _Spec) -> object:
    """What must be equal on all ranks. Equal objects may be pickled to different bytes, and ties are a rank's own."""
    if isinstance(spec, BlobSpec):
        return msgspec.structs.replace(spec, size_bytes=0, digest="")
    return msgspec.structs.replace(spec, tied_to="", is_tied=False) if isinstance(spec, TensorSpec) else spec


def _assign(parts: Sequence[_Part], world_size: int) -> list[int]:
    """The rank that writes each part: the only holder, or the holder with the least to write so far."""
    load_bytes = [0] * world_size
    writer = [-1] * len(parts)
    for index, part in enumerate(parts):
        if len(part.ranks) == 1:
            writer[index] = part.ranks[0]
            load_bytes[writer[index]] += part.size_bytes
    shared = [index for index, rank in enumerate(writer) if rank < 0]
    heaps: dict[Sequence[int], list[tuple[int, int]]] = {}
    # Largest first balances best; the index makes the order total.
    for index in sorted(shared, key=lambda i: (-parts[i].size_bytes, i)):
        ranks = parts[index].ranks
        heap = heaps.get(ranks)
        if heap is None:
            heap = heaps[ranks] = sorted((load_bytes[rank], rank) for rank in ranks)
        # Loads only grow, so what a heap has missed can only move a rank down.
        while heap[0][0] != load_bytes[heap[0][1]]:
            heapq.heapreplace(heap, (load_bytes[heap[0][1]], heap[0][1]))
        writer[index] = rank = heap[0][1]
        load_bytes[rank] += parts[index].size_bytes
    return writer


@dataclass(slots=True)
class _RankFiles:
    """The files of one rank while they are being filled."""

    prefix: str
    file_bytes: int
    files: list[FilePlan] = field(default_factory=list)
    names: int = 0
    location: str = ""
    pieces: list[Piece] = field(default_factory=list)
    size_bytes: int = 0

    def put(self, path: str, part: _Part) -> Shard:
        begin, end = part.begin_bytes, part.end_bytes
        size_bytes = end - begin
        if part.own_file:
            location = self._next_name()
            self.files.append(FilePlan(location, size_bytes, (Piece(path, begin, end, 0),)))
            return part.at(location, None)
        alignment = _PAGE_BYTES if size_bytes >= _LARGE_BYTES else _SMALL_ALIGNMENT_BYTES
        offset = -(-self.size_bytes // alignment) * alignment
        if self.pieces and offset + size_bytes > self.file_bytes:
            self.close()
            offset = 0
        self.location = self.location or self._next_name()
        self.pieces.append(Piece(path, begin, end, offset))
        self.size_bytes = offset + size_bytes
        return part.at(self.location, (offset, self.size_bytes))

    def close(self) -> None:
        if self.pieces:
            self.files.append(FilePlan(self.location, self.size_bytes, tuple(self.pieces)))
        self.location, self.pieces, self.size_bytes = "", [], 0

    def _next_name(self) -> str:
        self.names += 1
        return f"{self.prefix}{self.names - 1}"


_Places: TypeAlias = Sequence[Mapping[str, list[Shard]]]
"""Rank whose entry names them → logical path → pieces."""


def _place(
    parts: Sequence[_PathPart], writers: Sequence[int], world_size: int, layout: Layout
) -> tuple[_Places, tuple[tuple[FilePlan, ...], ...]]:
    ranks = [_RankFiles(f".data/{layout.save_id}/{rank}_", layout.file_bytes) for rank in range(world_size)]
    places: list[dict[str, list[Shard]]] = [{} for _ in range(world_size)]
    blobs: dict[str, Shard] = {}
    # Rank by rank, so that what belongs together lies together in memory: a quarter of the time.
    for index in sorted(range(len(parts)), key=writers.__getitem__):
        (path, part), rank = parts[index], writers[index]
        place = blobs.get(part.digest) if part.digest else None
        if place is None:
            place = ranks[rank].put(path, part)
            if part.digest:
                blobs[part.digest] = place
        of_owner = places[0 if part.replicated else rank]
        if path in of_owner:
            of_owner[path].append(place)
        else:
            of_owner[path] = [place]
    for files in ranks:
        files.close()
    return places, tuple(tuple(files.files) for files in ranks)


def _entries(specs: Sequence[RankSpecs], places: _Places) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for rank, spec_of in enumerate(specs):
        prefix, own = f"{rank}/", places[rank]
        for path, spec in spec_of.items():
            if isinstance(spec, TensorSpec):
                if rank and spec.replicated:
                    continue  # one copy, under rank 0 (FORMAT 7.4)
                of_owner = own
                if spec.tied_to and _is_replicated(spec_of[spec.tied_to]):
                    of_owner = places[0]  # where the one copy was written is known under rank 0
                entries[prefix + path] = _tensor_entry(spec, of_owner.get(spec.tied_to or path, []))
            elif rank and _is_replicated(spec):
                continue
            elif isinstance(spec, BlobSpec):
                entries[prefix + path] = _blob_entry(spec, own[path][0].tensor.location)
            else:
                entries[prefix + path] = spec
    return entries


def _is_replicated(spec: _Spec) -> bool:
    if spec is None or isinstance(spec, (ListEntry, DictEntry, OrderedDictEntry, ShardedTensorEntry, DTensorEntry)):
        return False
    return spec.replicated


def _tensor_entry(spec: TensorSpec, places: list[Shard]) -> Entry:
    if len(places) > 1:
        places = sorted(places, key=lambda place: place.offsets)
    if spec.box is not None:
        return ShardedTensorEntry(places) if places else _NO_SHARDS
    if len(places) > 1:
        return ChunkedTensorEntry(spec.dtype, spec.shape, places, spec.replicated)
    entry = places[0].tensor
    return msgspec.structs.replace(entry, replicated=True) if spec.replicated else entry


def _blob_entry(spec: BlobSpec, location: str) -> Entry:
    if spec.obj_type:
        return ObjectEntry(location, "torch_save", spec.obj_type, spec.replicated)
    return TensorEntry(location, "torch_save", spec.dtype, spec.shape, spec.replicated)
