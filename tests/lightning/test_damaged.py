"""What is loaded in place of a snapshot that is damaged or unfinished, and what is said about it."""

import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lightning_snapshot import SnapshotCheckpointIO
from lightning_snapshot.errors import (
    ChecksumError,
    DataError,
    MetadataError,
    MissingDataError,
    NotASnapshotError,
    SnapshotNotFoundError,
    StorageError,
)
from tests.lightning.models import STEPS_PER_EPOCH, difference
from tests.lightning.test_bad_input import (
    METADATA,
    a_data_file,
    empty_folder,
    empty_metadata,
    flipped_bit,
    good_snapshot,
    missing_data_file,
    ordinary_folder,
    short_data_file,
    tree,
    truncated_metadata,
)

# What a test_bad_input recipe does to a snapshot → the error and what it says of the place.
DAMAGE = {
    truncated_metadata: (MetadataError, METADATA),
    empty_metadata: (MetadataError, METADATA),
    missing_data_file: (MissingDataError, r"state_dict/weight: .*\.data/"),
    short_data_file: (DataError, r"state_dict/weight: .*\.data/"),
    flipped_bit: (ChecksumError, r"state_dict/weight"),
}


def only_data(path: Path) -> None:
    good_snapshot(path)
    (path / METADATA).unlink()


def interrupted_removal(path: Path) -> None:
    good_snapshot(path)
    (path / METADATA).rename(path / f"{METADATA}.removed")
    a_data_file(path).unlink()


UNFINISHED = [only_data, interrupted_removal, empty_folder]


@pytest.fixture
def older(tmp_path) -> Path:
    """Two good snapshots, of 1.0 and, newer, 2.0."""
    good_snapshot(tmp_path / "a.ckpt", 1.0)
    good_snapshot(tmp_path / "b.ckpt", 2.0)
    return tmp_path


@pytest.fixture
def previous() -> SnapshotCheckpointIO:
    return SnapshotCheckpointIO(on_damaged="previous")


def value(checkpoint: dict) -> float:
    return checkpoint["state_dict"]["weight"][0, 0].item()


# --- what is taken ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_the_newest_older_snapshot_is_loaded_if_the_user_wants_that(older, previous, damage):
    bad = older / "c.ckpt"
    damage(bad)
    good_snapshot(older / "newer.ckpt", 9.0)
    before = tree(older)
    with pytest.warns(UserWarning, match=rf"{DAMAGE[damage][1]}.*Loaded {older}/b\.ckpt instead") as caught:
        assert value(previous.load_checkpoint(bad)) == 2.0
    assert str(bad) in str(caught[0].message)
    assert tree(older) == before, "the damaged snapshot is evidence"
    with pytest.raises(DAMAGE[damage][0]):
        SnapshotCheckpointIO().load_checkpoint(bad)


@pytest.mark.parametrize("on_damaged", ["error", "previous"])
@pytest.mark.parametrize("make", UNFINISHED, ids=lambda make: make.__name__)
def test_an_unfinished_save_is_always_replaced_by_the_newest_snapshot(older, make, on_damaged):
    make(older / "0.ckpt")
    with pytest.warns(UserWarning, match=rf"0\.ckpt: expected a snapshot, .*Loaded {older}/b\.ckpt instead"):
        loaded = SnapshotCheckpointIO(on_damaged=on_damaged).load_checkpoint(older / "0.ckpt")
    assert value(loaded) == 2.0


def test_only_complete_snapshots_replace_an_unfinished_save(older):
    empty_folder(older / "0.ckpt")
    missing_data_file(older / "c.ckpt")
    with pytest.warns(UserWarning, match=rf"Loaded {older}/b\.ckpt instead"):
        SnapshotCheckpointIO().load_checkpoint(older / "0.ckpt")


def test_damage_of_what_replaces_an_unfinished_save_is_an_error(older):
    empty_folder(older / "0.ckpt")
    flipped_bit(older / "c.ckpt")
    with pytest.raises(ChecksumError, match=r"c\.ckpt"):
        SnapshotCheckpointIO().load_checkpoint(older / "0.ckpt")


@pytest.mark.parametrize("on_damaged", ["error", "previous"])
def test_what_is_no_snapshot_at_all_is_an_error(older, on_damaged):
    plugin = SnapshotCheckpointIO(on_damaged=on_damaged)
    with pytest.raises(SnapshotNotFoundError):
        plugin.load_checkpoint(older / "typo.ckpt")
    (older / "meta.pt").write_bytes(b"")
    with pytest.raises(NotASnapshotError, match="DCP"):
        plugin.load_checkpoint(older)


def test_a_partial_save_of_torchsnapshot_is_replaced_if_the_user_wants_that(older, previous):
    (older / "c.ckpt/0/state_dict").mkdir(parents=True)
    (older / "c.ckpt/0/state_dict/weight").write_bytes(b"half")
    with pytest.raises(NotASnapshotError, match=r"other things$"):
        SnapshotCheckpointIO().load_checkpoint(older / "c.ckpt")
    with pytest.warns(UserWarning, match=rf"Loaded {older}/b\.ckpt instead"):
        assert value(previous.load_checkpoint(older / "c.ckpt")) == 2.0


def test_several_damaged_snapshots_are_passed_over(older, previous):
    for name, damage in (("c", missing_data_file), ("d", flipped_bit), ("e", truncated_metadata)):
        damage(older / f"{name}.ckpt")
    with pytest.warns(UserWarning, match=rf"e\.ckpt.*Loaded {older}/b\.ckpt instead"):
        assert value(previous.load_checkpoint(older / "e.ckpt")) == 2.0


def test_if_all_are_damaged_the_first_error_tells_what_was_tried(tmp_path, previous):
    for name, damage in (("a", missing_data_file), ("b", flipped_bit), ("c", short_data_file)):
        damage(tmp_path / f"{name}.ckpt")
    for _ in range(2):
        with pytest.raises(DataError, match=r"c\.ckpt: .*; tried instead: .*b\.ckpt.*; .*a\.ckpt: ") as caught:
            previous.load_checkpoint(tmp_path / "c.ckpt")
        assert type(caught.value) is DataError
        assert str(caught.value).count("tried instead") == 1


@pytest.mark.parametrize("make", [flipped_bit, only_data])
def test_if_there_is_no_other_that_is_said(tmp_path, previous, make):
    make(tmp_path / "a.ckpt")
    with pytest.raises((ChecksumError, NotASnapshotError), match=r"a\.ckpt.*; no snapshot beside it could replace it$"):
        previous.load_checkpoint(tmp_path / "a.ckpt")


def test_a_link_to_a_damaged_snapshot_is_replaced_like_that(older, previous):
    flipped_bit(older / "c.ckpt")
    (older / "last.ckpt").symlink_to("c.ckpt")
    with pytest.warns(UserWarning, match=rf"last\.ckpt.*Loaded {older}/b\.ckpt instead"):
        assert value(previous.load_checkpoint(older / "last.ckpt")) == 2.0
    with pytest.warns(UserWarning, match=rf"Loaded {older}/b\.ckpt instead"):
        previous.load_checkpoint(older / "c.ckpt")


def test_a_damaged_snapshot_is_not_read_again_until_it_is_saved_anew(older, previous):
    bad = older / "c.ckpt"
    good_snapshot(bad, 3.0)
    content = a_data_file(bad).read_bytes()
    a_data_file(bad).write_bytes(bytes([content[0] ^ 1]) + content[1:])
    with pytest.warns(UserWarning, match="instead"):
        previous.load_checkpoint(bad)

    # Nobody but a second attempt could see that it is whole again.
    a_data_file(bad).write_bytes(content)
    with pytest.warns(UserWarning, match=rf"c\.ckpt.*checksum.*Loaded {older}/b\.ckpt instead"):
        assert value(previous.load_checkpoint(bad)) == 2.0
    only_data(older / "0.ckpt")
    with pytest.warns(UserWarning, match=rf"Loaded {older}/b\.ckpt instead"):
        previous.load_checkpoint(older / "0.ckpt")

    good_snapshot(bad, 4.0)
    assert value(previous.load_checkpoint(bad)) == 4.0


def test_other_values_of_the_argument_are_refused():
    with pytest.raises(ValueError, match="'error' or 'previous', found 'ignore'"):
        SnapshotCheckpointIO(on_damaged="ignore")


# --- tensors of the model --------------------------------------------------------------------------------------------

SIZE = 2**20  # bytes enough for several blocks and files of their own


def a_state(value: float, **more: torch.Tensor) -> dict:
    tensors = {name: torch.full((SIZE,), value) for name in ("first", "last")}
    return {"state_dict": {**tensors, **more}, "pytorch-lightning_version": "2.6.6"}


def break_end(path: Path) -> None:
    """Flip a bit of the last tensor."""
    file = a_data_file(path)
    with file.open("r+b") as stream:
        stream.seek(-4, os.SEEK_END)
        byte = stream.read(1)[0]
        stream.seek(-1, os.SEEK_CUR)
        stream.write(bytes([byte ^ 1]))


@pytest.fixture
def targets() -> dict[str, torch.Tensor]:
    return {f"state_dict/{name}": torch.full((SIZE,), -1.0) for name in ("first", "last")}


def test_the_second_attempt_overwrites_what_the_first_has_filled(tmp_path, previous, targets):
    previous.save_checkpoint(a_state(1.0), tmp_path / "a.ckpt")
    previous.save_checkpoint(a_state(2.0), tmp_path / "b.ckpt")
    break_end(tmp_path / "b.ckpt")
    plain = SnapshotCheckpointIO()
    plain.read_next_checkpoint_into(lambda path: targets)
    with pytest.raises(ChecksumError, match="state_dict/last"):
        plain.load_checkpoint(tmp_path / "b.ckpt")
    assert targets["state_dict/first"].eq(2.0).all(), "the first attempt must get far enough to matter"

    previous.read_next_checkpoint_into(lambda path: targets)
    with pytest.warns(UserWarning, match=r"Loaded .*a\.ckpt instead"):
        state = previous.load_checkpoint(tmp_path / "b.ckpt")
    for name in ("first", "last"):
        assert state["state_dict"][name] is targets[f"state_dict/{name}"]
        assert targets[f"state_dict/{name}"].eq(1.0).all()


def test_a_snapshot_that_would_leave_damaged_elements_in_the_model_is_not_taken(tmp_path, previous, targets):
    smaller = a_state(1.0)
    del smaller["state_dict"]["first"]
    previous.save_checkpoint(a_state(0.0), tmp_path / "a.ckpt")
    previous.save_checkpoint(smaller, tmp_path / "b.ckpt")
    previous.save_checkpoint(a_state(2.0), tmp_path / "c.ckpt")
    break_end(tmp_path / "c.ckpt")
    previous.read_next_checkpoint_into(lambda path: targets)
    with pytest.warns(UserWarning, match=r"Loaded .*a\.ckpt instead"):
        previous.load_checkpoint(tmp_path / "c.ckpt")
    assert all(tensor.eq(0.0).all() for tensor in targets.values())

    shutil.rmtree(tmp_path / "a.ckpt")
    plugin = SnapshotCheckpointIO(on_damaged="previous")
    plugin.read_next_checkpoint_into(lambda path: targets)
    with pytest.raises(ChecksumError, match=r"c\.ckpt.*b\.ckpt: expected all tensors .* none at state_dict/first"):
        plugin.load_checkpoint(tmp_path / "c.ckpt")


def test_a_tensor_that_neither_snapshot_has_does_not_matter(tmp_path, previous, targets):
    previous.save_checkpoint(a_state(1.0), tmp_path / "a.ckpt")
    previous.save_checkpoint(a_state(2.0), tmp_path / "b.ckpt")
    break_end(tmp_path / "b.ckpt")
    targets["state_dict/head"] = torch.full((4,), 7.0)
    previous.read_next_checkpoint_into(lambda path: targets)
    with pytest.warns(UserWarning, match=r"Loaded .*a\.ckpt instead"):
        previous.load_checkpoint(tmp_path / "b.ckpt")
    assert targets["state_dict/head"].eq(7.0).all()


# --- Lightning -------------------------------------------------------------------------------------------------------


@pytest.fixture
def trained(namespace, cls, make_trainer, tmp_path) -> SimpleNamespace:
    """Three epochs with a snapshot each; the last one is cut off in the middle of the largest parameter."""
    checkpoint = namespace.pl.callbacks.ModelCheckpoint(tmp_path / "run", filename="{epoch}", save_top_k=-1)
    make_trainer(max_epochs=3, callbacks=[checkpoint]).fit(cls.Tiny(hidden=20_000))
    paths = [tmp_path / "run" / f"epoch={epoch}.ckpt" for epoch in range(3)]
    expected = SnapshotCheckpointIO().load_checkpoint(paths[1])
    break_end(paths[2])
    return SimpleNamespace(good=paths[1], bad=paths[2], expected=expected)


def test_a_run_resumes_from_the_previous_snapshot(cls, make_trainer, trained, previous):
    model = cls.Tiny(hidden=20_000, seed=5)
    with pytest.warns(UserWarning, match=rf"{trained.bad}.*checksum.*Loaded {trained.good} instead"):
        make_trainer(plugin=previous, max_epochs=3).fit(model, ckpt_path=trained.bad)
    assert model.trained_steps == list(range(2 * STEPS_PER_EPOCH, 3 * STEPS_PER_EPOCH))


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_the_model_has_the_weights_of_the_previous_snapshot(cls, make_trainer, trained, previous, verb):
    model = cls.Tiny(hidden=20_000, seed=5)
    pointers = [tensor.data_ptr() for tensor in model.state_dict().values()]
    with pytest.warns(UserWarning, match=f"Loaded {trained.good} instead"):
        getattr(make_trainer(plugin=previous), verb)(model, ckpt_path=trained.bad)
    assert difference(dict(model.state_dict()), dict(trained.expected["state_dict"])) is None
    assert [tensor.data_ptr() for tensor in model.state_dict().values()] == pointers


def test_not_strict_loading_does_not_keep_elements_of_the_damaged_snapshot(cls, make_trainer, tmp_path, previous):
    full = {name: tensor + 1 for name, tensor in cls.Tiny(hidden=20_000).state_dict().items()}
    part = {name: tensor for name, tensor in full.items() if not name.startswith("net.0")}
    common = {"pytorch-lightning_version": "2.4.0", "epoch": 0, "global_step": 0}
    previous.save_checkpoint({"state_dict": part, **common}, tmp_path / "a.ckpt")
    previous.save_checkpoint({"state_dict": full, **common}, tmp_path / "b.ckpt")
    break_end(tmp_path / "b.ckpt")
    model = cls.Tiny(hidden=20_000)
    model.strict_loading = False
    with pytest.raises(ChecksumError, match=r"none at state_dict/net\.0"):
        make_trainer(plugin=previous).validate(model, ckpt_path=tmp_path / "b.ckpt")


def test_fabric_takes_the_previous_snapshot(make_fabric, older):
    flipped_bit(older / "c.ckpt")
    fabric = make_fabric(on_damaged="previous")
    with pytest.warns(UserWarning, match=rf"Loaded {older}/b\.ckpt instead"):
        assert value(fabric.load(older / "c.ckpt")) == 2.0


# --- messages --------------------------------------------------------------------------------------------------------


def test_a_folder_of_snapshots_is_refused_with_the_name_of_the_newest(cls, make_trainer, older):
    with pytest.raises(NotASnapshotError, match=rf"the newest snapshot in it is {older}/b\.ckpt"):
        make_trainer().validate(cls.Tiny(), ckpt_path=older)


def test_a_file_that_stock_lightning_has_left_is_pointed_out(namespace, cls, make_trainer, tmp_path):
    path = tmp_path / "run" / "a.ckpt"
    trainer = make_trainer(max_epochs=1)
    trainer.fit(cls.Tiny())
    trainer.save_checkpoint(path)
    stock = make_trainer(plugin=None, max_epochs=2)
    stock.fit(cls.Tiny(), ckpt_path=None)
    stock.save_checkpoint(path)
    with pytest.warns(UserWarning, match=rf"{path}: loaded the snapshot, but .* (tmp\w{{8}})") as caught:
        loaded = SnapshotCheckpointIO().load_checkpoint(path)
    assert loaded["epoch"] == 1
    name = re.search(r"load (\S+/tmp\w{8}),", str(caught[0].message))[1]
    assert SnapshotCheckpointIO().load_checkpoint(name)["epoch"] == 2


@pytest.mark.parametrize("path", ["file/a.ckpt", "file/more/a.ckpt"])
def test_a_file_where_a_folder_is_needed_is_named(make_fabric, tmp_path, path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(StorageError, match=rf"could not start a save to .*: {tmp_path}/file is a file$"):
        make_fabric().save(tmp_path / path, {"a": 1})


def test_an_ordinary_folder_without_snapshots_gets_no_hint(tmp_path, previous):
    ordinary_folder(tmp_path / "folder")
    with pytest.raises(NotASnapshotError, match="found a folder that holds other things; no snapshot beside it"):
        previous.load_checkpoint(tmp_path / "folder")
