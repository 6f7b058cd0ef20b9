"""state ─tree→ leaves ─tensors→ specs ─write_plan→ plan ─execute→ receipts ─commit→ ``.snapshot_metadata``."""

from collections.abc import Mapping
from typing import Any

from lightning_snapshot import __version__
from lightning_snapshot.commit import commit, replaced_locations
from lightning_snapshot.describe import describe
from lightning_snapshot.devices import SideStreams
from lightning_snapshot.execute import Means, write_all
from lightning_snapshot.manifest import Extension, FileRecord, Manifest, RankNotes
from lightning_snapshot.memory import no_garbage_collection
from lightning_snapshot.options import Options
from lightning_snapshot.session import Session
from lightning_snapshot.stats import Meter, Stats
from lightning_snapshot.storage import Storage
from lightning_snapshot.write_plan import Layout

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
        described = describe(state)
        plan = session.planner.plan([described.specs], Layout(save_id, options.chunk_bytes, options.file_bytes))
        replaced = replaced_locations(storage)
        transaction = storage.begin(save_id)
    try:
        with meter.stage("write"):
            receipts = write_all(plan.files[0], described.sources, transaction, means)
        with meter.stage("commit"), no_garbage_collection():
            extension = _extension(save_id, options, described.notes, receipts)
            manifest = Manifest("0.1.0", _WORLD_SIZE, plan.entries, extension)
            commit(transaction, storage, manifest, plan.files[0], replaced)
    except BaseException:
        transaction.abort()
        raise
    session.last_save = meter.finish()
    return session.last_save


def _extension(save_id: str, options: Options, notes: RankNotes, receipts: dict[str, FileRecord]) -> Extension:
    return Extension(
        save_id=save_id,
        writer=f"lightning-snapshot {__version__}",
        block_bytes=options.block_bytes,
        files=receipts,
        ranks={"0": notes},
    )
