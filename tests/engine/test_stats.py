"""The records of saves and loads."""

import dataclasses
import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from lightning_snapshot import Snapshot, SnapshotCheckpointIO, StateDict
from lightning_snapshot.errors import DataError, SnapshotError, UnsupportedValueError
from lightning_snapshot.restore import load, read_manifest, read_value
from lightning_snapshot.save import save
from lightning_snapshot.session import Session
from lightning_snapshot.stats import Meter, Stats
from lightning_snapshot.storage import METADATA_NAME
from lightning_snapshot.storage.memory import MemoryStorage
from tests.engine.strategies import SMALL, new_storage

STATE = {
    "rows": torch.arange(100, dtype=torch.float64),
    "turned": torch.arange(60.0).reshape(4, 15).t(),
    "tied": [torch.ones(20)] * 2,
    "empty": torch.empty(0, 3),
    "objects": [{1, 2}, {1, 2}],
    "number": 5,
}


def sizes_of(storage: MemoryStorage) -> dict[str, int]:
    return {name: len(content) for name, content in storage.files.items() if name != METADATA_NAME}


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "lightning_snapshot"]


@pytest.fixture(autouse=True)
def _all_lines(caplog):
    caplog.set_level(logging.INFO, "lightning_snapshot")


def test_a_save_counts_what_it_writes():
    storage, session = new_storage(), Session()
    stats = save(STATE, storage, save_id="s", options=SMALL, session=session)
    sizes = sizes_of(storage)
    assert (stats.operation, stats.path) == ("save", storage.url)
    assert (stats.files, stats.data_bytes) == (len(sizes), sum(sizes.values()))
    assert stats.files > 4
    assert list(stats.stage_seconds) == ["plan", "write", "commit"]
    assert session.last_save is stats
    assert session.last_load is None


def test_a_load_counts_what_it_reads():
    storage, session = new_storage(), Session()
    save(STATE, storage, save_id="s", options=SMALL)
    load(storage, rank=0, options=SMALL, session=session)
    stats, sizes = session.last_load, sizes_of(storage)
    assert (stats.operation, stats.path) == ("load", storage.url)
    assert list(stats.stage_seconds) == ["plan", "read", "rebuild"]
    # A tensor without elements has a file, which nobody needs.
    del sizes[read_manifest(storage).entries["0/empty"].location]
    assert (stats.files, stats.data_bytes) == (len(sizes), sum(sizes.values()))
    assert session.last_save is None


def test_a_load_of_a_part_counts_whole_blocks():
    storage, session = new_storage(), Session()
    save(STATE, storage, save_id="s", options=SMALL)
    load(storage, rank=0, options=SMALL, keys=["tied"], session=session)
    assert (session.last_load.files, session.last_load.data_bytes) == (1, 80)
    read_value(storage, "0/rows", options=SMALL, index=3, session=session)
    assert (session.last_load.files, session.last_load.data_bytes) == (1, 64)
    assert session.last_load.path == f"{storage.url}: 0/rows"
    read_value(storage, "0/number", options=SMALL, session=session)
    assert (session.last_load.files, session.last_load.data_bytes, session.last_load.staging_bytes) == (0, 0, 0)


def test_all_times_are_there(caplog):
    storage, session = new_storage(), Session()
    save(STATE, storage, save_id="s", options=SMALL, session=session)
    load(storage, rank=0, options=SMALL, session=session)
    for stats in (session.last_save, session.last_load):
        assert stats.copy_seconds > 0
        assert stats.hash_seconds > 0
        assert stats.device_seconds > 0
        assert all(seconds > 0 for seconds in stats.stage_seconds.values())
        assert sum(stats.stage_seconds.values()) <= stats.seconds
        assert stats.gigabytes_per_second == stats.data_bytes / stats.seconds / 1e9
    load(storage, rank=0, options=dataclasses.replace(SMALL, verify=False), session=session)
    assert session.last_load.hash_seconds == 0


# --- text -------------------------------------------------------------------------------------------------------------


def test_a_record_is_one_line():
    stages = {"plan": 0.5, "write": 1.25}
    stats = Stats("save", "runs/a.ckpt", 3_456_700_000, 4, 2.0, stages, 1.0, 2.0, 3.0, 64 * 2**20, 2.0)
    assert str(stats) == (
        "saved runs/a.ckpt: 3,456.7 MB in 4 files, 2.00 s, 1.73 GB/s (plan 0.50, write 1.25; threads: copy 1.00, "
        "hash 2.00, device 3.00; staging 64 MiB)"
    )
    assert str(Stats("load", "x", 0, 0, 0.0, {}, 0, 0, 0, 0, 0)).startswith(
        "loaded x: 0.0 MB in 0 files, 0.00 s, 0.00 GB/s"
    )
    assert "2.00 s of which training waited 0.50 s, " in str(dataclasses.replace(stats, stall_seconds=0.5))


def test_each_save_and_load_is_logged_once_and_kept(tmp_path, caplog):
    plugin = SnapshotCheckpointIO()
    assert plugin.last_save is plugin.last_load is None
    plugin.save_checkpoint(STATE, tmp_path / "a")
    plugin.save_checkpoint(STATE, tmp_path / "b")
    first = str(plugin.last_save)
    plugin.load_checkpoint(tmp_path / "a")
    assert lines(caplog)[1:] == [first, str(plugin.last_load)]
    assert [line.split(":")[0] for line in lines(caplog)] == [
        f"saved {tmp_path / 'a'}", f"saved {tmp_path / 'b'}", f"loaded {tmp_path / 'a'}"
    ]  # fmt: skip
    assert {record.levelno for record in caplog.records if record.name == "lightning_snapshot"} == {logging.INFO}


def test_a_snapshot_keeps_its_records(tmp_path, caplog):
    snapshot = Snapshot.take(tmp_path / "s", {"m": StateDict(**STATE), "n": StateDict(w=torch.zeros(5))})
    assert snapshot.last_save.operation == "save"
    assert snapshot.last_load is None
    assert Snapshot(tmp_path / "s").last_save is None
    for read in (
        lambda: snapshot.restore({"n": StateDict(w=torch.ones(5))}),
        lambda: snapshot.get_state_dict_for_key("m"),
        lambda: snapshot.get_state_dict_for_key("m", mmap=True),
        lambda: snapshot.read_object("0/m/rows"),
        lambda: snapshot.read_object("0/m/rows", index=2),
    ):
        caplog.clear()
        read()
        assert lines(caplog) == [str(snapshot.last_load)]
        assert snapshot.last_load.operation == "load"


def test_what_fails_leaves_the_records_as_they_are(tmp_path, caplog):
    plugin = SnapshotCheckpointIO()
    plugin.save_checkpoint(STATE, tmp_path / "a")
    plugin.load_checkpoint(tmp_path / "a")
    before = plugin.last_save, plugin.last_load
    caplog.clear()
    with pytest.raises(UnsupportedValueError):
        plugin.save_checkpoint({"a": lambda: 0}, tmp_path / "b")
    with pytest.raises(SnapshotError):
        plugin.load_checkpoint(tmp_path / "b")
    for path in (tmp_path / "a" / ".data").glob("*/0_0"):
        path.write_bytes(b"")
    with pytest.raises(DataError):
        plugin.load_checkpoint(tmp_path / "a")
    assert (plugin.last_save, plugin.last_load) == before
    assert lines(caplog) == []


# --- the meter --------------------------------------------------------------------------------------------------------


def test_a_meter_adds_up_what_threads_do():
    meter, together = Meter("save", "x"), threading.Barrier(4, timeout=60)

    def work(_: int) -> None:
        for _ in range(100):
            meter.count(data_bytes=3, files=1)
        with meter.staging(10):
            together.wait()
        with pytest.raises(KeyError), meter.time("hash"), meter.staging(5):
            raise KeyError

    with ThreadPoolExecutor(4) as executor:
        list(executor.map(work, range(4)))
    with meter.staging(15):
        pass
    with meter.stage("plan"), meter.stage("write"):
        pass
    with meter.stage("plan"):
        pass
    stats = meter.finish()
    assert (stats.data_bytes, stats.files, stats.staging_bytes) == (1200, 400, 40)
    assert list(stats.stage_seconds) == ["write", "plan"]
    assert stats.hash_seconds > 0 == stats.copy_seconds == stats.device_seconds
