"""``.snapshot_metadata`` ─manifest→ entries ─read_plan→ plan ─execute→ leaves ─tree→ state."""

import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, TypeGuard, TypeVar

import torch

from lightning_snapshot import objects, tensors
from lightning_snapshot.errors import (
    DataError,
    EntryNotFoundError,
    MetadataError,
    MissingDataError,
    SnapshotError,
    TargetMismatchError,
)
from lightning_snapshot.execute import read_all
from lightning_snapshot.geometry import whole
from lightning_snapshot.manifest import (
    DictEntry,
    Entry,
    FileRecord,
    ListEntry,
    Manifest,
    ObjectEntry,
    OrderedDictEntry,
    PrimitiveEntry,
    RankNotes,
    TensorEntry,
    TensorNote,
    decode,
    split_rank,
)
from lightning_snapshot.memory import BufferPool
from lightning_snapshot.options import Options
from lightning_snapshot.read_plan import Blob, Fetch, ReadPlan, StoredTensor, TensorLike, plan_read, stored_tensor
from lightning_snapshot.rebuild import StateTree, read_primitive
from lightning_snapshot.storage import Storage
from lightning_snapshot.tensors import TensorTarget
from lightning_snapshot.tree import encode_key
from lightning_snapshot.view import Located, view_of_rank

__all__ = ["load", "read_manifest", "read_value"]

_T = TypeVar("_T")
# Beyond this, the block size in a damaged or hostile extension would decide how much memory is taken.
_MAX_BLOCK_BYTES = 64 * 1024 * 1024
# Loads that lose the race against other processes that save over the snapshot, before giving up.
_MAX_ATTEMPTS = 10
# A block must not end inside an element.
_WIDEST_ELEMENT_BYTES = 16
_CPU = torch.device("cpu")


def read_manifest(storage: Storage) -> Manifest:
    """The manifest of a snapshot.

    Raises:
        SnapshotNotFoundError: There is nothing.
        NotASnapshotError: There is something else.
        MetadataError: The metadata is damaged.
    """
    return decode(storage.read_metadata(), source=f"{storage.url}/.snapshot_metadata")


def load(
    storage: Storage,
    *,
    rank: int,
    options: Options,
    keys: Collection[str] | None = None,
    targets: Mapping[str, torch.Tensor] | None = None,
    device: torch.device = _CPU,
) -> dict[str, Any]:
    """Load the state that a rank sees.

    Args:
        storage: The snapshot.
        rank: Any rank from 0 on; one that did not exist at the save gets what is shared.
        options: The knobs.
        keys: Top-level keys to load; all by default. Nothing else is read.
        targets: Logical path → tensor of the caller into which the stored one is read, if dtype and shape are equal;
            it then stands in the returned state. When this raises, targets may be partly filled.
        device: Where tensors without a target go.

    Returns:
        App key → state, with types, order and aliasing as they were saved; sharded tensors come in full.

    Raises:
        EntryNotFoundError: A key is not in the snapshot.
        MetadataError: The metadata is damaged or contradicts itself.
        DataError: A data file is missing or damaged.
        UnsafeObjectError: A value needs code that is not known to be safe, and ``options.trusted`` is false.
    """
    return _with_retry(storage, lambda manifest: _load(storage, manifest, rank, options, keys, targets or {}, device))


def read_value(storage: Storage, path: str, *, options: Options, target: torch.Tensor | None = None) -> Any:
    """Load one value.

    Args:
        storage: The snapshot.
        path: Manifest path, ``<rank>/<logical path>``, seen through that rank's view.
        options: The knobs.
        target: Tensor to read into.

    Raises:
        EntryNotFoundError: There is no value under that path, or a container.
        TargetMismatchError: The target has another dtype or shape than the stored tensor, or none is stored there.
        MetadataError: The metadata is damaged or contradicts itself.
        DataError: A data file is missing or damaged.
        UnsafeObjectError: The value needs code that is not known to be safe, and ``options.trusted`` is false.
    """
    return _with_retry(storage, lambda manifest: _read_value(storage, manifest, path, options, target))


def _with_retry(storage: Storage, action: Callable[[Manifest], _T]) -> _T:
    """Run ``action`` on the manifest, and again on a newer one if somebody saves over the snapshot meanwhile."""
    try:
        manifest = read_manifest(storage)
        for _ in range(_MAX_ATTEMPTS - 1):
            try:
                return action(manifest)
            except MissingDataError:  # noqa: PERF203  # a load is not made slower by it
                newer = read_manifest(storage)
                if newer == manifest:
                    raise
                manifest = newer
        return action(manifest)
    except SnapshotError as error:
        _name_snapshot(storage, error)
        raise


def _name_snapshot(storage: Storage, error: SnapshotError) -> None:
    """Put the snapshot into the message of an error; deeper down only the place inside it is known."""
    if len(error.args) == 1 and storage.url not in str(error):
        error.args = (f"{storage.url}: {error.args[0]}",)


def _load(
    storage: Storage,
    manifest: Manifest,
    rank: int,
    options: Options,
    keys: Collection[str] | None,
    targets: Mapping[str, torch.Tensor],
    device: torch.device,
) -> dict[str, Any]:
    view = view_of_rank(manifest, rank)
    notes = _notes(manifest, rank)
    if notes is not None and rank >= manifest.world_size:
        # A new rank has those of rank 0's roots that are shared.
        seen = tuple(key for key in notes.roots if notes.moved.get(encode_key(key), encode_key(key)) in view)
        notes = RankNotes(seen, notes.containers, notes.tensors, notes.tied, notes.same, notes.moved)
    tree = StateTree({path: located.entry for path, located in view.items()}, notes)
    roots = tree.roots if keys is None else {key: _root(storage, tree, key) for key in keys}
    paths = tree.leaf_paths(roots.values(), with_root_attributes=keys is None)
    leaves = _Leaves(storage, manifest, view, options, targets, device).read(paths)
    resolve_class = partial(objects.find_class, trusted=options.trusted)
    state = dict(zip(roots, tree.build(roots.values(), leaves.__getitem__, resolve_class), strict=True))
    return tree.root_container(state, leaves.__getitem__) if keys is None else state


def _root(storage: Storage, tree: StateTree, key: str) -> str:
    roots = tree.roots
    if key not in roots:
        msg = f"{storage.url}: expected the key {key!r}, found only {sorted(roots)}"
        raise EntryNotFoundError(msg)
    return roots[key]


def _read_value(storage: Storage, manifest: Manifest, path: str, options: Options, target: torch.Tensor | None) -> Any:
    rank, logical_path = split_rank(path)
    view = view_of_rank(manifest, rank)
    if logical_path not in view:
        msg = f"{storage.url}: expected an entry {path!r}, found none; get_manifest() lists what is there"
        raise EntryNotFoundError(msg)
    entry = view[logical_path].entry
    if isinstance(entry, (ListEntry, DictEntry, OrderedDictEntry)):
        msg = f"{storage.url}: {path!r} is a container; read its items, or the whole with get_state_dict_for_key()"
        raise EntryNotFoundError(msg)
    if isinstance(entry, PrimitiveEntry):
        return read_primitive(path, entry)
    targets = {} if target is None else {logical_path: target}
    leaves = _Leaves(storage, manifest, view, options, targets, _CPU)
    value = leaves.read([logical_path])[logical_path]
    if target is not None and value is not target:
        found = f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        msg = f"{path}: the target is {target.dtype} {list(target.shape)}, the snapshot holds {found}"
        raise TargetMismatchError(msg)
    return value


def _notes(manifest: Manifest, rank: int) -> RankNotes | None:
    if manifest.extension is None:
        return None
    return manifest.extension.ranks.get(str(rank if rank < manifest.world_size else 0), RankNotes())


class _Leaves:
    """Reads tensors and objects of one rank's view."""

    def __init__(
        self,
        storage: Storage,
        manifest: Manifest,
        view: Mapping[str, Located],
        options: Options,
        targets: Mapping[str, torch.Tensor],
        device: torch.device,
    ) -> None:
        self._storage = storage
        self._manifest = manifest
        self._view = view
        self._options = options
        self._given = targets
        self._fillable: dict[str, torch.Tensor] = {}
        self._device = device
        self._notes: dict[str, RankNotes | None] = {}
        self._tensors: dict[str, StoredTensor] = {}
        self._memory: dict[str, TensorTarget] = {}
        self._memory_lock = threading.Lock()

    def read(self, paths: Sequence[str]) -> dict[str, Any]:
        """Logical path → value, for each of ``paths``."""
        wanted = set(paths)
        tied = {path: first for path in paths if (first := self._tied_to(path)) in wanted}
        objects_at: dict[str, tuple[str, tuple[int, int] | None]] = {}
        for path in paths:
            entry = self._view[path].entry
            if path in tied:
                continue
            if isinstance(entry, ObjectEntry):
                objects_at[path] = entry.location, None
            elif _is_quantized(entry):
                objects_at[path] = entry.location, entry.byte_range
            else:
                self._tensors[path] = stored_tensor(path, _tensor_entry(path, entry))
        given = {path: self._given[path] for path in self._tensors if path in self._given}
        self._fillable = tensors.without_overlaps({p: t for p, t in given.items() if tensors.is_fillable(t)})
        wholes = {path: (tensor, self._item_bytes(path), None) for path, tensor in self._tensors.items()}
        values = self._decode(self._execute(plan_read(wholes, objects_at)))
        values |= {path: self._finish(path, self._target(path).tensor) for path in self._tensors}
        values |= {path: self._finish(path, values[first].detach()) for path, first in tied.items()}
        return values

    def _execute(self, plan: ReadPlan) -> dict[Blob, bytearray]:
        extension = self._manifest.extension
        records: Mapping[str, FileRecord] = {} if extension is None else extension.files
        block_bytes = self._options.block_bytes if extension is None else extension.block_bytes
        if block_bytes > _MAX_BLOCK_BYTES or block_bytes % _WIDEST_ELEMENT_BYTES:
            msg = (
                f"{self._storage.url}: expected blocks of at most {_MAX_BLOCK_BYTES} bytes that are multiples of "
                f"{_WIDEST_ELEMENT_BYTES}, found {block_bytes}"
            )
            raise MetadataError(msg)
        parts: Iterable[Fetch | Blob] = chain(plan.fetches, plan.blobs)
        unknown = [part for part in parts if extension is not None and part.location not in records]
        if unknown:
            msg = f"{unknown[0].path}: expected a record of its file {unknown[0].location}, found none"
            raise MetadataError(msg)
        return read_all(
            plan,
            self._target,
            self._storage,
            records,
            BufferPool(self._options.memory_budget_bytes, block_bytes),
            block_bytes=block_bytes,
            threads=self._options.threads,
            verify=self._options.verify,
        )

    def _decode(self, blobs: Mapping[Blob, bytearray]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for blob, content in blobs.items():
            value = objects.loads(
                content, self._view[blob.path].path, trusted=self._options.trusted, device=self._device
            )
            if blob.piece is None:
                values[blob.path] = self._finish(blob.path, value)
            elif isinstance(value, torch.Tensor) and tensors.is_piece(value, blob.piece.sizes):
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
        if target is not None:
            return target
        with self._memory_lock:
            if path not in self._memory:
                self._memory[path] = self._new_target(path, self._dtype(path) or dtype)
            return self._memory[path]

    def _new_target(self, path: str, dtype: torch.dtype | None) -> TensorTarget:
        shape = self._tensors[path].shape
        given = self._fillable.get(path)
        if dtype is None:
            msg = f"{path}: expected the name of a dtype, found none"
            raise MetadataError(msg)
        if given is not None and given.dtype == dtype and tuple(given.shape) == shape:
            return TensorTarget.existing(given)
        note = self._note(path)
        dim_order = note.dim_order if note else None
        return TensorTarget.allocate(dtype, whole(shape), dim_order, self._device, path)

    def _finish(self, path: str, value: Any) -> Any:
        given = self._given.get(path)
        if not isinstance(value, torch.Tensor):
            return value
        if given is not None and tensors.is_same_view(value, given):
            return given
        return tensors.finish(value, self._note(path), path)

    def _dtype(self, path: str) -> torch.dtype | None:
        note = self._note(path)
        name = note.dtype if note and note.dtype else self._tensors[path].dtype
        return tensors.dtype_named(name, path) if name else None

    def _item_bytes(self, path: str) -> int:
        dtype, stored = self._dtype(path), self._tensors[path].dtype
        if dtype is None:
            return 0  # such tensors come as torch.save blobs only
        if stored and tensors.dtype_named(stored, path).itemsize != dtype.itemsize:
            msg = f"{path}: expected a stored dtype as wide as {dtype}, found {stored}"
            raise MetadataError(msg)
        return dtype.itemsize

    def _rank_notes(self, path: str) -> tuple[RankNotes | None, str]:
        rank, _, logical_path = self._view[path].path.partition("/")
        if rank not in self._notes:
            self._notes[rank] = _notes(self._manifest, int(rank))
        return self._notes[rank], logical_path

    def _note(self, path: str) -> TensorNote | None:
        notes, logical_path = self._rank_notes(path)
        return notes.tensors.get(logical_path) if notes else None

    def _tied_to(self, path: str) -> str | None:
        """Path of the first tensor that has the memory of this one, if the entries bear out what the notes say."""
        notes, logical_path = self._rank_notes(path)
        first = notes.tied.get(logical_path) if notes else None
        if notes is None or first is None or first not in self._view or first in notes.tied:
            return None
        entry = self._view[path].entry
        return first if isinstance(entry, TensorLike) and entry == self._view[first].entry else None


def _is_quantized(entry: Entry) -> TypeGuard[TensorEntry]:
    return isinstance(entry, TensorEntry) and entry.dtype.startswith("torch.q") and entry.serializer == "torch_save"


def _tensor_entry(path: str, entry: Entry) -> TensorLike:
    if isinstance(entry, TensorLike):
        return entry
    msg = f"{path}: expected a tensor or an object, found {type(entry).__name__}"
    raise MetadataError(msg)
