"""``.snapshot_metadata`` ─manifest→ entries ─read_plan→ plan ─execute→ leaves ─tree→ state."""

import hashlib
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, TypeVar

import torch

from lightning_snapshot import objects
from lightning_snapshot.errors import EntryNotFoundError, MissingDataError, SnapshotError, TargetMismatchError
from lightning_snapshot.leaves import LeafReader, Request
from lightning_snapshot.manifest import (
    DictEntry,
    ListEntry,
    Manifest,
    OrderedDictEntry,
    PrimitiveEntry,
    decode,
    split_rank,
)
from lightning_snapshot.memory import no_garbage_collection
from lightning_snapshot.options import Options
from lightning_snapshot.rebuild import StateTree, read_primitive
from lightning_snapshot.session import Session
from lightning_snapshot.stats import Meter
from lightning_snapshot.storage import Storage
from lightning_snapshot.tree import encode_key
from lightning_snapshot.view import ranks_with

__all__ = ["load", "read_manifest", "read_value"]

_T = TypeVar("_T")
# Loads that lose the race against other processes that save over the snapshot, before giving up.
_MAX_ATTEMPTS = 10
_CPU = torch.device("cpu")


def read_manifest(storage: Storage, session: Session | None = None) -> Manifest:
    """The manifest of a snapshot.

    Args:
        storage: The snapshot.
        session: Remembers it. Not to be changed, then.

    Raises:
        SnapshotNotFoundError: There is nothing.
        NotASnapshotError: There is something else.
        MetadataError: The metadata is damaged.
    """
    with no_garbage_collection():
        data = storage.read_metadata()
        source = f"{storage.url}/.snapshot_metadata"
        if session is None:
            return decode(data, source=source)
        # Each object of a state is restored on its own, and with many ranks the text is long.
        digest = hashlib.blake2b(source.encode() + data).digest()
        known = session.last_read
        if known is None or known[0] != digest:
            session.last_read = known = digest, decode(data, source=source)
        return known[1]


def load(  # noqa: PLR0913  # by keyword, and each is a choice of the caller
    storage: Storage,
    *,
    rank: int | Callable[[Manifest], int],
    options: Options,
    keys: Collection[str] | None = None,
    skip: Collection[str] | Callable[[Manifest], Collection[str]] = (),
    targets: Mapping[str, torch.Tensor] | None = None,
    device: torch.device = _CPU,
    mmap: bool = False,
    session: Session | None = None,
    asked: Collection[str] = (),
) -> dict[str, Any]:
    """Load the state that a rank sees.

    Args:
        storage: The snapshot.
        rank: Any rank from 0 on; one that did not exist at the save gets what is shared. Or what says whose state it
            is to be, given the snapshot.
        options: The knobs.
        keys: Top-level keys to load; all by default. Nothing else is read.
        skip: Top-level keys that are left out if ``keys`` is not given; or what gives them, given the snapshot.
        targets: Logical path → tensor of the caller into which the stored one is read, if dtype and shape are equal;
            it then stands in the returned state. When this raises, targets may be partly filled.
        device: Where tensors without a target go.
        mmap: Map tensors on the CPU instead of reading them, where they lie in one piece in a local file. They are
            not verified, row-major, and what is written to them stays in memory.
        session: What earlier loads have left for this one.
        asked: Logical paths of what the caller has. If given, tensors that are spread over ranks come if they are
            among these, whichever rank has saved them, and no others.

    Returns:
        App key → state, with types, order and aliasing as they were saved; sharded tensors come in full.

    Raises:
        EntryNotFoundError: A key is not in the snapshot.
        MetadataError: The metadata is damaged or contradicts itself.
        DataError: A data file is missing or damaged.
        UnsafeObjectError: A value needs code that is not known to be safe, and ``options.trusted`` is false.
    """
    session = session or Session()
    meter = Meter("load", storage.url)

    def action(manifest: Manifest) -> dict[str, Any]:
        viewer = rank(manifest) if callable(rank) else rank
        request = Request(viewer, options, session, meter, targets or {}, device, mmap, asked)
        left_out = skip(manifest) if callable(skip) else skip
        return _load(LeafReader(storage, manifest, request), keys, left_out)

    state = _with_retry(storage, session, action)
    session.last_load = meter.finish()
    return state


def read_value(
    storage: Storage,
    path: str,
    *,
    options: Options,
    target: torch.Tensor | None = None,
    index: Any = None,
    mmap: bool = False,
    session: Session | None = None,
) -> Any:
    """Load one value.

    Args:
        storage: The snapshot.
        path: Manifest path, ``<rank>/<logical path>``, seen through that rank's view.
        options: The knobs.
        target: Tensor to read into.
        index: Part of a tensor to read: integers, slices with step 1, ``...``.
        mmap: As in `load`.
        session: What earlier loads have left for this one.

    Raises:
        EntryNotFoundError: There is no value under that path, or a container.
        TargetMismatchError: The target has another dtype or shape than what is read, none is stored there, or the
            index does not fit.
        MetadataError: The metadata is damaged or contradicts itself.
        DataError: A data file is missing or damaged.
        UnsafeObjectError: The value needs code that is not known to be safe, and ``options.trusted`` is false.
    """
    session = session or Session()
    meter = Meter("load", f"{storage.url}: {path}")
    rank, logical_path = split_rank(path)
    targets = {} if target is None or index is not None else {logical_path: target}

    request = Request(rank, options, session, meter, targets, mmap=mmap, asked=(logical_path,))

    def action(manifest: Manifest) -> Any:
        return _read_value(LeafReader(storage, manifest, request), path, logical_path, target, index)

    value = _with_retry(storage, session, action)
    session.last_load = meter.finish()
    return value


def _with_retry(storage: Storage, session: Session, action: Callable[[Manifest], _T]) -> _T:
    """Run ``action`` on the manifest, and again on a newer one if somebody saves over the snapshot meanwhile."""
    try:
        manifest = read_manifest(storage, session)
        for _ in range(_MAX_ATTEMPTS - 1):
            try:
                return action(manifest)
            except MissingDataError:  # noqa: PERF203  # a load is not made slower by it
                newer = read_manifest(storage, session)
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


def _load(leaves: LeafReader, keys: Collection[str] | None, skip: Collection[str]) -> dict[str, Any]:
    with leaves.request.meter.stage("plan"), no_garbage_collection():
        notes = leaves.notes_of_view()
        tree = StateTree({path: located.entry for path, located in leaves.view.items()}, notes)
        if keys is None:
            roots = {key: path for key, path in tree.roots.items() if key not in skip}
        else:
            roots = {key: _root(leaves, tree, key) for key in keys}
        paths = tree.leaf_paths(roots.values(), with_root_attributes=keys is None)
    values = leaves.read(paths)
    with leaves.request.meter.stage("rebuild"), no_garbage_collection():
        resolve_class = partial(objects.find_class, trusted=leaves.request.options.trusted)
        state = dict(zip(roots, tree.build(roots.values(), values.__getitem__, resolve_class), strict=True))
        return tree.root_container(state, values.__getitem__) if keys is None else state


def _root(leaves: LeafReader, tree: StateTree, key: str) -> str:
    roots = tree.roots
    if key not in roots:
        holders = ranks_with(leaves.manifest, encode_key(key))
        of_others = f"; rank {', '.join(map(str, holders))} stored {key!r} for itself" if holders else ""
        msg = f"{leaves.storage.url}: expected the key {key!r}, found only {sorted(roots)}{of_others}"
        raise EntryNotFoundError(msg)
    return roots[key]


def _read_value(leaves: LeafReader, path: str, logical_path: str, target: torch.Tensor | None, index: Any) -> Any:
    if logical_path not in leaves.view:
        msg = f"{leaves.storage.url}: expected an entry {path!r}, found none; get_manifest() lists what is there"
        raise EntryNotFoundError(msg)
    entry = leaves.view[logical_path].entry
    if isinstance(entry, (ListEntry, DictEntry, OrderedDictEntry)):
        msg = (
            f"{leaves.storage.url}: {path!r} is a container; read its items, or the whole with get_state_dict_for_key()"
        )
        raise EntryNotFoundError(msg)
    if index is not None:
        return leaves.read_part(logical_path, index, target)
    if isinstance(entry, PrimitiveEntry):
        return read_primitive(path, entry)
    value = leaves.read([logical_path])[logical_path]
    if target is not None and value is not target:
        found = f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
        msg = f"{path}: the target is {target.dtype} {list(target.shape)}, the snapshot holds {found}"
        raise TargetMismatchError(msg)
    return value
