"""Which snapshot of a folder is the newest."""

import os
import shutil
from pathlib import Path

import fsspec
import pytest
import torch

from lightning_snapshot import Snapshot, StateDict, latest
from lightning_snapshot.errors import UnsupportedFeatureError
from lightning_snapshot.manifest import Manifest, ObjectEntry, encode
from lightning_snapshot.options import Options
from lightning_snapshot.save import save
from lightning_snapshot.storage import METADATA_NAME, open_storage
from lightning_snapshot.storage.listing import list_published

TIMES = {"a": "20260101T000000-0123456789ab", "b": "20260101T000100-00000000000b", "c": "20260301T120000-00000000000c"}


def ours(path: Path, save_id: str) -> None:
    save({"app": {"x": torch.arange(5.0)}}, open_storage(path), save_id=save_id, options=Options())


def torchsnapshots(path: Path, written_seconds: float) -> None:
    (path / "0").mkdir(parents=True)
    (path / "0/x").write_bytes(b"data")
    (path / METADATA_NAME).write_bytes(
        encode(Manifest("0.1.0", 1, {"0/x": ObjectEntry("0/x", "torch_save", "x", False)}))
    )
    os.utime(path / METADATA_NAME, (written_seconds, written_seconds))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three snapshots; modification times say the opposite of save ids."""
    folder = tmp_path / "run"
    for age, (name, save_id) in enumerate(TIMES.items()):
        ours(folder / name, save_id)
        for path in (folder / name / METADATA_NAME, folder / name):
            os.utime(path, (1e9 - age, 1e9 - age))
    return folder


def names(folder: Path) -> list[str]:
    return [published.name for published in list_published(str(folder))]


def data_file(path: Path) -> Path:
    return next(file for file in path.rglob("*") if file.is_file() and file.name != METADATA_NAME)


def test_the_save_id_decides_and_not_the_modification_time(run):
    assert latest(run) == str(run / "c")
    assert names(run) == ["c", "b", "a"]


def test_a_copied_tree_keeps_its_order(run, tmp_path):
    for name in ("c", "a", "b"):
        shutil.copytree(run / name, tmp_path / "copy" / name, copy_function=shutil.copyfile)
    assert names(tmp_path / "copy") == ["c", "b", "a"]


def test_within_one_second_the_later_commit_is_newer(tmp_path):
    for age, digit in enumerate("3071"):
        ours(tmp_path / digit, f"20260101T000000-{digit * 12}")
        os.utime(tmp_path / digit / METADATA_NAME, (1e9 - age, 1e9 - age))
    assert names(tmp_path) == ["3", "0", "7", "1"]


def test_snapshots_of_torchsnapshot_count_by_the_time_of_their_metadata(run):
    between = 1769000000  # in January 2026
    torchsnapshots(run / "old", 1e9)
    torchsnapshots(run / "middle", between)
    assert names(run) == ["c", "middle", "b", "a", "old"]
    torchsnapshots(run / "new", between + 1e8)
    assert latest(run) == str(run / "new")


def test_the_public_api_takes_snapshots_in_order(tmp_path):
    for number in range(3):
        Snapshot.take(tmp_path / f"{9 - number}", {"app": StateDict(number=number)})
        assert latest(tmp_path) == str(tmp_path / f"{9 - number}")


def test_everything_else_is_ignored(run):
    ours(run / ".snapshot-hidden.tmp", "20270101T000000-000000000000")
    (run / "d/.data/20270101T000000-000000000000").mkdir(parents=True)
    (run / "empty.ckpt").mkdir()
    (run / "folder").mkdir()
    (run / "folder/notes.txt").write_text("mine")
    (run / "stock.ckpt").write_bytes(b"stock")
    (run / "dangling.ckpt").symlink_to("nowhere")
    (run / "loop.ckpt").symlink_to("loop.ckpt")
    (run / "file-link.ckpt").symlink_to("stock.ckpt")
    assert latest(run) == str(run / "c")
    assert names(run) == ["c", "b", "a"]


@pytest.mark.parametrize("name", ["0-before", "z-behind"])
def test_a_link_beside_its_target_counts_as_that(run, name):
    (run / name).symlink_to("c")
    assert names(run) == ["c", "b", "a"]


def test_a_link_out_of_the_folder_counts_as_what_it_leads_to(run, tmp_path):
    ours(tmp_path / "elsewhere", "20270101T000000-000000000000")
    (run / "last.ckpt").symlink_to(tmp_path / "elsewhere")
    assert latest(run) == str(run / "last.ckpt")


@pytest.mark.parametrize("damage", ["missing", "short", "long", "metadata", "empty metadata"])
def test_what_is_not_complete_is_passed_over_with_a_warning(run, damage):
    file = data_file(run / "c")
    if damage == "missing":
        file.unlink()
    elif damage == "metadata":
        (run / "c" / METADATA_NAME).write_bytes((run / "c" / METADATA_NAME).read_bytes()[:-30])
    elif damage == "empty metadata":
        (run / "c" / METADATA_NAME).write_bytes(b"")
    else:
        os.truncate(file, file.stat().st_size + {"short": -1, "long": 1}[damage])
    with pytest.warns(UserWarning, match=rf"not complete: .*{run}/c"):
        assert latest(run) == str(run / "b")


def test_an_interrupted_save_over_a_snapshot_does_not_make_it_newer(run):
    (run / "a/.data/20270101T000000-000000000000").mkdir()
    assert names(run) == ["c", "b", "a"]


@pytest.mark.parametrize("kind", ["str", "Path", "relative", "slash", "URL"])
def test_paths_of_all_kinds(run, kind, monkeypatch):
    monkeypatch.chdir(run.parent)
    given = {"str": str(run), "Path": run, "relative": "run", "slash": f"{run}/", "URL": f"file://{run}"}[kind]
    found = latest(given)
    assert found == os.path.join(given, "c")
    assert Snapshot(found).read_object("0/app/x").tolist() == [0, 1, 2, 3, 4]


def test_nothing_to_find(run):
    assert latest(run / "nowhere") is None
    assert latest(data_file(run / "c")) is None
    assert latest(run / "c") is None


def test_an_unknown_place_is_refused():
    with pytest.raises(UnsupportedFeatureError, match="nowhere://bucket/run"):
        latest("nowhere://bucket/run")


def test_other_file_systems_are_listed_the_same_way(run):
    store = fsspec.filesystem("memory")
    store.put(str(run), "/latest", recursive=True)
    store.pipe("/latest/other/file", b"mine")
    try:
        assert [published.name for published in list_published("/latest", store)] == ["c", "b", "a"]
    finally:
        store.rm("/latest", recursive=True)


def test_a_folder_that_holds_snapshots_is_refused_with_the_name_of_the_newest(run):
    for action in (Snapshot(run).get_manifest, lambda: Snapshot(run).read_object("0/app/x")):
        with pytest.raises(ValueError, match=rf"found a folder .*; the newest snapshot in it is {run}/c$"):
            action()
