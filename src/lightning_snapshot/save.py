"""state ─tree→ leaves ─tensors→ specs ─write_plan→ plan ─execute→ receipts ─commit→ ``.snapshot_metadata``."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from msgspec.structs import replace

from lightning_snapshot import __version__, objects, tensors
from lightning_snapshot.commit import commit, replaced_locations
from lightning_snapshot.devices import SideStreams
from lightning_snapshot.execute import Means, write_all
from lightning_snapshot.manifest import Entry, Extension, FileRecord, Manifest, RankNotes, TensorNote
from lightning_snapshot.memory import no_garbage_collection
from lightning_snapshot.options import Options
from lightning_snapshot.session import Session
from lightning_snapshot.stats import Meter, Stats
from lightning_snapshot.storage import Storage
from lightning_snapshot.tree import FlatState, Leaf, flatten
from lightning_snapshot.write_plan import BlobSpec, Layout, TensorSpec

__all__ = ["save"]

_WORLD_SIZE = 1


def save(
    state: Mapping[str, Any], storage: Storage, *, save_id: str, options: Options, session: Session | None = None
) -> Stats:
    """Save a state, durably and in one step: afterwards the old or the new snapshot is there, never a mix.

    Tensors are read in place while this runs, so nobody may change them meanwhile.

    Args:
        state: App key → value, nested at will.
        storage: Where it goes.
        save_id: Unique name of this save.
        options: The knobs.
        session: What earlier saves have left for this one.

    Returns:
        What was done.

    Raises:
        UnsupportedValueError: A value cannot be stored; nothing was written.
        StorageError: The storage failed; what was there before is still there.
    """
    session = session or Session()
    meter = Meter("save", storage.url)
    means = Means(
        session.pool(options, options.block_bytes), options.block_bytes, options.threads, meter, SideStreams()
    )
    with meter.stage("plan"), no_garbage_collection():
        flat = flatten(state, is_tensor=tensors.is_tensor)
        leaves = _encode_leaves(flat)
        plan = session.planner.plan([leaves.specs], Layout(save_id, options.chunk_bytes, options.file_bytes))
        replaced = replaced_locations(storage)
        transaction = storage.begin(save_id)
    try:
        with meter.stage("write"):
            receipts = write_all(plan.files[0], leaves.sources, transaction, means)
        with meter.stage("commit"), no_garbage_collection():
            extension = _extension(save_id, options, flat, leaves, receipts)
            manifest = Manifest("0.1.0", _WORLD_SIZE, plan.entries, extension)
            commit(transaction, storage, manifest, plan.files[0], replaced)
    except BaseException:
        transaction.abort()
        raise
    session.last_save = meter.finish()
    return session.last_save


@dataclass(frozen=True, slots=True)
class _Leaves:
    """A flat state whose leaves have become specs; keys are logical paths.

    Attributes:
        specs: Entries and specs, in order.
        sources: Where the bytes of the specs come from.
        notes: Notes on tensors.
        tied: Tensor → tensor that shares its memory.
    """

    specs: dict[str, Entry | TensorSpec | BlobSpec] = field(default_factory=dict)
    sources: dict[str, tensors.TensorSource | bytes] = field(default_factory=dict)
    notes: dict[str, TensorNote] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)


def _encode_leaves(flat: FlatState) -> _Leaves:
    """Turn leaves into specs. Every value that cannot be stored fails here, before anything is written."""
    leaves = _Leaves()
    first_path: dict[tuple[object, ...], str] = {}
    for path, item in flat.items.items():
        if not isinstance(item, Leaf):
            leaves.specs[path] = item
            continue
        kind = tensors.storage_kind(item.value, item.place) if item.is_tensor else "object"
        if kind == "dense":
            _add_dense(leaves, first_path, path, item.value)
        else:
            _add_blob(leaves, path, item, kind)
        if item.is_tensor and (note := tensors.tensor_note(item.value)):
            leaves.notes[path] = note
    return leaves


def _add_dense(leaves: _Leaves, first_path: dict[tuple[object, ...], str], path: str, tensor: torch.Tensor) -> None:
    spec = tensors.tensor_spec(tensor)
    first = first_path.setdefault(tensors.memory_key(tensor), path)
    if first != path:
        leaves.specs[first] = replace(spec, is_tied=True)
        spec = replace(spec, tied_to=first, is_tied=True)
        leaves.tied[path] = first
    leaves.specs[path] = spec
    leaves.sources[path] = tensors.TensorSource(tensor)


def _add_blob(leaves: _Leaves, path: str, item: Leaf, kind: str) -> None:
    if kind == "zip":
        value = tensors.portable(item.value)
        data = objects.dumps(value, item.place)
        spec = BlobSpec(len(data), _digest(data), dtype=str(value.dtype), shape=tuple(value.shape))
    else:
        value = tensors.compact(item.value) if item.is_tensor else item.value
        data = objects.dumps(value, item.place)
        spec = BlobSpec(len(data), _digest(data), obj_type=objects.type_name(item.value))
    leaves.specs[path] = spec
    leaves.sources[path] = data


def _digest(data: bytes) -> str:
    # Two blobs with one digest share a file, so the digest must be beyond doubt.
    return hashlib.sha256(data).hexdigest()


def _extension(
    save_id: str, options: Options, flat: FlatState, leaves: _Leaves, receipts: Mapping[str, FileRecord]
) -> Extension:
    notes = RankNotes(tuple(flat.roots), flat.containers, leaves.notes, leaves.tied, flat.same, flat.moved)
    return Extension(
        save_id=save_id,
        writer=f"lightning-snapshot {__version__}",
        block_bytes=options.block_bytes,
        files=dict(receipts),
        ranks={"0": notes},
    )
