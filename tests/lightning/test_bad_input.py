"""What is wrong with a path is said with the path, as an error of ours and as the builtin that callers expect."""

import json
import os
import re
import resource
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from lightning_snapshot import SnapshotCheckpointIO, SnapshotError
from lightning_snapshot.errors import (
    ChecksumError,
    DataError,
    MetadataError,
    MissingDataError,
    NotASnapshotError,
    SnapshotNotFoundError,
    StorageError,
    UnsupportedFeatureError,
)
from lightning_snapshot.manifest import seal
from tests.lightning.models import difference

METADATA = ".snapshot_metadata"


def a_data_file(path: Path) -> Path:
    return max((file for file in (path / ".data").rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)


def nothing(path: Path) -> None: ...


def empty_folder(path: Path) -> None:
    path.mkdir()


def ordinary_folder(path: Path) -> None:
    path.mkdir()
    (path / "notes.txt").write_text("mine")


def distributed_checkpoint(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that there is one process only
        dcp.save({"a": torch.ones(2)}, checkpoint_id=path)


def fsdp_checkpoint(path: Path) -> None:
    distributed_checkpoint(path)
    torch.save({"epoch": 1}, path / "meta.pt")


def truncated_metadata(path: Path) -> None:
    good_snapshot(path)
    (path / METADATA).write_bytes((path / METADATA).read_bytes()[:-40])


def garbage_metadata(path: Path) -> None:
    good_snapshot(path)
    (path / METADATA).write_bytes(b"\x00\xff garbage")


def empty_metadata(path: Path) -> None:
    good_snapshot(path)
    (path / METADATA).write_bytes(b"")


def unknown_entry_type(path: Path) -> None:
    good_snapshot(path)
    metadata = json.loads((path / METADATA).read_text())
    metadata["manifest"]["0/global_step"]["type"] = "hologram"
    (path / METADATA).write_bytes(seal(json.dumps(metadata).encode()))


def missing_data_file(path: Path) -> None:
    good_snapshot(path)
    a_data_file(path).unlink()


def short_data_file(path: Path) -> None:
    good_snapshot(path)
    os.truncate(a_data_file(path), a_data_file(path).stat().st_size - 1)


def flipped_bit(path: Path) -> None:
    good_snapshot(path)
    content = bytearray(a_data_file(path).read_bytes())
    content[5] ^= 1
    a_data_file(path).write_bytes(content)


def garbage_file(path: Path) -> None:
    path.write_bytes(b"no checkpoint")


def file_without_a_dictionary(path: Path) -> None:
    torch.save([1, 2], path)


def link_to_nothing(path: Path) -> None:
    path.symlink_to("nowhere")


def good_snapshot(path: Path, value: float = 1.0) -> None:
    state = {"state_dict": {"weight": torch.full((2, 2), value)}, "global_step": 3, "optimizer": {"a": torch.ones(3)}}
    SnapshotCheckpointIO().save_checkpoint(state, path)


BAD: dict[Callable[[Path], None], tuple[type[SnapshotError], type[Exception], str]] = {
    nothing: (SnapshotNotFoundError, FileNotFoundError, "found nothing"),
    empty_folder: (NotASnapshotError, ValueError, "found an empty folder"),
    ordinary_folder: (NotASnapshotError, ValueError, "expected a snapshot, .*found a folder"),
    distributed_checkpoint: (NotASnapshotError, ValueError, "DCP"),
    fsdp_checkpoint: (NotASnapshotError, ValueError, "FSDP"),
    truncated_metadata: (MetadataError, ValueError, METADATA),
    garbage_metadata: (MetadataError, ValueError, METADATA),
    empty_metadata: (MetadataError, ValueError, METADATA),
    unknown_entry_type: (MetadataError, ValueError, "global_step: expected an entry, found none"),
    missing_data_file: (MissingDataError, FileNotFoundError, "state_dict/weight: .*expected a data file at .*found no"),
    short_data_file: (DataError, ValueError, r"state_dict/weight: expected \d+ bytes in .*, found \d+"),
    flipped_bit: (ChecksumError, ValueError, "state_dict/weight.*"),
    garbage_file: (DataError, ValueError, "expected a checkpoint file"),
    file_without_a_dictionary: (NotASnapshotError, ValueError, "found list"),
    link_to_nothing: (SnapshotNotFoundError, FileNotFoundError, "a link to .*nowhere, where nothing is"),
}


@pytest.mark.parametrize("make", BAD, ids=lambda make: make.__name__)
def test_loading_says_what_is_wrong_with(cls, make_trainer, make_fabric, tmp_path, make):
    kind, builtin, text = BAD[make]
    calls = {
        "fit": lambda path: make_trainer(max_epochs=1).fit(cls.Tiny(), ckpt_path=path),
        "validate": lambda path: make_trainer().validate(cls.Tiny(), ckpt_path=path),
        "load": lambda path: make_fabric().load(path),
    }
    for name, call in calls.items():
        path = tmp_path / name / "bad.ckpt"
        path.parent.mkdir()
        make(path)
        with pytest.raises(kind, match=text) as caught:
            call(path)
        assert isinstance(caught.value, SnapshotError)
        assert isinstance(caught.value, builtin)
        assert "bad.ckpt" in str(caught.value)


def test_a_registry_path_without_litmodels_is_explained(cls, make_trainer):
    with pytest.raises(UnsupportedFeatureError, match=r"registry:team/model: .*litmodels"):
        make_trainer().validate(cls.Tiny(), ckpt_path="registry:team/model")


def test_an_unknown_place_is_refused(cls, make_trainer):
    with pytest.raises(UnsupportedFeatureError, match=r"nowhere://bucket/a\.ckpt"):
        make_trainer().validate(cls.Tiny(), ckpt_path="nowhere://bucket/a.ckpt")


# --- saving ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def trained(cls, make_trainer):
    trainer = make_trainer(max_epochs=1, enable_checkpointing=False)
    trainer.fit(cls.Tiny())
    return trainer


@contextmanager
def full_disk(limit_bytes: int):
    """Let writes of files beyond a size fail, as they do on a full disk: root is not exempt."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def tree(folder: Path) -> dict[str, bytes | None]:
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def test_saving_below_a_file_names_the_path(trained, make_fabric, tmp_path):
    (tmp_path / "file").write_text("mine")
    path = tmp_path / "file" / "a.ckpt"
    for save in (trained.save_checkpoint, lambda path: make_fabric().save(path, {"a": 1})):
        with pytest.raises(StorageError, match=re.escape(str(tmp_path / "file"))) as caught:
            save(path)
        assert isinstance(caught.value, OSError)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_saving_without_permission_names_the_path(trained, tmp_path):
    (tmp_path / "locked").mkdir(mode=0o555)
    with pytest.raises(PermissionError, match=re.escape(str(tmp_path / "locked"))) as caught:
        trained.save_checkpoint(tmp_path / "locked" / "a.ckpt")
    assert isinstance(caught.value, StorageError)


@pytest.mark.parametrize("make", [ordinary_folder, distributed_checkpoint], ids=lambda make: make.__name__)
def test_saving_over_what_is_not_ours_changes_nothing(trained, tmp_path, make):
    path = tmp_path / "folder"
    make(path)
    before = tree(tmp_path)
    with pytest.raises(NotASnapshotError, match=re.escape(str(path))):
        trained.save_checkpoint(path)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("limit_bytes", [0, 100, 3000], ids=["nothing fits", "one tensor", "data but no metadata"])
def test_after_a_failed_save_the_previous_snapshot_loads(cls, make_trainer, trained, tmp_path, limit_bytes):
    path = tmp_path / "a.ckpt"
    trained.save_checkpoint(path)
    expected = SnapshotCheckpointIO().load_checkpoint(path)
    before = tree(tmp_path)
    with torch.no_grad():
        trained.lightning_module.net[0].weight.zero_()

    with full_disk(limit_bytes), pytest.raises(StorageError, match=re.escape(str(path))):
        trained.save_checkpoint(path)

    assert difference(SnapshotCheckpointIO().load_checkpoint(path), expected) is None
    assert tree(tmp_path) == before, "a failed save must leave nothing behind"
    trained.save_checkpoint(path)
    assert not SnapshotCheckpointIO().load_checkpoint(path)["state_dict"]["net.0.weight"].any()


def test_a_full_disk_ends_the_run_with_the_error_and_keeps_older_snapshots(namespace, cls, make_trainer, tmp_path):
    class FillsDisk(namespace.pl.Callback):
        def on_train_epoch_start(self, trainer, *_):
            if trainer.current_epoch == 2:
                self.limit = full_disk(100)
                self.limit.__enter__()

        def on_exception(self, *_):
            self.limit.__exit__(None, None, None)

    checkpoint = namespace.pl.callbacks.ModelCheckpoint(tmp_path / "kept", save_last=True)
    with pytest.raises(StorageError):
        make_trainer(max_epochs=4, callbacks=[FillsDisk(), checkpoint]).fit(cls.Tiny())

    assert sorted(os.listdir(tmp_path / "kept")) == ["epoch=1-step=8.ckpt", "last.ckpt"]
    model = cls.Tiny(seed=2)
    make_trainer(max_epochs=3).fit(model, ckpt_path=tmp_path / "kept" / "last.ckpt")
    assert model.trained_steps == [8, 9, 10, 11]
