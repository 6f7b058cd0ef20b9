"""What one rank sees of a snapshot: its own entries, what is replicated, and sharded tensors as a whole (FORMAT 8)."""

from collections.abc import Collection, Iterable, Mapping

import msgspec

from lightning_snapshot.errors import EntryNotFoundError, MetadataError
from lightning_snapshot.manifest import (
    ChunkedTensorEntry,
    DictEntry,
    DTensorEntry,
    Entry,
    ListEntry,
    Manifest,
    ObjectEntry,
    OrderedDictEntry,
    PrimitiveEntry,
    RankNotes,
    ShardedTensorEntry,
    TensorEntry,
    split_rank,
)
from lightning_snapshot.tree import ALIAS_ROOT, decode_key, encode_key

__all__ = [
    "Located",
    "kept_back",
    "keys_of_single_ranks",
    "ranks_with",
    "split_rank",
    "stands_on_rank_0",
    "values_of_ranks",
    "view_of_rank",
    "with_asked",
]

_CONTAINERS = (ListEntry, DictEntry, OrderedDictEntry)
# Lists that stand for something which has all of its items or is nothing.
_INDIVISIBLE = frozenset({"tuple", "namedtuple", "items"})


class Located(msgspec.Struct, frozen=True, gc=False):
    """An entry as a rank sees it.

    Attributes:
        path: Manifest path that it came from.
        entry: The entry; for a sharded tensor with the shards of all ranks.
        rank: Rank that ``path`` begins with. Notes of the extension are found under it and the logical path.
    """

    path: str
    entry: Entry
    rank: str


def view_of_rank(manifest: Manifest, rank: int) -> dict[str, Located]:
    """Give the entries that make up the state of a rank.

    A rank that did not exist when the snapshot was taken gets rank 0's containers with what is replicated or sharded
    in them; or all that rank 0 has, if the others are only what differs from it.

    Args:
        manifest: The snapshot.
        rank: Any rank from 0 on.

    Returns:
        Logical path → entry, first in the order of the rank's own entries.

    Raises:
        EntryNotFoundError: The rank is negative.
        MetadataError: Ranks disagree about the kind of a sharded tensor.
    """
    if rank < 0:
        msg = f"expected a rank from 0 on, found {rank}"
        raise EntryNotFoundError(msg)
    if stands_on_rank_0(manifest, rank):
        return _view_over_rank_0(manifest, rank)
    if rank >= manifest.world_size:
        return _view_of_new_rank(manifest, view_of_rank(manifest, 0))
    view: dict[str, Located] = {}
    replicated: dict[str, Located] = {}
    sharded: dict[str, dict[int, Located]] = {}
    owners: dict[str, int] = {}
    for path, entry in manifest.entries.items():
        text, _, logical_path = path.partition("/")
        owner = owners[text] if text in owners else owners.setdefault(text, split_rank(path)[0])
        located = Located(path, entry, text)
        if owner == rank:
            view[logical_path] = located
        if isinstance(entry, ShardedTensorEntry) or (isinstance(entry, DTensorEntry) and not _is_replicated(entry)):
            sharded.setdefault(logical_path, {})[owner] = located
        elif owner == 0 and _is_replicated(entry):
            replicated[logical_path] = located
    view |= replicated
    listed = _Listed(view, rank)
    for logical_path, parts in sharded.items():
        if rank in parts:
            view[logical_path] = _merge(logical_path, parts, rank)
        elif logical_path not in view and listed.has(logical_path, parts):
            view[logical_path] = _merge(logical_path, parts, min(parts))
    return view


def with_asked(manifest: Manifest, view: Mapping[str, Located], asked: Collection[str]) -> dict[str, Located]:
    """A view with those tensors spread over ranks that the reader asks for, and no others (FORMAT 9.3).

    So a rank gets the shards of a table that another rank had at the save, and none of a table that is elsewhere now.

    Args:
        manifest: The snapshot.
        view: Of any rank.
        asked: Logical paths of what the reader has.
    """
    sharded: dict[str, dict[int, Located]] = {}
    for path, entry in manifest.entries.items():
        if isinstance(entry, (ShardedTensorEntry, DTensorEntry)):
            owner, logical_path = split_rank(path)
            sharded.setdefault(logical_path, {})[owner] = Located(path, entry, str(owner))
    changed = dict(view)
    added: dict[str, list[str | int]] = {}  # path of a dictionary → keys
    dropped: dict[str, set[str]] = {}
    for logical_path, parts in sharded.items():
        parent, _, token = logical_path.rpartition("/")
        container = view[parent].entry if parent in view else None
        if not isinstance(container, (DictEntry, OrderedDictEntry)) or parent.startswith(ALIAS_ROOT):
            continue  # a list cannot do without an item, and nobody knows to ask for what is under an alias
        if logical_path in asked and logical_path not in view:
            owner = min(parts)
            changed[logical_path] = _merge(logical_path, parts, owner)
            key = _original_key(manifest, f"{owner}/{parent}", decode_key(token))
            added.setdefault(parent, []).append(key)
        elif logical_path in view and logical_path not in asked:
            del changed[logical_path]
            dropped.setdefault(parent, set()).add(decode_key(token))
    for parent in (*added, *dropped):
        entry = view[parent].entry
        if isinstance(entry, (DictEntry, OrderedDictEntry)):
            kept = [key for key in entry.keys if str(key) not in dropped.get(parent, ())]
            keys = dict.fromkeys([*kept, *added.get(parent, ())])  # a rank may list what another one has
            changed[parent] = Located(view[parent].path, type(entry)([*keys]), view[parent].rank)
    return changed


def _original_key(manifest: Manifest, container_path: str, text: str) -> str | int:
    container = manifest.entries.get(container_path)
    keys = container.keys if isinstance(container, (DictEntry, OrderedDictEntry)) else ()
    return next((key for key in keys if str(key) == text), text)


def ranks_with(manifest: Manifest, root: str) -> list[int]:
    """Ranks that have an entry for a top-level value."""
    return [rank for rank in range(manifest.world_size) if f"{rank}/{root}" in manifest.entries]


def kept_back(manifest: Manifest, rank: int, root: str) -> list[str]:
    """What a rank that did not exist at the save does not get of a top-level value, because each rank had its own.

    Args:
        manifest: The snapshot.
        rank: The rank.
        root: Logical path of the value.

    Returns:
        Logical paths of rank 0's leaves.
    """
    view = view_of_rank(manifest, rank)
    paths = (path.partition("/")[2] for path in values_of_ranks(manifest, [0], root))
    return [path for path in paths if path not in view]


def values_of_ranks(manifest: Manifest, ranks: Collection[int], root: str) -> list[str]:
    """Manifest paths of the leaves of a top-level value that ranks have for themselves alone."""
    if not ranks:
        return []
    found = []
    for path, entry in manifest.entries.items():
        owner, logical_path = split_rank(path)
        if owner in ranks and (logical_path == root or logical_path.startswith(f"{root}/")):
            is_shared = _is_replicated(entry) or isinstance(entry, (*_CONTAINERS, ShardedTensorEntry, DTensorEntry))
            if not is_shared:
                found.append(path)
    return found


def stands_on_rank_0(manifest: Manifest, rank: int) -> bool:
    """Whether a rank has what rank 0 has, except for the top-level keys that are stored under it."""
    if manifest.extension is None or rank == 0:
        return False
    notes = manifest.extension.ranks.get(str(min(rank, manifest.world_size - 1)))
    return notes is not None and notes.over_rank_0


def keys_of_single_ranks(manifest: Manifest) -> list[str]:
    """The top-level keys of which some rank has another value than rank 0, where ranks stand on rank 0."""
    ranks = manifest.extension.ranks.values() if manifest.extension else ()
    return sorted({key for notes in ranks if notes.over_rank_0 for key in notes.roots})


def keys_of_spread_tensors(manifest: Manifest) -> set[str]:
    """The top-level keys below which there are tensors that are spread over ranks."""
    spread = (path for path, entry in manifest.entries.items() if isinstance(entry, (ShardedTensorEntry, DTensorEntry)))
    return {decode_key(path.split("/")[1]) for path in spread}


def _view_over_rank_0(manifest: Manifest, rank: int) -> dict[str, Located]:
    view = view_of_rank(manifest, 0)
    if manifest.extension is None or rank >= manifest.world_size:
        return view
    text = str(rank)
    own = {encode_key(key) for key in manifest.extension.ranks[text].roots}
    view = {path: located for path, located in view.items() if path.partition("/")[0] not in own}
    for path, entry in manifest.entries.items():
        owner, _, logical_path = path.partition("/")
        if owner == text and logical_path.partition("/")[0] in (*own, ALIAS_ROOT):
            view[logical_path] = Located(path, entry, owner)
    return view


def _is_replicated(entry: Entry) -> bool:
    if isinstance(entry, (PrimitiveEntry, TensorEntry, ChunkedTensorEntry, ObjectEntry)):
        return entry.replicated
    return isinstance(entry, DTensorEntry) and all(dimensions == [-1] for dimensions in entry.dim_map)


def _merge(logical_path: str, parts: Mapping[int, Located], owner: int) -> Located:
    entries = [parts[rank].entry for rank in sorted(parts)]
    shards = [
        shard for entry in entries if isinstance(entry, (ShardedTensorEntry, DTensorEntry)) for shard in entry.shards
    ]
    shards.sort(key=lambda shard: shard.offsets)
    first = entries[0]
    if len({type(entry) for entry in entries}) > 1:
        found = ", ".join(f"{type(part.entry).__name__} at {part.path!r}" for part in parts.values())
        msg = f"{logical_path!r}: expected the same kind of sharded tensor on all ranks, found {found}"
        raise MetadataError(msg)
    if isinstance(first, DTensorEntry):
        return Located(parts[owner].path, DTensorEntry(shards, first.mesh, first.dim_map), parts[owner].rank)
    return Located(parts[owner].path, ShardedTensorEntry(shards), parts[owner].rank)


class _Listed:
    """Tells whether a rank's state has a sharded tensor of which another rank keeps the entry (FORMAT 7.6)."""

    def __init__(self, view: Mapping[str, Located], rank: int) -> None:
        self._view = view
        self._rank = rank
        self._keys: dict[str, set[str]] = {}

    def has(self, logical_path: str, parts: Mapping[int, Located]) -> bool:
        parent, _, token = logical_path.rpartition("/")
        container = self._view[parent].entry if parent in self._view else None
        if isinstance(container, ListEntry):
            # A list does not say which items it has.
            return any(
                isinstance(p.entry, DTensorEntry) and _mentions(p.entry.mesh, self._rank) for p in parts.values()
            )
        if not isinstance(container, (DictEntry, OrderedDictEntry)):
            return False
        if parent not in self._keys:
            self._keys[parent] = {str(key) for key in container.keys}
        return decode_key(token) in self._keys[parent]


def _mentions(mesh: Iterable[object], rank: int) -> bool:
    pending = list(mesh)
    while pending:
        item = pending.pop()
        if isinstance(item, list):
            pending.extend(item)
        elif item == rank:
            return True
    return False


def _view_of_new_rank(manifest: Manifest, of_rank_0: Mapping[str, Located]) -> dict[str, Located]:
    view = {
        path: located
        for path, located in of_rank_0.items()
        if isinstance(located.entry, (*_CONTAINERS, ShardedTensorEntry, DTensorEntry)) or _is_replicated(located.entry)
    }
    moved: dict[str, str] = {}
    if manifest.extension is not None:
        notes_of_rank_0 = manifest.extension.ranks.get("0", RankNotes())
        notes, moved = notes_of_rank_0.containers, notes_of_rank_0.moved
        # Such an object is a part of its container, not an item.
        extras = {note.extra for path, note in notes.items() if not path or path in view}
        view |= {path: located for path, located in of_rank_0.items() if path in extras}
        indivisible = {path for path, note in notes.items() if note.kind in _INDIVISIBLE}
        _drop_incomplete(view, of_rank_0, indivisible, {alias: path for path, alias in moved.items()})
    for path, located in view.items():
        entry = located.entry
        if isinstance(entry, (DictEntry, OrderedDictEntry)):
            present = [key for key in entry.keys if _has_child(view, moved, path, str(key))]
            view[path] = Located(located.path, type(entry)(present), located.rank)
    return view


def _drop_incomplete(
    view: dict[str, Located], of_rank_0: Iterable[str], indivisible: set[str], origin: Mapping[str, str]
) -> None:
    """Remove the indivisible containers that lack an item, with all that is in them.

    Args:
        view: What is left of rank 0's view; changed in place.
        of_rank_0: All paths of rank 0's view.
        indivisible: Paths of such containers.
        origin: Alias path → the path that it stands for.
    """
    children: dict[str, list[str]] = {}
    parents: dict[str, str] = {}
    for path in of_rank_0:
        parents[path] = parent = origin.get(path, path).rpartition("/")[0]
        children.setdefault(parent, []).append(path)
    incomplete: set[str] = set()
    pending = [path for path in parents if path not in view]
    while pending:
        parent = parents.get(pending.pop(), "")
        if parent in indivisible and parent not in incomplete:
            incomplete.add(parent)
            pending.append(parent)
    pending = list(incomplete)
    while pending:
        path = pending.pop()
        if view.pop(path, None) is not None:
            pending.extend(children.get(path, ()))


def _has_child(view: Mapping[str, Located], moved: Mapping[str, str], path: str, key: str) -> bool:
    # Before percent-encoding, keys went into paths as they were (FORMAT 13).
    children = (f"{path}/{encode_key(key)}", f"{path}/{key}")
    return any(moved.get(child, child) in view for child in children)
