"""What killed saves and removals leave is gone after the next fit has started; nothing else is."""

import fcntl
import os
import shutil
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lightning_snapshot import SnapshotCallback, SnapshotCheckpointIO
from lightning_snapshot.errors import NotASnapshotError, StorageError
from lightning_snapshot.storage import METADATA_NAME
from lightning_snapshot.storage.local import LocalStorage
from tests.edges.faulty_posix import FaultyPosix, SimulatedCrash
from tests.lightning.models import STEPS_PER_EPOCH
from tests.lightning.test_bad_input import full_disk, tree

SAVE_ID = "20260729T120000-0123456789ab"
REMOVED_NAME = f"{METADATA_NAME}.removed"
# Calls of a removal of a small snapshot after which it is no snapshot any more, but not gone.
CRASHES = range(4, 14)


def dead_save(folder: Path) -> Path:
    path = folder / f".snapshot-{SAVE_ID}.tmp"
    (path / ".data" / SAVE_ID).mkdir(parents=True)
    (path / ".data" / SAVE_ID / "0_0").write_bytes(b"half")
    return path


def interrupted_removal(path: Path, crash_at: int = 6) -> Path:
    SnapshotCheckpointIO().save_checkpoint({"state_dict": {"a": torch.ones(3)}}, path)
    with suppress(SimulatedCrash):
        LocalStorage(path, str(path), FaultyPosix(crash_at=crash_at)).remove()
    assert path.exists()
    assert not (path / METADATA_NAME).exists()
    return path


@contextmanager
def locked(folder: Path):
    """As if somebody were writing there."""
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    yield
    os.close(descriptor)


@pytest.fixture
def fit(namespace, cls, make_trainer, tmp_path):
    """Trains four steps without a save, with a ModelCheckpoint for the folder ``run``."""

    def fit(model=None, **arguments):
        checkpoint = namespace.pl.callbacks.ModelCheckpoint(tmp_path / "run", every_n_epochs=100)
        make_trainer(max_epochs=1, callbacks=[checkpoint]).fit(model or cls.Tiny(), **arguments)

    return fit


@pytest.mark.parametrize("place", ["run", "."])
def test_dead_saves_are_cleared(fit, tmp_path, place):
    (tmp_path / "run").mkdir()
    dead_save(tmp_path / place)
    fit()
    assert tree(tmp_path) == {"run": None}


def test_dead_saves_in_the_folder_of_an_exception_checkpoint_are_cleared(namespace, cls, make_trainer, tmp_path):
    dead_save(tmp_path / "crashes")
    callback = namespace.pl.callbacks.OnExceptionCheckpoint(tmp_path / "crashes")
    with pytest.warns(UserWarning, match="no last checkpoint available|The last model"):
        make_trainer(max_epochs=1, callbacks=[callback]).fit(cls.Tiny())
    assert tree(tmp_path) == {"crashes": None}


def test_dead_saves_in_the_default_folder_are_cleared(cls, make_trainer, tmp_path):
    dead_save(tmp_path / "checkpoints")
    trainer = make_trainer(max_epochs=1, limit_val_batches=0)
    trainer.fit(cls.Tiny())
    assert os.listdir(tmp_path / "checkpoints") == ["epoch=0-step=4.ckpt"]


@pytest.mark.parametrize("crash_at", CRASHES)
def test_interrupted_removals_are_cleared(fit, tmp_path, crash_at):
    interrupted_removal(tmp_path / "run" / "a.ckpt", crash_at)
    fit()
    assert tree(tmp_path) == {"run": None}


def test_the_last_step_of_a_removal_is_cleared_too(fit, tmp_path):
    (tmp_path / "run" / "a.ckpt").mkdir(parents=True)
    fit()
    assert tree(tmp_path) == {"run": None}


def test_what_somebody_writes_stays(fit, tmp_path):
    replacing = interrupted_removal(tmp_path / "run" / "a.ckpt") / ".data" / SAVE_ID
    save = dead_save(tmp_path / "run")
    replacing.mkdir(parents=True, exist_ok=True)
    (replacing / "0_0").write_bytes(b"half")
    with locked(save), locked(replacing):
        fit()
        assert (save / ".data" / SAVE_ID / "0_0").read_bytes() == b"half"
        assert (replacing / "0_0").read_bytes() == b"half"
    fit()
    assert tree(tmp_path) == {"run": None}


def test_what_others_have_put_there_stays(fit, tmp_path):
    run = tmp_path / "run"
    (run / "empty").mkdir(parents=True)
    (run / "copied.ckpt/.data" / SAVE_ID).mkdir(parents=True)
    (run / "copied.ckpt/.data" / SAVE_ID / "0_0").write_bytes(b"the metadata is on its way")
    (run / f".snapshot-{SAVE_ID}.tmp").mkdir()
    (run / f".snapshot-{SAVE_ID}.tmp" / "notes.txt").write_text("mine")
    (run / "kept.ckpt").mkdir()
    (run / "kept.ckpt" / "notes.txt").write_text("mine")
    (run / "stock.ckpt").write_bytes(b"stock")
    (run / "dangling.ckpt").symlink_to("nowhere")
    interrupted_removal(tmp_path / "far" / "b.ckpt")
    (run / "far.ckpt").symlink_to(tmp_path / "far" / "b.ckpt")
    SnapshotCheckpointIO().save_checkpoint({"a": torch.ones(2)}, run / "good.ckpt")
    before = tree(tmp_path)
    fit()
    assert tree(tmp_path) == before
    assert (run / "dangling.ckpt").is_symlink()


def test_a_file_of_the_user_in_an_interrupted_removal_stays(fit, tmp_path):
    path = interrupted_removal(tmp_path / "run" / "a.ckpt", crash_at=4)
    (path / "notes.txt").write_text("mine")
    fit()
    assert tree(tmp_path / "run") == {"a.ckpt": None, "a.ckpt/notes.txt": b"mine"}


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_evaluation_clears_nothing(namespace, cls, make_trainer, tmp_path, verb):
    dead_save(tmp_path / "run")
    before = tree(tmp_path)
    checkpoint = namespace.pl.callbacks.ModelCheckpoint(tmp_path / "run")
    getattr(make_trainer(callbacks=[checkpoint]), verb)(cls.Tiny())
    assert tree(tmp_path) == before


@pytest.mark.parametrize(("rank", "plugin"), [(1, SnapshotCheckpointIO()), (0, None)])
def test_other_ranks_and_other_plugins_clear_nothing(tmp_path, rank, plugin):
    dead_save(tmp_path)
    before = tree(tmp_path)
    trainer = SimpleNamespace(
        is_global_zero=rank == 0,
        strategy=SimpleNamespace(checkpoint_io=plugin),
        checkpoint_callbacks=[],
        default_root_dir=tmp_path,
    )
    SnapshotCallback().on_train_start(trainer, None)
    assert tree(tmp_path) == before


def test_a_root_folder_that_cannot_be_reached_is_left_alone(caplog):
    trainer = SimpleNamespace(
        is_global_zero=True,
        strategy=SimpleNamespace(checkpoint_io=SnapshotCheckpointIO()),
        checkpoint_callbacks=[SimpleNamespace()],
        default_root_dir="nowhere://bucket/run",
    )
    SnapshotCallback().on_train_start(trainer, None)
    assert "could not clean up in nowhere://bucket/run" in caplog.text


# --- "last" ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def fit_last(namespace, cls, make_trainer, tmp_path):
    def fit(max_epochs: int):
        checkpoint = namespace.pl.callbacks.ModelCheckpoint(tmp_path / "run", save_top_k=-1, save_last=True)
        model = cls.Tiny()
        make_trainer(max_epochs=max_epochs, callbacks=[checkpoint]).fit(model, ckpt_path="last")
        return model.trained_steps

    return fit


@pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available:UserWarning")
@pytest.mark.parametrize("crash_at", [4, 6, 9])
def test_last_resumes_from_what_is_complete_and_keeps_its_name(fit_last, tmp_path, crash_at):
    fit_last(2)
    last = tmp_path / "run" / "last.ckpt"
    with suppress(SimulatedCrash):
        LocalStorage(last, str(last), FaultyPosix(crash_at=crash_at)).remove()
    dead_save(tmp_path / "run")
    with pytest.warns(UserWarning, match=r"last\.ckpt: .*unfinished.*Loaded .*epoch=1-step=8\.ckpt instead"):
        steps = fit_last(3)
    assert steps == list(range(2 * STEPS_PER_EPOCH, 3 * STEPS_PER_EPOCH))
    expected = [*(f"epoch={epoch}-step={4 * epoch + 4}.ckpt" for epoch in range(3)), "last.ckpt"]
    assert sorted(os.listdir(tmp_path / "run")) == expected
    assert fit_last(4) == list(range(3 * STEPS_PER_EPOCH, 4 * STEPS_PER_EPOCH))


@pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available:UserWarning")
def test_a_leftover_with_nothing_to_take_instead_stops_one_start_only(fit_last, tmp_path):
    interrupted_removal(tmp_path / "run" / "last.ckpt")
    with pytest.raises(NotASnapshotError, match=r"unfinished .*no snapshot beside it"):
        fit_last(1)
    assert fit_last(1) == list(range(STEPS_PER_EPOCH))
    assert sorted(os.listdir(tmp_path / "run")) == ["epoch=0-step=4.ckpt", "last.ckpt"]


# --- removal ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("filename", ["constant", "{epoch}"])
def test_a_save_that_fails_does_not_cost_the_previous_snapshot(namespace, cls, make_trainer, tmp_path, filename):
    """With the only snapshot of a run, before and after a failure, in the same name and in another."""

    class FillsDisk(namespace.pl.Callback):
        def on_train_epoch_start(self, trainer, *_):
            if trainer.current_epoch == 1:
                self.limit = full_disk(100)
                self.limit.__enter__()

        def on_exception(self, *_):
            self.limit.__exit__(None, None, None)

    def checkpoint():
        return namespace.pl.callbacks.ModelCheckpoint(tmp_path / "run", filename=filename, save_top_k=1)

    with pytest.raises(StorageError):
        make_trainer(max_epochs=3, callbacks=[FillsDisk(), checkpoint()]).fit(cls.Tiny())
    (name,) = os.listdir(tmp_path / "run")
    assert SnapshotCheckpointIO().load_checkpoint(tmp_path / "run" / name)["global_step"] == STEPS_PER_EPOCH

    model = cls.Tiny()
    make_trainer(max_epochs=2, callbacks=[checkpoint()]).fit(model, ckpt_path=tmp_path / "run" / name)
    assert model.trained_steps == [4, 5, 6, 7]


def test_a_snapshot_is_only_removed_once_a_newer_one_is_there(namespace, cls, make_trainer, tmp_path):
    seen = []

    class Watches(SnapshotCheckpointIO):
        def remove_checkpoint(self, path):
            others = [other for other in (tmp_path / "run").iterdir() if other != Path(path)]
            seen.append([self.load_checkpoint(other)["global_step"] for other in others])
            super().remove_checkpoint(path)

    checkpoint = namespace.pl.callbacks.ModelCheckpoint(tmp_path / "run", save_top_k=1)
    make_trainer(plugin=Watches(), max_epochs=3, callbacks=[checkpoint]).fit(cls.Tiny())
    assert seen == [[8], [12]]


@pytest.mark.parametrize("kind", ["ours", "torchsnapshot"])
def test_a_save_goes_over_an_interrupted_removal(tmp_path, kind):
    path = tmp_path / "a.ckpt"
    if kind == "ours":
        interrupted_removal(path)
    else:
        golden = Path(__file__).parents[1] / "golden/data/w1-basic-files"
        shutil.copytree(golden, path, ignore=shutil.ignore_patterns("expected.json"))
        with suppress(SimulatedCrash):
            LocalStorage(path, str(path), FaultyPosix(crash_at=4)).remove()
        assert len(tree(path)) > 1
    SnapshotCheckpointIO().save_checkpoint({"a": torch.ones(2)}, path)
    assert {name.split("/")[0] for name in tree(path)} == {METADATA_NAME, ".data"}
