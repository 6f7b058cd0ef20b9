"""Receipts match the plan → publish ``.snapshot_metadata`` once → remove what no manifest names any more."""

from collections.abc import Iterable, Mapping

from lightning_snapshot.errors import DataError, SnapshotError
from lightning_snapshot.manifest import FileRecord, Manifest, decode, encode
from lightning_snapshot.storage import Storage, Transaction
from lightning_snapshot.storage.locations import data_locations
from lightning_snapshot.write_plan import FilePlan

__all__ = ["commit", "replaced_locations"]


def commit(
    transaction: Transaction,
    storage: Storage,
    manifest: Manifest,
    planned: Iterable[FilePlan],
    replaced: frozenset[str],
) -> None:
    """Publish a save.

    Args:
        transaction: The save; all its files are finished.
        storage: Where it goes.
        manifest: What to publish; its extension holds the receipts of all ranks.
        planned: The files of all ranks, as planned.
        replaced: Data files of the snapshot that this one replaces.

    Raises:
        DataError: What was written is not what was planned; nothing is published.
        StorageError: The storage failed; nothing is published.
    """
    _check(planned, manifest.extension.files if manifest.extension else {})
    transaction.commit(encode(manifest))
    storage.discard(replaced.difference(data_locations(manifest)))


def replaced_locations(storage: Storage) -> frozenset[str]:
    """The data files of the snapshot that is there now; none if there is none, or none that can be read."""
    try:
        return frozenset(data_locations(decode(storage.read_metadata(), source=storage.url)))
    except SnapshotError:
        # Nothing there, or damaged beyond reading: then nobody knows its files, and they stay.
        return frozenset()


def _check(planned: Iterable[FilePlan], receipts: Mapping[str, FileRecord]) -> None:
    expected = {file.location: file.size_bytes for file in planned}
    found = {location: record.size_bytes for location, record in receipts.items()}
    if expected != found:
        wrong = sorted(expected.keys() ^ found.keys()) or [at for at in expected if expected[at] != found[at]]
        msg = f"{wrong[0]}: planned {expected.get(wrong[0])} bytes, wrote {found.get(wrong[0])}; the save is abandoned"
        raise DataError(msg)
