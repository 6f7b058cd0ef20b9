"""state ─tree→ leaves ─tensors→ specs ─write_plan→ plan ─execute→ receipts ─commit→ ``.snapshot_metadata``."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from lightning_snapshot import __version__
from lightning_snapshot.commit import commit, replaced_locations
from lightning_snapshot.describe import Sharing, describe
from lightning_snapshot.devices import SideStreams
from lightning_snapshot.execute import Means
from lightning_snapshot.manifest import Extension, FileRecord, Manifest, RankNotes
from lightning_snapshot.memory import no_garbage_collection
from lightning_snapshot.options import Options
from lightning_snapshot.saving import Saving
from lightning_snapshot.session import Session
from lightning_snapshot.stats import Meter, Stats
from lightning_snapshot.storage import Storage, Transaction
from lightning_snapshot.write_plan import Layout
from lightning_snapshot.writing import Writing

__all__ = ["begin_save", "save"]

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
    return begin_save(state, storage, save_id=save_id, options=options, session=session).finish()


def begin_save(
    state: Mapping[str, Any],
    storage: Storage,
    *,
    save_id: str,
    options: Options,
    session: Session | None = None,
    claim: bool = False,
    sharing: Sharing | None = None,
) -> Saving:
    """Begin a save like `save`, up to the point where tensors are read. Everything else is captured when this returns.

    Args:
        state: As in `save`.
        storage: As in `save`.
        save_id: As in `save`.
        options: As in `save`.
        session: As in `save`.
        claim: Let the place exist from now on, as an empty folder if nothing else is there.
        sharing: What ranks get that do not exist now.

    Raises:
        UnsupportedValueError: As in `save`.
        StorageError: As in `save`.
    """
    session = session or Session()
    meter = Meter("save", storage.url)
    with meter.stage("plan"), no_garbage_collection():
        described = describe(state, sharing=sharing)
        plan = session.planner.plan([described.specs], Layout(save_id, options.chunk_bytes, options.file_bytes))
        replaced = replaced_locations(storage)
        transaction = storage.begin(save_id, claim=claim)

    def publish(receipts: dict[str, FileRecord]) -> Stats:
        with meter.stage("commit"), no_garbage_collection():
            extension = _extension(save_id, options, described.notes, receipts)
            manifest = Manifest("0.1.0", _WORLD_SIZE, plan.entries, extension)
            commit(transaction, storage, manifest, plan.files[0], replaced)
        session.last_save = meter.finish()
        return session.last_save

    with ExitStack() as stack:
        stack.enter_context(_aborted_on_error(transaction))
        pool = session.pool(options, options.block_bytes)
        means = Means(pool, options.block_bytes, options.threads, meter, SideStreams())
        writing = Writing(plan.files[0], described.sources, transaction, means)
        return Saving(writing, meter, publish, stack.pop_all())


@contextmanager
def _aborted_on_error(transaction: Transaction) -> Iterator[None]:
    try:
        yield
    except BaseException:
        transaction.abort()
        raise


def _extension(save_id: str, options: Options, notes: RankNotes, receipts: dict[str, FileRecord]) -> Extension:
    return Extension(
        save_id=save_id,
        writer=f"lightning-snapshot {__version__}",
        block_bytes=options.block_bytes,
        files=receipts,
        ranks={"0": notes},
    )
