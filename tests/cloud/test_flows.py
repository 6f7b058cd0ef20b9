"""What users do with Lightning, with `Snapshot` and on the command line, where ``dirpath`` is a URL."""

import re
import warnings
from datetime import timedelta

import pytest
import torch

import lightning_snapshot
from lightning_snapshot import Snapshot, SnapshotCheckpointIO, StateDict, cli, latest, load_from_checkpoint
from lightning_snapshot.errors import ChecksumError, NotASnapshotError, SnapshotNotFoundError, StorageError
from lightning_snapshot.storage import METADATA_NAME, clear_leftovers, list_names, open_storage
from tests.cloud import ranks
from tests.cloud.proxy import Answer
from tests.lightning.models import difference
from tests.ranks.processes import run_ranks

pytestmark = [
    pytest.mark.timeout(300),
    # Lightning's own looks into the folder.
    pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available:UserWarning"),
]


@pytest.fixture
def fit(namespace, cls, make_trainer, cloud, in_environment, tmp_path):
    """Trains for some epochs with a ModelCheckpoint on the folder of the emulator; gives model and callback."""
    in_environment(cloud)

    def fit(max_epochs, *, ckpt_path=None, plugin=None, dirpath=cloud.folder, how=None, **arguments):
        checkpoint = namespace.pl.callbacks.ModelCheckpoint(dirpath, **arguments)
        model = cls.Tiny(scores=(3.0, 1.0, 2.0, 4.0))
        how = {
            "callbacks": [checkpoint],
            "default_root_dir": tmp_path if dirpath else cloud.folder,
            "max_epochs": max_epochs,
            "plugin": plugin or SnapshotCheckpointIO(),
            **(how or {}),
        }
        trainer = make_trainer(**how)
        trainer.fit(model, ckpt_path=ckpt_path)
        return model, checkpoint, trainer

    return fit


def test_top_k_last_best_and_resume(fit, cloud, cls):
    how = {"monitor": "score", "save_top_k": 2, "filename": "{epoch}", "save_last": True}
    _, checkpoint, trainer = fit(3, **how)
    assert list_names(cloud.folder) == ["epoch=1.ckpt", "epoch=2.ckpt", "last.ckpt"]
    assert checkpoint.best_model_path == f"{cloud.folder}/epoch=1.ckpt"
    trainer.validate(cls.Tiny(), ckpt_path="best", verbose=False)
    assert trainer.ckpt_path == f"{cloud.folder}/epoch=1.ckpt"
    resumed, _, trainer = fit(5, ckpt_path="last", **how)
    assert trainer.ckpt_path == f"{cloud.folder}/last.ckpt"
    assert resumed.trained_steps[0] == 12
    assert len(resumed.trained_steps) == 8
    assert latest(cloud.folder) == f"{cloud.folder}/last.ckpt"


def test_the_first_start_with_last_finds_nothing(fit):
    model, *_ = fit(1, ckpt_path="last")
    assert model.trained_steps[0] == 0


def test_versions_of_one_name_also_behind_training(fit, cloud):
    fit(2, filename="same", monitor="score", save_top_k=-1, plugin=SnapshotCheckpointIO(async_save=True))
    assert list_names(cloud.folder) == ["same-v1.ckpt", "same.ckpt"]
    for name in ("same-v1.ckpt", "same.ckpt"):
        assert list_names(f"{cloud.folder}/{name}") == [".data", METADATA_NAME]


def test_saves_behind_training_keep_top_k(fit, cloud):
    plugin = SnapshotCheckpointIO(async_save=True)
    fit(4, monitor="score", save_top_k=1, filename="{epoch}", save_last=True, plugin=plugin)
    assert list_names(cloud.folder) == ["epoch=1.ckpt", "last.ckpt"]


def test_saves_that_overlap_with_training(fit, cloud):
    how = {"save_top_k": -1, "filename": "{epoch}", "save_last": True}
    first, *_ = fit(2, plugin=SnapshotCheckpointIO(overlap=True), **how)
    second, *_ = fit(4, plugin=SnapshotCheckpointIO(overlap=True), ckpt_path="last", **how)
    assert second.trained_steps[0] == 8
    for epoch, weight in enumerate([*first.weights_in_evaluation, *second.weights_in_evaluation]):
        found = SnapshotCheckpointIO().load_checkpoint(f"{cloud.folder}/epoch={epoch}.ckpt")
        assert found["epoch"] == epoch
        assert torch.equal(found["state_dict"]["net.0.weight"], weight)


def test_a_link_becomes_a_copy_that_outlives_its_source(fit, cloud):
    # With a dirpath in a bucket, Lightning itself refuses save_last="link"; not so where that comes from the Trainer.
    how = {"dirpath": None, "monitor": "score", "save_top_k": 1, "filename": "{epoch}", "save_last": "link"}
    folder = f"{cloud.folder}/checkpoints"
    fit(3, **how)
    assert list_names(folder) == ["epoch=1.ckpt", "last.ckpt"]
    io = SnapshotCheckpointIO()
    best = io.load_checkpoint(f"{folder}/epoch=1.ckpt")
    io.remove_checkpoint(f"{folder}/epoch=1.ckpt")
    assert difference(io.load_checkpoint(f"{folder}/last.ckpt"), best) is None
    _, _, trainer = fit(4, ckpt_path="last", **how)
    assert trainer.ckpt_path == f"{folder}/last.ckpt"


@pytest.fixture
def commit_that_fails(cloud, proxy):
    """Lets each save to a path with ``epoch1`` in it fail at its end. Gives the options to reach the store with."""
    pattern = re.compile("(PUT|POST) .*epoch1.*snapshot")
    proxy.fault = lambda request: Answer(500) if pattern.match(f"{request.method} {request.path}") else None
    return {**cloud.server.options(proxy.endpoint), "retry_config": {"max_retries": 0}}


_LINKS = {"dirpath": None, "filename": "epoch{epoch}", "auto_insert_metric_name": False, "save_last": "link"}


@pytest.mark.parametrize(("max_epochs", "good"), [(2, 0), (3, 2)])
def test_a_save_behind_training_that_fails_is_not_copied(
    fit, cloud, proxy, commit_that_fails, namespace, monkeypatch, max_epochs, good
):
    monkeypatch.setattr(namespace.pl.callbacks.ModelCheckpoint, "CHECKPOINT_NAME_LAST", "last{epoch}")
    plugin = SnapshotCheckpointIO(storage_options=commit_that_fails, async_save=True, on_error="warn")
    _, checkpoint, _ = fit(max_epochs, plugin=plugin, **_LINKS)
    assert proxy.faults
    names = [f"epoch{good}.ckpt", f"last{good}.ckpt"]
    assert list_names(f"{cloud.folder}/checkpoints") == names
    paths = [f"{cloud.folder}/checkpoints/{name}" for name in names]
    assert [checkpoint.best_model_path, checkpoint.last_model_path] == paths
    assert [SnapshotCheckpointIO().load_checkpoint(path)["epoch"] for path in paths] == [good, good]


@pytest.mark.parametrize("async_save", [False, True])
def test_after_a_save_that_fails_the_last_link_is_good(fit, cloud, proxy, commit_that_fails, async_save):
    folder = f"{cloud.folder}/checkpoints"
    plugin = SnapshotCheckpointIO(storage_options=commit_that_fails, async_save=async_save)
    fit(1, plugin=plugin, **_LINKS)
    with pytest.raises(StorageError, match=r"epoch1\.ckpt"):
        fit(2, plugin=plugin, ckpt_path="last", **_LINKS)
    assert list_names(folder) == ["epoch0.ckpt", "last.ckpt"]
    assert SnapshotCheckpointIO().load_checkpoint(f"{folder}/last.ckpt")["epoch"] == 0
    proxy.fault = None
    model, checkpoint, _ = fit(2, plugin=plugin, ckpt_path="last", **_LINKS)
    assert model.trained_steps[0] == 4
    assert "epoch1.ckpt" in list_names(folder)
    assert SnapshotCheckpointIO().load_checkpoint(checkpoint.last_model_path)["epoch"] == 1


def test_load_from_checkpoint(cls, fit, cloud, make_trainer):
    model, checkpoint, _ = fit(1)
    stock, path = f"{cloud.folder}/stock.ckpt", checkpoint.best_model_path
    make_stock = make_trainer(plugin=None, max_epochs=1, enable_checkpointing=False)
    make_stock.fit(model)
    make_stock.save_checkpoint(stock)
    lightning_snapshot.enable()
    try:
        loaded = [cls.Tiny.load_from_checkpoint(each) for each in (path, stock)]
    finally:
        lightning_snapshot.disable()
    loaded.append(load_from_checkpoint(cls.Tiny, path))
    assert all(each.hparams.scores == (3.0, 1.0, 2.0, 4.0) for each in loaded)
    assert torch.equal(loaded[1].net[0].weight, model.net[0].weight)
    assert torch.equal(loaded[0].net[0].weight, loaded[2].net[0].weight)
    # And a stock checkpoint through the plugin.
    trainer = make_trainer()
    trainer.validate(cls.Tiny(scores=(1.0,)), ckpt_path=stock, verbose=False)
    trainer.save_checkpoint(stock)
    assert SnapshotCheckpointIO().load_checkpoint(stock)["state_dict"].keys() == model.state_dict().keys()


def test_fabric(namespace, cloud):
    plugin = SnapshotCheckpointIO(storage_options=cloud.options)
    fabric = namespace.fabric.Fabric(accelerator="cpu", devices=1, plugins=[plugin])
    path = f"{cloud.folder}/fabric.ckpt"
    fabric.save(path, {"step": 3, "x": torch.arange(5)})
    state = {"step": 0, "x": torch.zeros(5)}
    fabric.load(path, state)
    assert state["step"] == 3
    assert state["x"].tolist() == [0, 1, 2, 3, 4]


def test_snapshot_takes_options_at_construction_and_per_call(cloud):
    path, state = f"{cloud.folder}/a", StateDict(x=torch.arange(7), step=4)
    Snapshot.take(path, {"app": state}, storage_options=cloud.options)
    snapshot = Snapshot(path, storage_options=cloud.options)
    assert snapshot.read_object("0/app/x").tolist() == list(range(7))
    plugin = SnapshotCheckpointIO(storage_options={"part_bytes": 2**23})
    plugin.save_checkpoint({"x": 1}, f"{cloud.folder}/b", cloud.options)
    assert open_storage(f"{cloud.folder}/b", cloud.options).is_snapshot()


def test_the_newest_complete_snapshot_replaces_an_unfinished_save_and_a_damaged_one(cloud):
    io = SnapshotCheckpointIO(storage_options=cloud.options, on_damaged="previous")
    for number in (1, 2, 3):
        io.save_checkpoint({"number": number, "x": torch.full((9,), number)}, f"{cloud.folder}/{number}.ckpt")
    newest = open_storage(f"{cloud.folder}/3.ckpt", cloud.options)
    (name,) = (name for name in newest.place.files() if name.startswith(".data/"))
    newest.place.bucket.put(newest.place.key(name), b"x" * newest.place.files()[name].size_bytes)
    with pytest.raises(ChecksumError):
        SnapshotCheckpointIO(storage_options=cloud.options).load_checkpoint(f"{cloud.folder}/3.ckpt")
    with pytest.warns(UserWarning, match=r"Loaded .*/2\.ckpt instead"):
        assert io.load_checkpoint(f"{cloud.folder}/3.ckpt")["number"] == 2
    newest.place.delete([METADATA_NAME])
    with pytest.warns(UserWarning, match=r"unfinished save.*Loaded .*/2\.ckpt instead"):
        assert io.load_checkpoint(f"{cloud.folder}/3.ckpt")["number"] == 2
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert latest(cloud.folder, cloud.options) == f"{cloud.folder}/2.ckpt"
    with pytest.raises(SnapshotNotFoundError):
        io.load_checkpoint(f"{cloud.folder}/4.ckpt")
    with pytest.raises(NotASnapshotError, match=r"the newest snapshot in it is .*/2\.ckpt"):
        io.load_checkpoint(cloud.folder)


def test_leftovers_are_cleared_when_they_are_old(cloud, caplog):
    io = SnapshotCheckpointIO(storage_options=cloud.options)
    io.save_checkpoint({"x": 1}, f"{cloud.folder}/good.ckpt")
    dead = open_storage(f"{cloud.folder}/dead.ckpt", cloud.options)
    dead.begin("dead").create(".data/dead/0", 3).finish()
    removed = open_storage(f"{cloud.folder}/removed.ckpt", cloud.options)
    io.save_checkpoint({"x": torch.arange(3)}, f"{cloud.folder}/removed.ckpt")
    removed.place.bucket.copy(removed.place.key(METADATA_NAME), removed.place.key(METADATA_NAME + ".removed"))
    removed.place.delete([METADATA_NAME])
    copied = open_storage(f"{cloud.folder}/copied.ckpt", cloud.options)
    copied.place.bucket.put(copied.place.key(".data/a/0"), b"x")
    clear_leftovers(cloud.folder, cloud.options)
    # Somebody may still be at work on the others.
    assert list_names(cloud.folder, cloud.options) == ["copied.ckpt", "dead.ckpt", "good.ckpt"]
    dead.place.let_die("dead")
    for place in (dead.place, copied.place):
        place.delete_if_dead(timedelta(hours=-1))
    assert list_names(cloud.folder, cloud.options) == ["copied.ckpt", "good.ckpt"]
    assert not caplog.records


def test_the_command_line(cloud, in_environment, capsys):
    in_environment(cloud)
    io = SnapshotCheckpointIO()
    io.save_checkpoint({"epoch": 3, "global_step": 7, "state_dict": {"w": torch.ones(4)}}, f"{cloud.folder}/a.ckpt")
    printed = []
    for command in (["ls", cloud.folder], ["show", f"{cloud.folder}/a.ckpt"], ["verify", f"{cloud.folder}/a.ckpt"]):
        with pytest.raises(SystemExit) as caught:
            cli.main(command)
        assert caught.value.code == 0
        printed.append(capsys.readouterr().out)
    assert "a.ckpt" in printed[0]
    assert "complete" in printed[0]
    assert "global_step" in printed[1]
    assert "w" in printed[1]


@pytest.mark.distributed
def test_two_ranks_write_one_snapshot(s3):
    found = run_ranks(ranks.take_and_restore, 2, f"{s3.folder}/a", s3.options)
    assert found == [True, True]
    assert len(open_storage(f"{s3.folder}/a", s3.options).place.files()) >= 3


@pytest.mark.distributed
def test_two_ranks_hear_that_the_store_fails(s3):
    texts = run_ranks(ranks.fail_to_take, 2, "s3://nowhere/a", s3.options)
    assert all("no bucket or container of that name" in text for text in texts)


@pytest.mark.distributed
def test_a_trainer_on_two_ranks(s3):
    steps = run_ranks(ranks.train_and_resume, 2, "lightning", s3.folder, s3.server.environment())
    assert steps == [8, 8]
    assert list_names(s3.folder, s3.options) == ["epoch=0-step=8.ckpt", "epoch=1-step=16.ckpt", "last.ckpt"]


@pytest.mark.distributed
@pytest.mark.parametrize("cloud", ["s3"], indirect=True)  # to spawn takes long
def test_two_ranks_that_are_spawned_save_and_resume(fit, cloud):
    how = {"save_top_k": -1, "save_last": True}
    fit(1, **how)
    fit(2, ckpt_path="last", how={"devices": 2, "limit_val_batches": 0, "strategy": "ddp_spawn"}, **how)
    # Two ranks need half as many steps for an epoch. Had they begun anew, there would be one of two steps.
    assert list_names(cloud.folder) == ["epoch=0-step=4.ckpt", "epoch=1-step=6.ckpt", "last.ckpt"]
    assert Snapshot(f"{cloud.folder}/last.ckpt").metadata.world_size == 2


@pytest.mark.distributed
def test_all_ranks_hear_that_a_link_cannot_be_made(s3):
    texts = run_ranks(ranks.fail_to_link, 2, "lightning", s3.folder, s3.server.environment())
    assert all("last.ckpt" in text for text in texts)
