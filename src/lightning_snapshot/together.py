"""A save in which several ranks take part: each writes a share, rank 0 plans and publishes.

state → specs ─exchange→ everyone's specs ─write_plan→ plan ─exchange→ each rank's part ─execute→ receipts ─exchange→
rank 0 ─commit→ ``.snapshot_metadata``. A rank that fails makes all of them raise, and nothing is published.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any, NoReturn, Protocol, TypeAlias

import torch
import xxhash
from msgspec.structs import replace

from lightning_snapshot import __version__, tensors
from lightning_snapshot.commit import commit, replaced_locations
from lightning_snapshot.describe import Described, Sharing, describe
from lightning_snapshot.devices import SideStreams
from lightning_snapshot.errors import RankError, UnsupportedValueError
from lightning_snapshot.exchange import Contribution, Opening, Part, collect, distribute, hand_in, open_save
from lightning_snapshot.execute import Means
from lightning_snapshot.group import Group, Meeting
from lightning_snapshot.manifest import Extension, FileRecord, Manifest, PrimitiveEntry, RankNotes
from lightning_snapshot.memory import memory_at, no_garbage_collection
from lightning_snapshot.options import Options
from lightning_snapshot.saving import Saving
from lightning_snapshot.session import Heard, Session
from lightning_snapshot.stats import Meter, Stats
from lightning_snapshot.storage import Storage, Transaction
from lightning_snapshot.tree import decode_key, encode_key
from lightning_snapshot.write_plan import BlobSpec, FilePlan, Holders, Layout, RankSpecs, TensorSpec
from lightning_snapshot.writing import Writing

__all__ = ["MainRankSharing", "Save", "begin_as_one", "begin_each", "fail_together", "save_as_one", "save_each"]

_SUBJECT = "save a snapshot"
_MAX_NAMED = 5
_LEAVES = (PrimitiveEntry, BlobSpec, TensorSpec)
_logger = logging.getLogger("lightning_snapshot")


_Prepared: TypeAlias = tuple[Opening, Described, list[Contribution] | None, Holders | None]
"""What is agreed, what this rank has, and on rank 0 what everybody has and who holds it."""


@dataclass(frozen=True, slots=True)
class Save:
    """What a save of several ranks needs besides the state; the same on all ranks, except for the path.

    Attributes:
        path: Where it goes. If the ranks differ, that of rank 0 counts.
        open_storage: Gives the storage at a path.
        save_id: Unique name of this save; that of rank 0 counts.
        options: The knobs.
        session: What earlier saves have left for this one.
        group: The ranks that take part.
        claim: Let the place exist from the beginning, as an empty folder if nothing else is there.
    """

    path: str
    open_storage: Callable[[str], Storage]
    save_id: str
    options: Options
    session: Session
    group: Group
    claim: bool = False


class MainRankSharing(Protocol):
    """Says what all ranks have in common in a state of which rank 0's is the one that counts."""

    def is_shared(self, key: str) -> bool:
        """Whether rank 0's value of a top-level key counts, whatever other ranks have there."""
        ...

    def is_split(self, path: str, tensor: torch.Tensor) -> bool:
        """Whether all ranks hold a tensor below such a key alike, so that any of them may write it."""
        ...


# --- states of which rank 0's counts ---------------------------------------------------------------------------------


def save_as_one(
    state: Mapping[str, Any], save: Save, sharing: MainRankSharing, *, check_replicas: bool = False
) -> Stats:
    """Save a state that all ranks have, with what each rank has of its own.

    Of a top-level key that is shared, rank 0's value is stored, and tensors that all ranks hold alike are written by
    all of them, each a part. Tensors that are spread over ranks are stored once, whoever holds them. Of any other key,
    each rank whose value differs from rank 0's stores its own.

    Called on all ranks of the group; returns on each when the snapshot is published.

    Args:
        state: Top-level key → value, nested at will. Tensors are read in place until this returns.
        save: Where and how.
        sharing: What is shared.
        check_replicas: Compare the content of all tensors that all ranks should hold alike.

    Returns:
        What this rank did.

    Raises:
        UnsupportedValueError: A value cannot be stored, or replicas differ; nothing was written.
        StorageError: The storage failed on some rank; what was there before is still there.
        SnapshotError: Another rank failed; the message names it.
    """
    return begin_as_one(state, save, sharing, check_replicas=check_replicas).finish()


def begin_as_one(
    state: Mapping[str, Any], save: Save, sharing: MainRankSharing, *, check_replicas: bool = False
) -> Saving:
    """Begin a save like `save_as_one`, up to the point where tensors are read; everything else is captured by then.

    Args and errors are those of `save_as_one`. Until the save has ended, no other one of the group can begin.
    """

    def prepare(run: _Run) -> _Prepared:
        summary = _Summary(state, sharing, save.group.world_size)
        opening = run.open(summary.digests)
        described = summary.of_rank_0() if save.group.rank == 0 else summary.of_other(opening, save.group.rank)
        holds = tuple(key for key in summary.shared if summary.digests[key] == opening.keys.get(key))
        replicas = summary.replicas(holds) if check_replicas else {}
        mine = Contribution(described.specs, described.notes, holds, replicas)
        everyone = collect(run.meeting, save.session.heard, opening, mine)
        if everyone is None:
            return opening, described, None, None
        _check_replicas([each.replicas for each in everyone])
        everyone[0] = replace(everyone[0], specs=_with_common(everyone))
        return opening, described, everyone, _holders(everyone)

    return _begin(save, prepare)


class _Summary:
    """What a rank has under each top-level key, in a form that can be compared."""

    def __init__(self, state: Mapping[str, Any], sharing: MainRankSharing, world_size: int) -> None:
        self._state = state
        self._sharing = sharing
        self._world_size = world_size
        by_key = _ByKey(sharing)
        self._described = {
            key: describe({key: value}, sharing=by_key, world_size=world_size) for key, value in state.items()
        }
        self.shared = [
            key
            for key, described in self._described.items()
            if sharing.is_shared(key) or any(map(_is_spread, described.specs.values()))
        ]
        self.digests = {
            key: _structure_digest(described) if key in self.shared else _content_digest(described)
            for key, described in self._described.items()
        }

    def of_rank_0(self) -> Described:
        return describe(self._state, sharing=_ByKey(self._sharing), world_size=self._world_size)

    def of_other(self, opening: Opening, rank: int) -> Described:
        """What differs from rank 0, and this rank's parts of tensors that are spread over ranks."""
        own = {
            key: value
            for key, value in self._state.items()
            if key not in self.shared and self.digests[key] != opening.keys.get(key)
        }
        described = describe(own, world_size=self._world_size, alias_prefix=f"{rank}-")
        specs, sources, notes = dict(described.specs), dict(described.sources), described.notes
        for key in self.shared:
            shared = self._described[key]
            specs |= {path: spec for path, spec in shared.specs.items() if _is_spread(spec)}
            sources |= {path: source for path, source in shared.sources.items() if path not in sources}
        return Described(specs, sources, replace(notes, over_rank_0=True))

    def replicas(self, keys: Iterable[str]) -> dict[str, str]:
        """Path → digest of the content of each tensor that all ranks should hold alike."""
        found: dict[str, str] = {}
        for key in keys:
            described = self._described[key]
            for path, spec in described.specs.items():
                source = described.sources.get(path)
                is_split = isinstance(spec, TensorSpec) and spec.replicated and not spec.by_rank_0
                if is_split and isinstance(source, tensors.TensorSource):
                    found[path] = _hash(source)
        return found


@dataclass(frozen=True, slots=True)
class _ByKey:
    sharing: MainRankSharing

    def is_shared(self, path: str) -> bool:
        return self.sharing.is_shared(decode_key(path.partition("/")[0]))

    def is_split(self, path: str, tensor: torch.Tensor) -> bool:
        return self.sharing.is_split(path, tensor)


def _is_spread(spec: object) -> bool:
    return isinstance(spec, TensorSpec) and spec.box is not None


def _structure_digest(described: Described) -> str:
    """Equal on ranks that could write each other's tensors, as far as these are not spread over ranks."""
    tensor_specs = [
        (path, spec)
        for path, spec in described.specs.items()
        if isinstance(spec, TensorSpec) and spec.replicated and not spec.by_rank_0
    ]
    return xxhash.xxh3_128_hexdigest(repr(tensor_specs).encode())


def _content_digest(described: Described) -> str:
    """Equal for equal values."""
    digest = xxhash.xxh3_128(repr((list(described.specs.items()), described.notes)).encode())
    for source in described.sources.values():
        if isinstance(source, tensors.TensorSource):  # of others, the spec has a digest
            digest.update(_hash(source).encode())
    return digest.hexdigest()


def _hash(source: tensors.TensorSource) -> str:
    if not source.address:
        source = tensors.TensorSource(source.tensor.detach().cpu().contiguous().resolve_conj().resolve_neg())
    return xxhash.xxh3_128_hexdigest(memory_at(source.address, source.tensor.nbytes))


def _check_replicas(replicas: Sequence[Mapping[str, str]]) -> None:
    for path, digest in replicas[0].items():
        wrong = [rank for rank, found in enumerate(replicas) if found.get(path, digest) != digest]
        if wrong:
            ranks = ", ".join(map(str, wrong[:_MAX_NAMED])) + (" and more" if len(wrong) > _MAX_NAMED else "")
            msg = (
                f"{path}: expected equal values on all ranks, found others than rank 0's on rank {ranks}; nothing was "
                "saved. Something in the training changes the ranks' parameters differently"
            )
            raise UnsupportedValueError(msg)


def _with_common(everyone: Sequence[Contribution]) -> RankSpecs:
    """Rank 0's specs, in which everything that no rank has for itself is marked as shared."""
    own = {root for each in everyone[1:] for root in each.notes.roots}

    def marked(path: str, spec: Any) -> Any:
        if not isinstance(spec, _LEAVES) or spec.replicated or _is_spread(spec):
            return spec
        if decode_key(path.partition("/")[0]) in own:
            return spec
        if isinstance(spec, TensorSpec):
            return replace(spec, replicated=True, by_rank_0=True)
        return replace(spec, replicated=True)

    return {path: marked(path, spec) for path, spec in everyone[0].specs.items()}


def _holders(everyone: Sequence[Contribution]) -> Holders:
    keys = everyone[0].holds
    return {encode_key(key): [rank for rank, each in enumerate(everyone) if key in each.holds] for key in keys}


# --- states of which each rank has its own ---------------------------------------------------------------------------


def save_each(get_state: Callable[[], Mapping[str, Any]], save: Save, sharing: Sharing) -> Stats:
    """Save what each rank has, each under its own number, except for what is shared.

    Called on all ranks of the group; returns on each when the snapshot is published.

    Args:
        get_state: Gives app key → value of this rank. Called when all ranks are there, so that all hear if it fails.
            Tensors are read in place until this returns.
        save: Where and how.
        sharing: What all ranks hold alike, and is stored once. A value that is shared by some ranks only is none.

    Returns:
        What this rank did.

    Raises:
        UnsupportedValueError: A value cannot be stored, or ranks disagree about what they share; nothing was written.
        StorageError: The storage failed on some rank; what was there before is still there.
        SnapshotError: Another rank failed; the message names it.
    """
    return begin_each(get_state, save, sharing).finish()


def begin_each(get_state: Callable[[], Mapping[str, Any]], save: Save, sharing: Sharing) -> Saving:
    """Begin a save like `save_each`, up to the point where tensors are read; everything else is captured by then.

    Args and errors are those of `save_each`. Until the save has ended, no other one of the group can begin.
    """

    def prepare(run: _Run) -> _Prepared:
        opening = run.open({})
        described = describe(get_state(), sharing=sharing, world_size=save.group.world_size)
        mine = Contribution(described.specs, described.notes)
        everyone = collect(run.meeting, save.session.heard, opening, mine)
        return opening, described, everyone and _shared_by_all(everyone), None

    return _begin(save, prepare)


def _shared_by_all(everyone: list[Contribution]) -> list[Contribution]:
    """The contributions, in which only what each rank has and calls shared is marked as shared."""
    first = everyone[0].specs
    if all(each.specs == first for each in everyone):
        return everyone
    marked = Counter(chain.from_iterable(_marked(each.specs) for each in everyone))
    partly = {path for path, count in marked.items() if count < len(everyone)}
    if not partly:
        return everyone
    known_to_all = sorted(path for path in partly if all(path in each.specs for each in everyone))
    if known_to_all:
        _logger.warning(
            "%d values, such as %s, are replicated on some ranks only, so each rank stores its own: the globs differ",
            len(known_to_all),
            known_to_all[0],
        )

    def unmarked(path: str, spec: Any) -> Any:
        if path not in partly or not isinstance(spec, _LEAVES):
            return spec
        return replace(spec, replicated=False, **({"by_rank_0": False} if isinstance(spec, TensorSpec) else {}))

    return [replace(each, specs={path: unmarked(path, spec) for path, spec in each.specs.items()}) for each in everyone]


def _marked(specs: RankSpecs) -> Iterator[str]:
    return (path for path, spec in specs.items() if isinstance(spec, _LEAVES) and spec.replicated)


# --- what both have in common ----------------------------------------------------------------------------------------


def fail_together(group: Group, error: BaseException) -> NoReturn:
    """In place of a save that the other ranks begin: let it fail on all of them for what only this rank knows.

    Raises:
        BaseException: The error.
    """
    with group.meet(_SUBJECT):
        raise error


def _begin(save: Save, prepare: "Callable[[_Run], _Prepared]") -> Saving:
    with ExitStack() as stack:
        run = stack.enter_context(_together(save))
        with run.meter.stage("plan"), no_garbage_collection():
            opening, described, everyone, holders = prepare(run)
            if everyone is None:
                transaction, files, publish = run.take_part(opening)
            else:
                transaction, files, publish = run.lead(opening, everyone, holders)
            options = save.options
            pool = save.session.pool(options, options.block_bytes)
            means = Means(pool, options.block_bytes, options.threads, run.meter, SideStreams(), run.meeting.check)
            writing = Writing(files, described.sources, transaction, means)
        return Saving(writing, run.meter, publish, stack.pop_all())


@contextmanager
def _together(save: Save) -> Iterator["_Run"]:
    """A meeting for a save. After a failure, nothing is left, and nobody relies on what was said before."""
    run: _Run | None = None
    try:
        with save.group.meet(_SUBJECT) as meeting:
            run = _Run(save, meeting, Meter("save", save.path))
            yield run
    except BaseException:
        save.session.heard = Heard()
        # Not before the meeting has ended: by then, the other ranks know that they need not go on writing.
        if run is not None and run.transaction is not None:
            run.transaction.abort()
        raise


_Publish: TypeAlias = Callable[[dict[str, FileRecord]], Stats]


@dataclass(slots=True)
class _Run:
    save: Save
    meeting: Meeting
    meter: Meter
    transaction: Transaction | None = None

    def open(self, keys: dict[str, str]) -> Opening:
        """Agree on where the save goes."""
        save = self.save
        mine = Opening(save.save_id, save.path, save.session.heard.token, keys)
        opening = open_save(self.meeting, mine if save.group.rank == 0 else None)
        if opening.path != save.path:
            _logger.warning("rank 0 saves to %s, so %s is not written", opening.path, save.path)
        return opening

    def lead(
        self, opening: Opening, everyone: Sequence[Contribution], holders: Holders | None
    ) -> tuple[Transaction, Sequence[FilePlan], _Publish]:
        """Plan, and tell the other ranks; on rank 0."""
        options = self.save.options
        storage = self.save.open_storage(opening.path)
        layout = Layout(opening.save_id, options.chunk_bytes, options.file_bytes)
        plan = self.save.session.planner.plan([each.specs for each in everyone], layout, holders)
        notes = [each.notes for each in everyone]
        replaced = replaced_locations(storage)
        transaction = self.transaction = storage.begin(opening.save_id, claim=self.save.claim)
        parts = [Part(transaction.invitation, files) for files in plan.files]
        distribute(self.meeting, self.save.session.heard, opening, parts)

        def publish(mine: dict[str, FileRecord]) -> Stats:
            receipts = hand_in(self.meeting, mine) or {}
            with self.meter.stage("commit"), no_garbage_collection():
                for file in chain.from_iterable(plan.files[1:]):
                    transaction.adopt(file.location, file.size_bytes)
                extension = _extension(opening.save_id, options, notes, receipts)
                manifest = Manifest("0.1.0", len(notes), plan.entries, extension)
                commit(transaction, storage, manifest, chain.from_iterable(plan.files), replaced)
            return self._finish(opening)

        return transaction, plan.files[0], publish

    def take_part(self, opening: Opening) -> tuple[Transaction, Sequence[FilePlan], _Publish]:
        """Hear what rank 0 has planned; on the other ranks."""
        part = distribute(self.meeting, self.save.session.heard, opening, None)
        storage = self.save.open_storage(opening.path)
        transaction = self.transaction = storage.join(opening.save_id, part.invitation)

        def publish(mine: dict[str, FileRecord]) -> Stats:
            hand_in(self.meeting, mine)
            with self.meter.stage("commit"):
                stats = self._finish(opening)
            transaction.abort()  # a guest has nothing to publish, and nothing to remove
            return stats

        return transaction, part.files, publish

    def _finish(self, opening: Opening) -> Stats:
        self.meeting.broadcast("published")
        try:
            # What rank 0 has said may end with its process, and with the store in it. The others do not wait here.
            self.meeting.gather("seen", b"")
        except RankError as error:
            _logger.warning("%s is saved, but not all ranks may know: %s", opening.path, error)
        session = self.save.session
        session.heard.token = opening.save_id
        session.last_save = self.meter.finish()
        return session.last_save


def _extension(
    save_id: str, options: Options, notes: Sequence[RankNotes], receipts: dict[str, FileRecord]
) -> Extension:
    return Extension(
        save_id=save_id,
        writer=f"lightning-snapshot {__version__}",
        block_bytes=options.block_bytes,
        files=receipts,
        ranks={str(rank): each for rank, each in enumerate(notes)},
    )
