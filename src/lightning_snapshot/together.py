"""What all saves of several ranks have in common: each rank writes a share, rank 0 plans and publishes.

state → specs ─exchange→ everyone's specs ─write_plan→ plan ─exchange→ each rank's part ─execute→ receipts ─exchange→
rank 0 ─commit→ ``.snapshot_metadata``. A rank that fails makes all of them raise, and nothing is published.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import NoReturn, TypeAlias

from lightning_snapshot import __version__
from lightning_snapshot.commit import commit, replaced_locations
from lightning_snapshot.describe import Described
from lightning_snapshot.devices import SideStreams
from lightning_snapshot.errors import RankError
from lightning_snapshot.exchange import Contribution, Opening, Part, distribute, hand_in, open_save
from lightning_snapshot.execute import Means
from lightning_snapshot.group import Group, Meeting
from lightning_snapshot.manifest import Extension, FileRecord, Manifest, PrimitiveEntry, RankNotes
from lightning_snapshot.memory import no_garbage_collection
from lightning_snapshot.options import Options
from lightning_snapshot.saving import Saving
from lightning_snapshot.session import Heard, Session
from lightning_snapshot.stats import Meter, Stats
from lightning_snapshot.storage import Storage, Transaction
from lightning_snapshot.write_plan import BlobSpec, FilePlan, Holders, Layout, TensorSpec
from lightning_snapshot.writing import Writing

__all__ = ["LEAVES", "Prepared", "Run", "Save", "begin", "fail_together"]

LEAVES = (PrimitiveEntry, BlobSpec, TensorSpec)
"""What may be marked as shared."""

_SUBJECT = "save a snapshot"
_logger = logging.getLogger("lightning_snapshot")

Prepared: TypeAlias = tuple[Opening, Described, list[Contribution] | None, Holders | None]
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


def fail_together(group: Group, error: BaseException) -> NoReturn:
    """In place of a save that the other ranks begin: let it fail on all of them for what only this rank knows.

    Raises:
        BaseException: The error.
    """
    with group.meet(_SUBJECT):
        raise error


def begin(save: Save, prepare: "Callable[[Run], Prepared]") -> Saving:
    """Begin a save, up to the point where tensors are read.

    Args:
        save: Where and how.
        prepare: Called when all ranks are there, so that all hear if it fails; says what is to be saved.
    """
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
def _together(save: Save) -> Iterator["Run"]:
    """A meeting for a save. After a failure, nothing is left, and nobody relies on what was said before."""
    run: Run | None = None
    try:
        with save.group.meet(_SUBJECT) as meeting:
            run = Run(save, meeting, Meter("save", save.path))
            yield run
    except BaseException:
        save.session.heard = Heard()
        # Not before the meeting has ended: by then, the other ranks know that they need not go on writing.
        if run is not None and run.transaction is not None:
            run.transaction.abort()
        raise


_Publish: TypeAlias = Callable[[dict[str, FileRecord]], Stats]


@dataclass(slots=True)
class Run:
    """One save, while its ranks meet.

    Attributes:
        save: Where and how.
        meeting: Of its ranks.
        meter: What it costs this rank.
        transaction: What has to be taken back if it fails.
    """

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
