"""Tensors and objects of a snapshot: from the entries of one rank's view to their values."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeGuard, TypeVar

import msgspec
import torch

from lightning_snapshot import objects, tensors
from lightning_snapshot.devices import SideStreams
from lightning_snapshot.errors import DataError, MetadataError, TargetMismatchError
from lightning_snapshot.execute import Means, check_range, open_checked, read_all
from lightning_snapshot.geometry import Box, box_of_index, whole
from lightning_snapshot.manifest import Entry, FileRecord, Manifest, ObjectEntry, RankNotes, TensorEntry, TensorNote
from lightning_snapshot.memory import no_garbage_collection
from lightning_snapshot.options import Options
from lightning_snapshot.read_plan import Blob, Fetch, ReadPlan, StoredTensor, TensorLike, plan_read, stored_tensor
from lightning_snapshot.session import Session
from lightning_snapshot.stats import Meter
from lightning_snapshot.storage import Storage
from lightning_snapshot.tensors import TensorTarget
from lightning_snapshot.tree import encode_key
from lightning_snapshot.view import stands_on_rank_0, view_of_rank, with_asked

__all__ = ["LeafReader", "Request"]

# Beyond this, the block size in a damaged or hostile extension would decide how much memory is taken.
_MAX_BLOCK_BYTES = 64 * 1024 * 1024
# A block must not end inside an element.
_WIDEST_ELEMENT_BYTES = 16
# A tensor in torch.save's format may show one element in many places; a dense one has memory for each.
_MAX_EXPANSION = 1000
_MAX_EXPANDED_BYTES = 64 * 1024 * 1024
_NO_NOTES = RankNotes()
_CPU = torch.device("cpu")
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Request:
    """What a load wants, and with what.

    Attributes:
        rank: Whose view.
        options: The knobs.
        session: What earlier loads have left.
        meter: Notes what is done.
        targets: Logical path → tensor of the caller to read into.
        device: Where tensors without a target go.
        mmap: Map tensors instead of reading them, where that is possible.
        asked: Logical paths of what the caller has, if that decides which tensors spread over ranks it gets.
    """

    rank: int
    options: Options
    session: Session
    meter: Meter
    targets: Mapping[str, torch.Tensor] = field(default_factory=dict)
    device: torch.device = _CPU
    mmap: bool = False
    asked: Collection[str] = ()


class _Wanted(msgspec.Struct, frozen=True, gc=False):
    """A tensor that is to be read; ``box`` is the part, if not all of it."""

    stored: StoredTensor
    note: TensorNote | None
    dtype: torch.dtype | None
    box: Box | None

    @property
    def target_box(self) -> Box:
        return self.box or whole(self.stored.shape)


class LeafReader:
    """Reads tensors and objects of one rank's view of a snapshot.

    Attributes:
        storage: The snapshot.
        manifest: What it says of itself.
        request: What the caller wants.
        view: Logical path → entry, as the rank sees it.
    """

    def __init__(self, storage: Storage, manifest: Manifest, request: Request) -> None:
        self.storage = storage
        self.request = request
        with request.meter.stage("plan"), no_garbage_collection():
            self.view = view_of_rank(manifest, request.rank)
            if request.asked:
                self.view = with_asked(manifest, self.view, request.asked)
        self.manifest = manifest
        self._fillable: dict[str, torch.Tensor] = {}
        self._filled: set[str] = set()
        self._maps: dict[str, Any] = {}
        self._tensors: dict[str, _Wanted] = {}
        self._memory: dict[str, TensorTarget] = {}

    def notes_of_view(self) -> RankNotes | None:
        """What the extension says about the containers of the view; ``None`` in snapshots of torchsnapshot."""
        manifest, view, rank = self.manifest, self.view, self.request.rank
        if manifest.extension is None:
            return None
        if stands_on_rank_0(manifest, rank):
            return _notes_over_rank_0(self._notes_of("0"), self._notes_of(str(rank)))
        if rank < manifest.world_size:
            return self._notes_of(str(rank))
        # A new rank has those of rank 0's roots that are shared.
        notes = self._notes_of("0")
        seen = tuple(key for key in notes.roots if notes.moved.get(encode_key(key), encode_key(key)) in view)
        return RankNotes(seen, notes.containers, notes.tensors, notes.tied, notes.same, notes.moved)

    def read(self, paths: Sequence[str]) -> dict[str, Any]:
        """Logical path → value, for each of ``paths``."""
        with self.request.meter.stage("plan"), no_garbage_collection():
            tied, objects_at, values = self._sort(paths)
            given = {path: self._local(path) for path in self._tensors if path in self.request.targets}
            self._fillable = tensors.without_overlaps({p: t for p, t in given.items() if tensors.is_fillable(t)})
            plan = self._plan(objects_at)
        with self.request.meter.stage("read"):
            blobs = self._execute(plan)
        with self.request.meter.stage("rebuild"), no_garbage_collection():
            values |= self._decode(blobs)
            values |= {path: self._value(path, wanted) for path, wanted in self._tensors.items()}
            for path, first in tied.items():
                values[path] = self._finish(path, values[first].detach())
        return values

    def read_part(self, path: str, index: Any, target: torch.Tensor | None) -> torch.Tensor:
        """The elements of a tensor that an index selects, into ``target`` if there is one."""
        entry = self.view[path].entry
        if not isinstance(entry, TensorLike) or _is_quantized(entry):
            msg = f"{path}: only dense tensors have an index, found {entry}"
            raise TargetMismatchError(msg)
        wanted = self._wanted(path, entry, self._notes_of(self.view[path].rank))
        try:
            box, removed = box_of_index(wanted.stored.shape, index)
        except (IndexError, TypeError) as error:
            msg = f"{path}: the index {index!r} does not fit a tensor of shape {list(wanted.stored.shape)}: {error}"
            raise TargetMismatchError(msg) from error
        self._tensors[path] = _Wanted(wanted.stored, None, wanted.dtype, box)
        if target is not None:
            shape = tuple(size for dimension, size in enumerate(box.sizes) if dimension not in removed)
            if target.dtype != wanted.dtype or tuple(target.shape) != shape or not tensors.is_fillable(target):
                msg = (
                    f"{path}: the target is {target.dtype} {list(target.shape)}, the index selects {wanted.dtype} "
                    f"{list(shape)}"
                )
                raise TargetMismatchError(msg)
            self._memory[path] = TensorTarget(tensors.unsqueezed(target.detach(), removed), box)
        self._decode(self._execute(self._plan({})))
        value = self._target(path).tensor
        return value.squeeze(removed) if target is None else target

    def _value(self, path: str, wanted: _Wanted) -> torch.Tensor:
        tensor = self._target(path).tensor
        if path in self._filled:
            return self.request.targets[path]
        if wanted.box is not None:
            return tensors.rejoined(tensor, self.request.targets[path])
        return tensors.finish(tensor, wanted.note, path)

    # --- planning ----------------------------------------------------------------------------------------------------

    def _sort(
        self, paths: Sequence[str]
    ) -> tuple[dict[str, str], dict[str, tuple[str, tuple[int, int] | None]], dict[str, Any]]:
        """Tensors that come from another one; what is read in one piece, and where; what is mapped already."""
        known = set(paths)
        tied: dict[str, str] = {}
        objects_at: dict[str, tuple[str, tuple[int, int] | None]] = {}
        mapped: dict[str, Any] = {}
        for path in paths:
            located = self.view[path]
            entry = located.entry
            notes = self._notes_of(located.rank)
            if notes.tied and (first := self._tied_to(path, notes)) in known:
                tied[path] = first
            elif isinstance(entry, ObjectEntry):
                objects_at[path] = entry.location, None
            elif _is_quantized(entry):
                objects_at[path] = entry.location, entry.byte_range
            else:
                wanted = self._wanted(path, _tensor_entry(path, entry), notes)
                is_new = path not in self.request.targets
                tensor = self._map(path, wanted) if self.request.mmap and is_new else None
                if tensor is None:
                    self._tensors[path] = wanted
                else:
                    mapped[path] = tensors.finish(tensor, wanted.note, path)
        return tied, objects_at, mapped

    def _local(self, path: str) -> torch.Tensor:
        """The memory of a tensor of the caller. Of one that is spread over ranks, only this rank's part is wanted."""
        target, wanted = self.request.targets[path], self._tensors[path]
        if not tensors.is_spread(target):
            return target
        part = tensors.local_part(target, path)
        if part.shape != wanted.stored.shape:
            msg = (
                f"{path}: the target has shape {list(part.shape)}, the snapshot {list(wanted.stored.shape)}; load into "
                "a model of the same shape"
            )
            raise TargetMismatchError(msg)
        self._tensors[path] = _Wanted(wanted.stored, wanted.note, wanted.dtype, part.box)
        return part.tensor

    def _wanted(self, path: str, entry: TensorLike, notes: RankNotes) -> _Wanted:
        stored = stored_tensor(path, entry)
        note = notes.tensors.get(path)
        name = note.dtype if note and note.dtype else stored.dtype
        dtype = tensors.dtype_named(name, path) if name else None
        is_stand_in = dtype is not None and stored.dtype not in ("", name)
        if dtype and is_stand_in and tensors.dtype_named(stored.dtype, path).itemsize != dtype.itemsize:
            msg = f"{path}: expected a stored dtype as wide as {dtype}, found {stored.dtype}"
            raise MetadataError(msg)
        return _Wanted(stored, note, dtype, None)

    def _plan(self, objects_at: Mapping[str, tuple[str, tuple[int, int] | None]]) -> ReadPlan:
        # Without a dtype, tensors come as torch.save blobs only.
        parts = {
            path: (wanted.stored, wanted.dtype.itemsize if wanted.dtype else 0, wanted.box)
            for path, wanted in self._tensors.items()
        }
        return plan_read(parts, objects_at)

    # --- reading -----------------------------------------------------------------------------------------------------

    def _execute(self, plan: ReadPlan) -> dict[Blob, bytearray]:
        records = self._records()
        extension = self.manifest.extension
        block_bytes = self.request.options.block_bytes if extension is None else extension.block_bytes
        if block_bytes > _MAX_BLOCK_BYTES or block_bytes % _WIDEST_ELEMENT_BYTES:
            msg = (
                f"{self.storage.url}: expected blocks of at most {_MAX_BLOCK_BYTES} bytes that are multiples of "
                f"{_WIDEST_ELEMENT_BYTES}, found {block_bytes}"
            )
            raise MetadataError(msg)
        parts: Iterable[Fetch | Blob] = chain(plan.fetches, plan.blobs)
        unknown = [part for part in parts if extension is not None and part.location not in records]
        if unknown:
            msg = f"{unknown[0].path}: expected a record of its file {unknown[0].location}, found none"
            raise MetadataError(msg)
        streams = SideStreams()
        given = [*self._fillable.values(), *(target.tensor for target in self._memory.values())]
        streams.follow({tensor.device for tensor in given} | {self.request.device})
        pool = self.request.session.pool(self.request.options, block_bytes)
        threads = max(self.request.options.threads, self.storage.min_threads)
        means = Means(pool, block_bytes, threads, self.request.meter, streams)
        return read_all(plan, self._target, self.storage, records, means, verify=self.request.options.verify)

    def _records(self) -> Mapping[str, FileRecord]:
        extension = self.manifest.extension
        return {} if extension is None else extension.files

    def _map(self, path: str, wanted: _Wanted) -> torch.Tensor | None:
        """A tensor that shows a stretch of a file; ``None`` if that cannot be."""
        pieces = wanted.stored.pieces
        if len(pieces) != 1 or pieces[0].is_zip or wanted.dtype is None or not pieces[0].box.volume:
            return None
        (fetch,) = plan_read({path: (wanted.stored, wanted.dtype.itemsize, None)}, {}).fetches
        if fetch.location not in self._maps:
            with closing(open_checked(self.storage, self._records(), fetch.location, path)) as reader:
                self._maps[fetch.location] = reader.map()
        memory = self._maps[fetch.location]
        if memory is None:
            return None
        check_range(fetch, len(memory))
        return tensors.mapped(memory, fetch.begin_bytes, wanted.dtype, wanted.stored.shape)

    def _decode(self, blobs: Mapping[Blob, bytearray]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for blob, content in blobs.items():
            value = objects.loads(
                content, self.view[blob.path].path, trusted=self.request.options.trusted, device=self.request.device
            )
            if blob.piece is None:
                values[blob.path] = self._finish(blob.path, value)
            elif isinstance(value, torch.Tensor) and tensors.is_piece(value, blob.piece.sizes):
                if value.nbytes > max(_MAX_EXPANDED_BYTES, _MAX_EXPANSION * len(content)):
                    msg = f"{blob.path}: expected elements in {blob.location}, found few that stand for {value.numel()}"
                    raise DataError(msg)
                target = self._target(blob.path, value.dtype)
                if target.tensor.dtype != value.dtype:
                    msg = f"{blob.path}: expected {target.tensor.dtype} in {blob.location}, found {value.dtype}"
                    raise DataError(msg)
                target.place(blob.piece, value)
            else:
                sizes = list(blob.piece.sizes)
                found = f"one of {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
                msg = f"{blob.path}: expected a dense tensor of sizes {sizes} in {blob.location}, found {found}"
                raise DataError(msg)
        return values

    def _target(self, path: str, dtype: torch.dtype | None = None) -> TensorTarget:
        """Where the elements of a tensor go. Fresh memory is taken at the first call, when file sizes are known."""
        target = self._memory.get(path)
        if target is None:
            target = self._memory[path] = self._new_target(path, self._tensors[path].dtype or dtype)
        return target

    def _new_target(self, path: str, dtype: torch.dtype | None) -> TensorTarget:
        wanted = self._tensors[path]
        given = self._fillable.get(path)
        if dtype is None:
            msg = f"{path}: expected the name of a dtype, found none"
            raise MetadataError(msg)
        if given is not None and given.dtype == dtype and tuple(given.shape) == wanted.target_box.sizes:
            self._filled.add(path)
            return TensorTarget(given.detach(), wanted.target_box)
        dim_order = wanted.note.dim_order if wanted.note and wanted.box is None else None
        return TensorTarget.allocate(dtype, wanted.target_box, dim_order, self.request.device, path)

    def _finish(self, path: str, value: Any) -> Any:
        given = self.request.targets.get(path)
        if not isinstance(value, torch.Tensor):
            return value
        if given is not None and tensors.is_same_view(value, given):
            return given
        return tensors.finish(value, self._notes_of(self.view[path].rank).tensors.get(path), path)

    # --- notes -------------------------------------------------------------------------------------------------------

    def _notes_of(self, rank: str) -> RankNotes:
        extension = self.manifest.extension
        return _NO_NOTES if extension is None else extension.ranks.get(rank, _NO_NOTES)

    def _tied_to(self, path: str, notes: RankNotes) -> str | None:
        """Path of the first tensor that has the memory of this one, if the entries bear out what the notes say."""
        first = notes.tied.get(path)
        if first is None or first not in self.view or first in notes.tied:
            return None
        entry = self.view[path].entry
        return first if isinstance(entry, TensorLike) and entry == self.view[first].entry else None


def _notes_over_rank_0(first: RankNotes, own: RankNotes) -> RankNotes:
    """Rank 0's notes, with those of a rank on the top-level keys that are its own."""
    replaced = {encode_key(key) for key in own.roots}

    def over(below: Mapping[str, _T], above: Mapping[str, _T]) -> dict[str, _T]:
        return {path: note for path, note in below.items() if path.partition("/")[0] not in replaced} | dict(above)

    def links(below: Mapping[str, str], above: Mapping[str, str]) -> dict[str, str]:
        kept = over(below, {})
        return {path: to for path, to in kept.items() if to.partition("/")[0] not in replaced} | dict(above)

    return RankNotes(
        tuple(dict.fromkeys((*first.roots, *own.roots))),
        over(first.containers, own.containers),
        over(first.tensors, own.tensors),
        links(first.tied, own.tied),
        links(first.same, own.same),
        over(first.moved, own.moved),
    )


def _is_quantized(entry: Entry) -> TypeGuard[TensorEntry]:
    return isinstance(entry, TensorEntry) and entry.dtype.startswith("torch.q") and entry.serializer == "torch_save"


def _tensor_entry(path: str, entry: Entry) -> TensorLike:
    if isinstance(entry, TensorLike):
        return entry
    msg = f"{path}: expected a tensor or an object, found {type(entry).__name__}"
    raise MetadataError(msg)
